"""One way to split GPUs between engines and ranks: what it needs, how long a round takes, and whether it fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cluster.planner import timing
from cluster.planner.architecture import Architecture
from cluster.planner.devices import Device
from cluster.planner.memory import (
    GIB,
    GPU_ENGINE_ASLEEP,
    GPU_RANK_LIBRARIES,
    EngineShape,
    Memory,
    RankShape,
    engine_memory,
    host_bytes,
    kv_bytes_per_device,
    kv_room,
    rank_memory,
)
from cluster.planner.timing import Phase, Pool
from cluster.planner.work import Work

USABLE = 0.95
"""Share of a GPU that may be planned for; the rest is fragmentation and what the driver keeps."""
SEPARATE_SHARE, COLOCATED_SHARE = 0.85, 0.5
"""Share of a GPU that an engine takes (rollout/config.py)."""
LEARNING = ("old log-probs", "reference", "learn", "optimizer")


@dataclass(frozen=True, slots=True)
class Split:
    """Who gets which GPUs, and how the ranks save memory."""

    placement: str
    """colocated or separate."""
    schedule: str
    """phased, streamed or async."""
    engines: int
    """Rollout engines."""
    tensor_parallel: int
    """GPUs of each."""
    ranks: int
    """Learner ranks, a GPU each."""
    zero_stage: int
    """DeepSpeed's."""
    checkpointing: bool
    """Activations are computed again."""
    offload: bool
    """Optimizer state in host memory."""
    microbatch_tokens: int
    """Budget of a microbatch."""

    def flags(self) -> str:
        """What to type for it."""
        words = [
            f"--cluster.placement {self.placement} --cluster.schedule {self.schedule}",
            f"--rollout.engines {self.engines} --rollout.tensor-parallel {self.tensor_parallel}",
            f"--learner.ranks {self.ranks} --learner.zero-stage {self.zero_stage}",
            f"--learner.microbatch-tokens {self.microbatch_tokens}",
        ]
        words += ["--learner.gradient-checkpointing"] * self.checkpointing + ["--learner.offload"] * self.offload
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs to plan for."""

    device: Device
    """What kind."""
    gpus: int
    """How many in all."""
    per_node: int
    """How many in a node."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a split comes to."""

    split: Split
    """Which."""
    engine: Memory
    """Of each GPU of an engine."""
    rank: Memory
    """Of each rank."""
    kv_tokens: int
    """Tokens of KV cache an engine has room for."""
    host: int
    """Host memory of each rank (off-loading, or the optimizer's while engines are awake)."""
    phases: tuple[Phase, ...]
    """In their order."""
    seconds: float
    """A round, overlaps taken into account."""
    shortfalls: tuple[str, ...]
    """Why it does not fit; empty when it does."""
    missing: int
    """Bytes per GPU that are missing (0: fits)."""

    @property
    def limit(self) -> Phase:
        """The longest phase."""
        return max(self.phases, key=lambda phase: phase.seconds)


