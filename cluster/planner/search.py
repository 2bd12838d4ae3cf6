"""The best split of given GPUs, and when none fits, what is missing and the nearest that does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.planner.architecture import Architecture
from cluster.planner.devices import DEVICES
from cluster.planner.split import Cluster, Estimate, Split, estimate
from cluster.planner.work import Work

SIMPLER = 1.02
"""A split with less machinery is preferred when it is not slower than this factor."""
MOST_GPUS = 4096


def best(model: Architecture, work: Work, cluster: Cluster, schedule: str = "auto") -> Estimate | None:
    """The fastest split that fits, the simplest among those as fast; None when nothing fits."""
    fitting = [found for found in every(model, work, cluster, schedule) if not found.missing]
    if not fitting:
        return None
    fastest = min(found.seconds for found in fitting)
    return min((f for f in fitting if f.seconds <= SIMPLER * fastest), key=_machinery)


def closest(model: Architecture, work: Work, cluster: Cluster, schedule: str = "auto") -> Estimate | None:
    """The split that misses the fewest bytes per GPU; None when there is no split at all (one GPU, separate)."""
    return min(every(model, work, cluster, schedule), key=lambda found: (found.missing, found.seconds), default=None)


def every(model: Architecture, work: Work, cluster: Cluster, schedule: str) -> Iterator[Estimate]:
    """All splits worth looking at."""
    for split in splits(model, work, cluster, schedule):
        yield estimate(model, work, cluster, split)


def splits(model: Architecture, work: Work, cluster: Cluster, schedule: str) -> Iterator[Split]:
    """Tensor-parallel sizes, shares of the GPUs, ZeRO stages, and the two ways to trade time for memory."""
    for placement, taken, engines, size, ranks in _pools(model, work, cluster):
        if schedule != "auto" and taken != schedule and not (schedule == "async" and placement == "separate"):
            continue
        kept = "async" if schedule == "async" else taken
        for stage in (0, 2, 3) if ranks > 1 else (0,):
            for checkpointing in (False, True):
                for offload in (False, True):
                    for tokens in (4096, 8192, 16384, 32768):
                        yield Split(placement, kept, engines, size, ranks, stage, checkpointing, offload, tokens)


def _pools(model: Architecture, work: Work, cluster: Cluster) -> Iterator[tuple[str, str, int, int, int]]:
    """(placement, schedule, engines, devices of each, ranks)."""
    gpus, most = cluster.gpus, work.prompts
    for size in tensor_parallel_sizes(model, min(cluster.per_node, gpus)):
        yield "colocated", "phased", max(1, min(gpus // size, most)), size, min(gpus, max(most, size))
        unit = max(1, gpus // 16)
        for ranks in range(unit, gpus, unit):
            engines = min((gpus - ranks) // size, most)
            if engines and ranks <= most:
                yield "separate", "streamed", engines, size, ranks


def tensor_parallel_sizes(model: Architecture, most: int) -> list[int]:
    """Numbers of devices that the heads of the model can be split over."""
    sizes = [size for size in (1, 2, 4, 8) if size <= most and model.heads % size == 0]
    return [s for s in sizes if model.kv_heads % s == 0 or s % model.kv_heads == 0]


def _machinery(found: Estimate) -> tuple[int, bool, bool, int, float]:
    split = found.split
    return (split.offload, split.checkpointing, split.schedule != "phased", split.zero_stage, found.seconds)


@dataclass(frozen=True, slots=True)
class Way:
    """One change after which the run fits."""

    what: str
    """In words."""
    found: Estimate
    """The best split after it."""


def ways_to_fit(model: Architecture, work: Work, cluster: Cluster) -> list[Way]:
    """The nearest changes after which something fits: more GPUs, a larger kind of GPU, shorter responses."""
    ways = []
    for gpus in _more(cluster):
        ways += _way(f"{gpus} x {cluster.device.name}", model, work, dataclasses.replace(cluster, gpus=gpus))
        if ways:
            break
    before = len(ways)
    for device in sorted(DEVICES, key=lambda device: device.memory):
        if device.memory > cluster.device.memory and len(ways) == before:
            larger = dataclasses.replace(cluster, device=device)
            ways += _way(f"{cluster.gpus} x {device.name}", model, work, larger)
    before, longest = len(ways), work.longest // 2
    while longest >= 128 and len(ways) == before:
        shorter = dataclasses.replace(
            work,
            longest=longest,
            longest_row=work.longest_row - work.longest + longest,
            response_tokens=min(work.response_tokens, longest / 2),
        )
        ways += _way(f"--rollout.max-new-tokens {longest}", model, shorter, cluster)
        longest //= 2
    return ways


def _way(what: str, model: Architecture, work: Work, cluster: Cluster) -> list[Way]:
    found = best(model, work, cluster) if _fits(model, work, cluster) else None
    return [] if found is None else [Way(what, found)]


def _fits(model: Architecture, work: Work, cluster: Cluster) -> bool:
    """Whether the thriftiest splits fit: quicker than looking for the best one."""
    for placement, schedule, engines, size, ranks in _pools(model, work, cluster):
        thrifty = Split(placement, schedule, engines, size, ranks, 3 if ranks > 1 else 0, True, True, 4096)
        if not estimate(model, work, cluster, thrifty).missing:
            return True
    return False


def _more(cluster: Cluster) -> Iterator[int]:
    """Larger numbers of GPUs: up to a node one by one in powers of two, then node by node, then by eighths."""
    gpus = cluster.gpus
    while gpus < MOST_GPUS:
        gpus = (
            min(gpus * 2, cluster.per_node) if gpus < cluster.per_node else gpus + cluster.per_node * max(1, gpus // 64)
        )
        yield gpus
