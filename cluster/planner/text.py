"""The capacity part of a plan as people read it: memory, time, what limits, what to type, and the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.planner.architecture import Architecture
from cluster.planner.memory import GIB, Memory
from cluster.planner.search import Way
from cluster.planner.split import USABLE, Cluster, Estimate
from cluster.planner.timing import Phase
from cluster.planner.work import Work


def model_lines(model: Architecture, work: Work, size: int) -> list[str]:
    """What the model is, and what a round of it is."""
    heads = f"{model.heads} heads and {model.kv_heads} key/value heads of {model.head_dim}"
    tied = "tied output" if model.tied else "own output layer"
    return [
        f"parameters {model.parameters:,} ({model.family}: {model.layers} layers of {model.layer_parameters:,}, hidden "
        f"{model.hidden}, {heads}, vocabulary {model.vocab}, {tied})",
        f"KV cache   {model.kv_bytes(size) / 1024:.0f} KiB per token = 2 x {model.layers} layers x {model.kv_size} x "
        f"{size} bytes",
        f"assumed    {work.response_tokens:,.0f} tokens per response on average, the longest {work.longest:,}, after "
        f"{work.prompt_tokens:,.0f} of prompt: {work.tokens / 1e6:,.2f} M tokens generated, {work.rows / 1e6:,.2f} M "
        f"learned on per round",
    ]


def estimate_lines(title: str, found: Estimate, cluster: Cluster, work: Work) -> list[str]:
    """One split: who sits where, memory, phases, and what limits."""
    split = found.split
    lines = [
        f"{title:<10} {split.placement}, {split.schedule}: {split.engines} engine(s) of {split.tensor_parallel} GPU(s) "
        f"and {split.ranks} rank(s), ZeRO {split.zero_stage}"
        + (", activations recomputed" if split.checkpointing else "")
        + (", optimizer on the host" if split.offload else "")
        + f", microbatches of {split.microbatch_tokens} tokens"
    ]
    if found.missing:
        lines += [f"  missing  {shortfall}" for shortfall in found.shortfalls]
    lines += ["  memory   GiB per GPU" + f"{'':>26}{'engine':>8}{'rank':>8}"]
    lines += [f"           {row}" for row in memory_rows(found.engine, found.rank)]
    held = found.kv_tokens / (work.prompt_tokens + work.response_tokens)
    lines.append(f"  KV room  {found.kv_tokens:,} tokens per engine: {held:,.0f} responses of the mean length at once")
    if found.host:
        node = min(split.ranks, cluster.per_node) * found.host / GIB
        lines.append(
            f"  host     {found.host / GIB:.1f} GiB of optimizer state per rank in host memory, {node:,.0f} a node"
        )
    if not found.missing:
        lines += time_lines(found.phases, found.seconds)
    usable = USABLE * cluster.device.memory / GIB
    lines.append(f"  usable   {usable:.1f} of {cluster.device.memory / GIB:.1f} GiB per GPU ({USABLE:.0%})")
    return lines


def memory_rows(engine: Memory, rank: Memory) -> list[str]:
    """Parts of an engine's and a rank's memory side by side, in GiB."""
    of_engine, of_rank = dict(engine.parts), dict(rank.parts)
    names = list(dict.fromkeys([*of_engine, *of_rank]))
    rows = [f"{name:<37}{_cell(of_engine.get(name))}{_cell(of_rank.get(name))}" for name in names]
    return [*rows, f"{'at the worst moment':<37}{_cell(engine.peak)}{_cell(rank.peak)}"]


def time_lines(phases: Sequence[Phase], seconds: float) -> list[str]:
    """Phases of a round with their arithmetic, the whole, and what limits it."""
    lines = ["  time     seconds per round"]
    for phase in phases:
        lines.append(f"           {phase.name:<15}{phase.seconds:>9.1f}   {phase.arithmetic}")
    longest = max(phases, key=lambda phase: phase.seconds)
    lines.append(f"           {'round':<15}{seconds:>9.1f}")
    lines.append(f"  limit    {longest.name} ({longest.seconds / seconds:.0%} of a round): {longest.bound}")
    return lines


def advice_lines(ways: Sequence[Way]) -> list[str]:
    """What would fit."""
    if not ways:
        return ["nearest    nothing near fits: neither more nor larger GPUs, nor shorter responses"]
    lines = []
    for way in ways:
        lines.append(f"fits with  {way.what}: {way.found.seconds:,.0f} s per round, limited by {way.found.limit.bound}")
        lines.append(f"           {way.found.split.flags()}")
    return lines


def _cell(size: int | None) -> str:
    return f"{'':>8}" if size is None else f"{size / GIB:>8.2f}"


def gib(model_bytes: float) -> str:
    """Bytes as GiB."""
    return f"{model_bytes / GIB:.1f} GiB"