def estimate(model: Architecture, work: Work, cluster: Cluster, split: Split) -> Estimate:
    """Memory, time and what is missing of a split."""
    work = dataclasses.replace(work, microbatch_tokens=split.microbatch_tokens)
    colocated = split.placement == "colocated"
    rank_shape = RankShape(
        ranks=split.ranks,
        zero_stage=split.zero_stage,
        size=2,
        microbatch_tokens=work.largest_microbatch,
        checkpointing=split.checkpointing,
        reference=work.reference,
        on_gpu=True,
        offload=split.offload,
        adapter=work.adapter,
    )
    rank = rank_memory(model, rank_shape)
    if colocated:
        rank = Memory((*rank.parts, ("sleeping engine", GPU_ENGINE_ASLEEP)), rank.held + GPU_ENGINE_ASLEEP)
    share = COLOCATED_SHARE if colocated else SEPARATE_SHARE
    at_once = min(work.max_num_seqs, -(-work.responses // split.engines))
    shape = EngineShape(split.tensor_parallel, 2, at_once, 0, on_gpu=True)
    allowed = int(share * cluster.device.memory)
    tokens = kv_room(model, shape, allowed)
    engine = engine_memory(model, dataclasses.replace(shape, kv_tokens=tokens))
    shortfalls, missing = _missing(model, work, cluster, split, rank, rank_shape, shape, tokens, allowed)
    phases = _phases(model, work, cluster, split, shape, max(tokens, work.longest_row))
    host = host_bytes(model, rank_shape)
    if colocated and not split.offload:
        trained = work.adapter or model.parameters
        host = 12 * (-(-trained // split.ranks) if split.zero_stage else trained)
    seconds = _round(split, work, phases)
    return Estimate(split, engine, rank, tokens, host, phases, seconds, shortfalls, missing)


def _missing(
    model: Architecture,
    work: Work,
    cluster: Cluster,
    split: Split,
    rank: Memory,
    rank_shape: RankShape,
    shape: EngineShape,
    tokens: int,
    allowed: int,
) -> tuple[tuple[str, ...], int]:
    """What does not fit, in words, and the largest number of bytes missing on one GPU."""
    memory, said, missing = cluster.device.memory, [], 0
    usable = int(USABLE * memory)
    if rank.peak > usable:
        said.append(f"a rank needs {_gib(rank.peak)} of {_gib(usable)} usable GiB")
        missing = rank.peak - usable
    if tokens < work.longest_row:
        needed = engine_memory(model, dataclasses.replace(shape, kv_tokens=work.longest_row)).peak
        said.append(f"an engine needs {_gib(needed)} GiB for one response of the longest kind, and has {_gib(allowed)}")
        missing = max(missing, needed - allowed)
    if split.placement == "colocated":
        own = -(-model.parameters // split.ranks) if split.zero_stage == 3 else model.parameters
        resting = GPU_RANK_LIBRARIES + rank_shape.size * own * (2 if work.reference and not work.adapter else 1)
        if resting + allowed > usable:
            said.append(
                f"beside an engine's {_gib(allowed)} GiB a resting rank needs {_gib(resting)} of {_gib(usable)}"
            )
            missing = max(missing, resting + allowed - usable)
    if split.engines < 1 or split.ranks < 1:
        said.append("too few GPUs for an engine and a rank")
        missing = max(missing, 1)
    return tuple(said), missing


def _phases(
    model: Architecture, work: Work, cluster: Cluster, split: Split, shape: EngineShape, tokens: int
) -> tuple[Phase, ...]:
    device = cluster.device
    ranks = Pool(split.ranks, 1, cluster.per_node)
    engines = Pool(split.engines, split.tensor_parallel, cluster.per_node)
    colocated = split.placement == "colocated"
    kv_bytes = kv_bytes_per_device(model, shape)
    cost = timing.decoding(model, device, split.tensor_parallel, kv_bytes)
    room = max(1, int(tokens / (work.prompt_tokens + work.response_tokens)))
    phases = [timing.generate(model, device, work, split.engines, cost, room)]
    if split.schedule == "streamed":
        work = dataclasses.replace(work, old_logprobs=False)  # they are the sampler's
    phases += timing.learn(model, device, work, ranks, split.zero_stage, split.checkpointing, split.offload)
    phases.append(timing.sync(work.adapter or model.parameters, device, ranks, engines, colocated))
    if colocated and not split.offload:
        phases.append(timing.turn(work.adapter or model.parameters, split.ranks, split.zero_stage))
    return tuple(phases)


def _round(split: Split, work: Work, phases: tuple[Phase, ...]) -> float:
    """Seconds of a round under the schedule: phased adds up, streamed overlaps within it, async across rounds."""
    generate = sum(phase.seconds for phase in phases if phase.name == "generate")
    learn = sum(phase.seconds for phase in phases if phase.name in LEARNING)
    rest = sum(phase.seconds for phase in phases) - generate - learn
    if split.schedule == "streamed":
        # The first minibatch waits for its groups, and the last is learned when all have come.
        return rest + max(generate + learn / work.minibatches, generate / work.minibatches + learn)
    if split.schedule == "async":
        return rest + max(generate, learn)
    return rest + generate + learn


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
