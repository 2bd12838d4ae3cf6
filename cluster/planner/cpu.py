"""The same arithmetic for processes on CPU cores: memory per process, and time from measured costs.

On a CPU small models are bound by what a step costs beside its FLOPs, so time comes from costs that are measured on the
machine at another size (`calibrate`), or from those of the machine the constants below were measured on.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planner.architecture import Architecture
from cluster.planner.memory import GIB, EngineShape, Memory, RankShape, engine_memory, kv_bytes_per_device, rank_memory
from cluster.planner.timing import Decoding, Phase
from cluster.planner.work import Work


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """Seconds on one core, float32."""

    step: float
    """One engine step beside what its responses cost."""
    response: float
    """One response in one engine step, beside its FLOPs."""
    engine_flops: float
    """FLOPs per second of an engine."""
    microbatch: float
    """One forward pass of the learner over a microbatch beside what its tokens cost (a backward pass: two)."""
    token: float
    """One token in one forward pass, beside its FLOPs (a backward pass: two)."""
    learner_flops: float
    """FLOPs per second of a rank."""
    parameter: float
    """One parameter in one optimizer step."""
    sync: float
    """A sync beside what its bytes cost."""
    sync_byte: float
    """One byte of weights to one engine."""
    turn: float
    """A round beside everything else: prompts, batch, commit, metrics."""
    turn_response: float
    """The same per response."""


MEASURED = CpuCosts(
    step=1e-4,
    response=134e-6,
    engine_flops=38e9,
    microbatch=6e-3,
    token=6.5e-6,
    learner_flops=50e9,
    parameter=33e-9,
    sync=0.08,
    sync_byte=2.5e-9,
    turn=7e-3,
    turn_response=35e-6,
)
"""Measured on two busy cores of an x86-64 server (AVX-512), see docs/simulator.md."""


@dataclass(frozen=True, slots=True)
class CpuSplit:
    """Processes on a machine without GPUs."""

    engines: int
    """One thread each."""
    ranks: int
    """One thread each."""
    cores: int
    """Cores they share."""
    kv_gib: float
    """KV cache of each engine, GiB."""
    zero_stage: int
    """DeepSpeed's."""
    checkpointing: bool
    """Activations are computed again."""


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Memory of the processes of a run on a CPU, float32."""

    engine: Memory
    """Each engine."""
    first_rank: Memory
    """Rank 0, from which the weights leave."""
    other_rank: Memory
    """Every other rank."""


def cpu_memory(model: Architecture, work: Work, split: CpuSplit, *, object_store: bool = True) -> CpuMemory:
    """Memory of engines and ranks; weights that travel by the object store stay mapped at both ends."""
    at_once = min(work.max_num_seqs, -(-work.responses // split.engines))
    shape = EngineShape(1, 4, at_once, 0, on_gpu=False)
    tokens = int(max(1, round(split.kv_gib)) * GIB) // kv_bytes_per_device(model, shape)
    engine = engine_memory(model, EngineShape(1, 4, at_once, tokens, on_gpu=False))
    per_rank = -(-work.responses // (work.minibatches * split.ranks)) * work.longest_row
    shape_of_rank = RankShape(
        ranks=split.ranks,
        zero_stage=split.zero_stage,
        size=4,
        microbatch_tokens=min(work.largest_microbatch, per_rank),
        checkpointing=split.checkpointing,
        reference=work.reference,
        on_gpu=False,
        adapter=work.adapter,
    )
    rank = rank_memory(model, shape_of_rank)
    size = 4 * (work.adapter or model.parameters)
    # New weights are unpacked beside the old ones.
    engine = Memory((*engine.parts, ("new weights", size)), engine.held)
    if not object_store:
        return CpuMemory(engine, rank, rank)
    return CpuMemory(_with_store(engine, size), _with_store(rank, size), rank)


def _with_store(memory: Memory, size: int) -> Memory:
    return Memory((*memory.parts, ("object store", size)), memory.held + size)


def cpu_decoding(model: Architecture, costs: CpuCosts, crowd: float = 1.0) -> Decoding:
    """The cost of an engine step; `crowd` is how many processes share a core."""
    each = costs.response + model.forward_flops(1, 0) / costs.engine_flops
    return Decoding(host=crowd * costs.step, host_response=crowd * each, weights=0.0, context=0.0, compute=0.0)


def cpu_learning(model: Architecture, costs: CpuCosts, tokens: float, microbatches: float, crowd: float = 1.0) -> float:
    """Seconds of one forward pass of one rank over so many tokens in so many microbatches (a backward pass: two)."""
    flops = model.forward_flops(1, 0) / costs.learner_flops
    return crowd * (microbatches * costs.microbatch + tokens * (costs.token + flops))


def cpu_phases(model: Architecture, work: Work, split: CpuSplit, costs: CpuCosts) -> tuple[Phase, ...]:
    """Expected seconds of each phase; engines and ranks take turns on the cores."""
    crowd_engines, crowd_ranks = max(1.0, split.engines / split.cores), max(1.0, split.ranks / split.cores)
    cost = cpu_decoding(model, costs, crowd_engines)
    share = work.responses / split.engines
    at_once = min(share, work.max_num_seqs)
    steps = max(float(work.longest), share * work.response_tokens / at_once)
    running = share * work.response_tokens / steps
    prefill = crowd_engines * model.forward_flops(1, 0) / costs.engine_flops * work.prompt_tokens * share
    said = f"{steps:,.0f} steps with {running:,.0f} responses x {1000 * cost.seconds(running, 0):.1f} ms"
    busy = "time per response in a step" if running * cost.host_response > cost.host else "time per step"
    phases = [Phase("generate", steps * cost.seconds(running, 0) + prefill, busy, said)]
    tokens = work.rows / split.ranks
    microbatches = max(
        work.minibatches, tokens / max(work.microbatch_tokens, work.prompt_tokens + work.response_tokens)
    )
    once = cpu_learning(model, costs, tokens, microbatches, crowd_ranks)
    passes = work.passes + (1.0 if split.checkpointing else 0.0)
    optimizer = work.minibatches * (work.adapter or model.parameters) * costs.parameter * crowd_ranks
    said = f"{passes:.2f} forward passes of {once:.2f} s over {tokens:,.0f} tokens, {work.minibatches} optimizer steps"
    phases.append(Phase("learn", passes * once + optimizer, "FLOPs and memory of the cores", said))
    size = 4 * (work.adapter or model.parameters)
    seconds = costs.sync + size * costs.sync_byte * split.engines
    phases.append(Phase("sync", seconds, "copies", f"{size / 1e6:.1f} MB to {split.engines} engine(s)"))
    turn = costs.turn + costs.turn_response * work.responses
    return (*phases, Phase("record", turn, "the driver", f"{work.responses:,} responses written down"))
