"""New weights for every engine, and the proof that they arrived."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.errors import BrokenPromise
from cluster.transport import Transport
from cluster.waiting import ActorLost, dead_among, fetch_all
from rollout.types import Probe, Receipt

PROBE_COLUMNS = 16
AUTOPSY = 5.0
"""Seconds in which the death of a rank must come to light after a sync has failed."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync did."""

    version: int
    """Version the engines now hold."""
    seconds: float
    """Wall seconds of the whole sync, proof included."""
    tensors: int
    """Tensors sent."""


def make_probe(shapes: Mapping[str, tuple[int, ...]], version: int, dtype: str) -> Probe:
    """Which columns to read back: other ones at every version, so that in time all of them are looked at."""
    columns = {}
    for name, shape in shapes.items():
        width = shape[1] if len(shape) > 1 else 0
        draw = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()) + version))
        chosen = draw.choice(width, size=min(PROBE_COLUMNS, width), replace=False) if width else np.empty(0)
        columns[name] = np.sort(chosen).astype(np.int32)
    return Probe(columns, dtype)


def compare(expected: Mapping[str, str], receipts: Mapping[str, Receipt], version: int) -> None:
    """Pure check of the receipts; BrokenPromise names engine, tensors and the likely cause."""
    for name, receipt in receipts.items():
        if receipt.version != version:
            raise BrokenPromise(f"{name} holds weights version {receipt.version} after the sync to version {version}")
        if not receipt.cache_reset:
            raise BrokenPromise(
                f"{name} did not empty its prefix cache after the sync to version {version}: it would answer from "
                f"older weights. Requests were probably still in flight."
            )
        missing = sorted(set(expected) - set(receipt.digests))
        found = receipt.digests
        wrong = sorted(tensor for tensor in expected if found.get(tensor, expected[tensor]) != expected[tensor])
        if missing or wrong:
            raise BrokenPromise(
                f"{name} does not hold the weights of version {version} that the learner sent.\n"
                f"  different: {_some(wrong)}\n  not found in the engine: {_some(missing)}\n"
                f"  All tensors different: the sync did not reach the engine. Only lm_head.weight: the tied output "
                f"layer was not packed again. Single ones: they were dropped on the way or renamed by the engine."
            )


def sync_weights(
    learners: list[Any],
    engines: dict[str, Any],
    transport: Transport,
    shapes: Mapping[str, tuple[int, ...]],
    version: int,
    dtype: str,
    seconds: float,
    silence: float,
) -> SyncReport:
    """Move the learner's weights to all engines as `version`; BrokenPromise when a receipt differs.

    Every part of it may take `seconds`, but for the first: opening is no work, so an engine that does not answer within
    `silence` seconds hangs, perhaps since the generation before (others have done what it had).
    ActorLost names who is gone: a rank, even where that came to light in an engine that waited for its weights.
    """
    started = time.monotonic()
    probe = make_probe(shapes, version, dtype)
    opening = {name: engine.begin_load.remote() for name, engine in engines.items()}
    fetch_all(opening, min(silence, seconds), "opening the weight sync")
    try:
        tensors = transport.send(learners, engines, dtype, seconds)
    except ActorLost as lost:
        asked = {f"learner-{rank}": learner.usage.remote() for rank, learner in enumerate(learners)}
        if (gone := dead_among(asked, AUTOPSY)) is not None and lost.name != gone:
            raise ActorLost(gone, f"sending weights: the process died ({lost})") from None
        raise
    calls = {f"learner-{rank}": learner.digests.remote(probe) for rank, learner in enumerate(learners)}
    calls |= {name: engine.finish_load.remote(version, probe) for name, engine in engines.items()}
    answers = fetch_all(calls, seconds, "closing the weight sync")
    compare(answers["learner-0"], {name: answers[name] for name in engines}, version)
    return SyncReport(version, time.monotonic() - started, tensors)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
