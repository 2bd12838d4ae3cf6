"""From a split of GPUs, or of a machine's cores, to a scenario to be played out: the planner's costs, unchanged."""

from __future__ import annotations

from cluster.planner import timing
from cluster.planner.architecture import Architecture
from cluster.planner.cpu import CpuCosts, CpuSplit, cpu_decoding
from cluster.planner.memory import EngineShape, kv_bytes_per_device
from cluster.planner.split import Cluster, Split, estimate
from cluster.planner.timing import Pool
from cluster.planner.work import Work
from cluster.schedule import Kind
from cluster.simulator.engine import EngineModel
from cluster.simulator.learner import LearnerModel
from cluster.simulator.lengths import Lengths
from cluster.simulator.scenario import Scenario

RECORD, RECORD_RESPONSE = 1.0, 50e-6
"""Seconds to commit a round on GPUs, and per response (an assumption: the driver writes beside a checkpoint)."""


def on_gpus(
    model: Architecture, work: Work, cluster: Cluster, split: Split, lengths: Lengths, *, max_lag: int = 1, rounds: int
) -> Scenario:
    """A scenario of a split on GPUs."""
    device = cluster.device
    found = estimate(model, work, cluster, split)
    shape = EngineShape(split.tensor_parallel, 2, 1, 0, on_gpu=True)
    cost = timing.decoding(model, device, split.tensor_parallel, kv_bytes_per_device(model, shape))
    room = max(1, int(found.kv_tokens / (work.prompt_tokens + lengths.mean)))
    read = model.forward_flops(1, work.prompt_tokens / 2, scored=0) * work.prompt_tokens
    seconds = {phase.name: phase.seconds for phase in found.phases}
    lag = f", lag {max_lag}" if split.schedule == "async" else ""
    return Scenario(
        name=f"{split.placement} {split.schedule}{lag}",
        schedule=_kind(split.schedule),
        max_lag=max_lag if split.schedule == "async" else 0,
        rounds=rounds,
        groups=(work.prompts // work.minibatches,) * work.minibatches,
        group_size=work.group_size,
        lengths=lengths,
        prompt_tokens=work.prompt_tokens,
        engines=split.engines,
        engine=EngineModel(
            cost=cost,
            slots=min(work.max_num_seqs, room),
            prompt_tokens=work.prompt_tokens,
            prefill=read / (split.tensor_parallel * device.flops * timing.PREFILL),
        ),
        learner=_gpu_learner(model, work, cluster, split),
        sync=seconds["sync"],
        record=RECORD + RECORD_RESPONSE * work.responses,
        turn=seconds.get("taking turns", 0.0),
        gpus=cluster.gpus,
    )


def _gpu_learner(model: Architecture, work: Work, cluster: Cluster, split: Split) -> LearnerModel:
    device, ranks = cluster.device, Pool(split.ranks, 1, cluster.per_node)
    stage, trained = split.zero_stage, work.adapter or model.parameters
    forward, training, per_step = timing.sends(model, device, ranks, stage, split.checkpointing, work.adapter)
    step = per_step + timing.optimizer_step(trained, device, split.ranks, stage, split.offload)[0]
    once = timing.pass_seconds(model, device, work, split.ranks)
    extra = float(split.checkpointing) + float(work.reference)
    return LearnerModel(
        ranks=split.ranks,
        token=once * split.ranks / (work.rows * timing.PADDING),
        padding=timing.PADDING,
        microbatch=timing.MICROBATCH,
        budget=max(split.microbatch_tokens, round(work.prompt_tokens + work.response_tokens)),
        passes=3.0 + extra,
        forward_sends=forward,
        training_sends=training,
        step=step,
        old_logprobs=work.old_logprobs,
    )


def on_cores(
    model: Architecture, work: Work, split: CpuSplit, costs: CpuCosts, lengths: Lengths, *, rounds: int
) -> Scenario:
    """A scenario on the cores of one machine: engines and ranks take turns."""
    crowd_engines, crowd_ranks = max(1.0, split.engines / split.cores), max(1.0, split.ranks / split.cores)
    flops = model.forward_flops(1, 0)
    trained = work.adapter or model.parameters
    return Scenario(
        name="cpu phased",
        schedule="phased",
        max_lag=0,
        rounds=rounds,
        groups=(work.prompts // work.minibatches,) * work.minibatches,
        group_size=work.group_size,
        lengths=lengths,
        prompt_tokens=work.prompt_tokens,
        engines=split.engines,
        engine=EngineModel(
            cost=cpu_decoding(model, costs, crowd_engines),
            slots=work.max_num_seqs,
            prompt_tokens=work.prompt_tokens,
            prefill=crowd_engines * flops / costs.engine_flops * work.prompt_tokens,
            prefill_each=True,
        ),
        learner=LearnerModel(
            ranks=split.ranks,
            token=crowd_ranks * (costs.token + flops / costs.learner_flops),
            padding=1.0,
            microbatch=crowd_ranks * costs.microbatch,
            budget=max(work.microbatch_tokens, work.longest_row),
            passes=3.0 + float(split.checkpointing) + float(work.reference),
            forward_sends=0.0,
            training_sends=0.0,
            step=crowd_ranks * costs.parameter * trained,
            old_logprobs=work.old_logprobs,
        ),
        sync=costs.sync + 4 * trained * costs.sync_byte * split.engines,
        record=costs.turn + costs.turn_response * work.responses,
        engine_start=20.0,
        ranks_start=12.0,
        restore=1.0,
        gpus=split.cores,
    )


def _kind(schedule: str) -> Kind:
    kinds: dict[str, Kind] = {"phased": "phased", "streamed": "streamed", "async": "async"}
    return kinds[schedule]
