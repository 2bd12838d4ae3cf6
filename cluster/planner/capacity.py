"""`launch.py plan`: what the run needs in memory and time, on this machine or on the GPUs that were named."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.plan import Plan
from cluster.planner.architecture import Architecture
from cluster.planner.cpu import MEASURED, CpuSplit, cpu_memory, cpu_phases
from cluster.planner.devices import device_named
from cluster.planner.memory import GIB
from cluster.planner.search import best, closest, ways_to_fit
from cluster.planner.split import Cluster, Split, estimate
from cluster.planner.text import advice_lines, estimate_lines, memory_rows, model_lines, time_lines
from cluster.planner.work import Work
from cluster.resources import Node, Resources
from cluster.run.config import Config
from rollout.tasks import DEMO_SOURCE

NODE_CORES, NODE_MEMORY = 96, 1 << 40
"""Cores and host memory of a node that is only named, not there."""
GPU_MICROBATCH, CPU_MICROBATCH = 16384, 4096


@dataclass(frozen=True, slots=True)
class MeanLengths:
    """Mean lengths in tokens, where the user knows them."""

    prompt: int | None = None
    """Of a prompt."""
    response: int | None = None
    """Of a response."""


def named_cluster(gpu: str, gpus: int, per_node: int) -> Cluster:
    """The GPUs of `--gpu`, `--gpus` and `--gpus-per-node`; PlanError for a name that is not in the table."""
    return Cluster(device_named(gpu), gpus, per_node)


def named_resources(cluster: Cluster) -> Resources:
    """Nodes for those GPUs, as if they were there."""
    left = cluster.gpus
    nodes: list[Node] = []
    while left > 0:
        nodes.append(Node(f"node-{len(nodes)}", NODE_CORES, min(cluster.per_node, left), NODE_MEMORY))
        left -= cluster.per_node
    cores, memory = NODE_CORES * len(nodes), NODE_MEMORY * len(nodes)
    return Resources(cpus=cores, gpus=cluster.gpus, memory=memory, nodes=tuple(nodes))


def work_of(config: Config, plan: Plan, model: Architecture, lengths: MeanLengths) -> Work:
    """One round of a plan. Where lengths are not given: half the longest response; 256 tokens of prompt (demo: 6)."""
    demo = config.prompts.partition(":")[0] == DEMO_SOURCE
    prompt = lengths.prompt or (6 if demo else min(256, plan.max_prompt_tokens))
    # What the demo's prompts can be is known; another source may use all that is allowed.
    longest_prompt = 6 if demo else plan.max_prompt_tokens
    return Work(
        prompts=plan.prompts,
        group_size=plan.group_size,
        minibatches=plan.minibatches,
        prompt_tokens=prompt,
        response_tokens=lengths.response or plan.max_new_tokens / 2,
        longest=plan.max_new_tokens,
        longest_row=longest_prompt + plan.max_new_tokens,
        microbatch_tokens=config.learner.microbatch_tokens
        or (GPU_MICROBATCH if plan.device == "cuda" else CPU_MICROBATCH),
        max_num_seqs=config.rollout.max_num_seqs,
        old_logprobs=config.learner.old_logprobs != "sampler" and plan.schedule != "streamed",
        reference=config.kl.kind != "none",
        adapter=model.adapter(plan.lora_rank) if plan.lora_rank else 0,
    )


def asked_split(config: Config, plan: Plan, work: Work) -> Split:
    """The split that the configuration asks for."""
    return Split(
        placement=plan.placement,
        schedule=plan.schedule,
        engines=plan.engines,
        tensor_parallel=config.rollout.tensor_parallel,
        ranks=plan.ranks,
        zero_stage=config.learner.zero_stage,
        checkpointing=config.learner.gradient_checkpointing,
        offload=config.learner.offload,
        microbatch_tokens=work.microbatch_tokens,
    )


def gpu_text(config: Config, plan: Plan, model: Architecture, work: Work, cluster: Cluster) -> tuple[str, bool]:
    """Capacity on GPUs as text, and whether anything fits."""
    device, asked = cluster.device, asked_split(config, plan, work)
    lines = [
        f"gpus       {cluster.gpus} x {device.name}, {cluster.per_node} per node: {device.memory / GIB:.1f} GiB, "
        f"{device.bandwidth / 1e12:.2f} TB/s, {device.flops / 1e12:.0f} TFLOPS bf16, links {device.link / 1e9:.0f} and "
        f"{device.network / 1e9:.0f} GB/s ({device.source})",
        *model_lines(model, work, 2),
    ]
    as_asked = estimate(model, work, cluster, asked)
    lines += estimate_lines("as asked", as_asked, cluster, work)
    schedule = config.cluster.schedule
    found = best(model, work, cluster, schedule)
    if found is None:
        nearest = closest(model, work, cluster, schedule)
        if nearest is not None:
            lines += estimate_lines("closest", nearest, cluster, work)
        lines.append("no split of these GPUs fits")
        return "\n".join(lines + advice_lines(ways_to_fit(model, work, cluster))), False
    if found.split == asked:
        lines.append("best       as asked")
    elif as_asked.missing or found.seconds < 0.95 * as_asked.seconds:
        gain = "" if as_asked.missing else f" ({as_asked.seconds / found.seconds:.2f} times as fast)"
        lines += estimate_lines("best", found, cluster, work)
        lines.append(f"to type    {found.split.flags()}{gain}")
    else:
        lines.append("best       as asked, within 5 %")
    return "\n".join(lines), True


def cpu_split(config: Config, plan: Plan, resources: Resources) -> CpuSplit:
    """The processes of a plan on the cores of this machine."""
    return CpuSplit(
        engines=plan.engines,
        ranks=plan.ranks,
        cores=resources.cpus,
        kv_gib=config.rollout.kv_cache_gib,
        zero_stage=config.learner.zero_stage,
        checkpointing=config.learner.gradient_checkpointing,
    )


def cpu_text(config: Config, plan: Plan, model: Architecture, work: Work, resources: Resources) -> tuple[str, bool]:
    """Capacity on the cores of this machine as text, and whether it fits its memory."""
    split = cpu_split(config, plan, resources)
    memory = cpu_memory(model, work, split, object_store=plan.transport == "object_store")
    phases = cpu_phases(model, work, split, MEASURED)
    need = plan.engines * memory.engine.peak + memory.first_rank.peak + DRIVER
    need += (plan.ranks - 1) * memory.other_rank.peak
    fits = need <= resources.memory
    lines = [*model_lines(model, work, 4), "  memory   GiB per process" + f"{'':>22}{'engine':>8}{'rank 0':>8}"]
    lines += [f"           {row}" for row in memory_rows(memory.engine, memory.first_rank)]
    lines.append(
        f"  in all   {need / GIB:.1f} GiB for {plan.engines} engine(s), {plan.ranks} rank(s) and the driver, of "
        f"{resources.memory / GIB:.1f} GiB"
    )
    lines += time_lines(phases, sum(phase.seconds for phase in phases))
    if not fits:
        fewer = f"{(need - resources.memory) / GIB:.1f} GiB are missing. Try --rollout.engines 1 --learner.ranks 1"
        lines.append(f"  missing  {fewer}, a smaller --learner.microbatch-tokens, or a smaller model")
    return "\n".join(lines), fits


DRIVER = 900 << 20
"""The driver, Ray's own processes and the graders on one machine (measured)."""
