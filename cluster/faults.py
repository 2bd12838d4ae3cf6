"""Faults on purpose, for tests: ROLLEARN_FAULT="point[@n]:rank:round:action[:once]" does one thing at one place.

Without that variable nothing here does anything. Points: gen.before gen.mid gen.logprob score pack fwd bwd before_step
sync.send sync.recv ckpt.shard ckpt.vote ckpt.manifest ckpt.rename ckpt.latest ckpt.evict. Actions: kill9 stop raise
sleep enospc, and nan, which the place itself carries out. `@n` waits for the n-th time the place is reached in that
round, `@0` means every time.
With `once` the fault leaves a mark and does not come back in a process that replaces this one.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "ROLLEARN_FAULT"
SLEEP_SECONDS = 20.0
_reached: Counter[tuple[str, int, int]] = Counter()


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen, and where."""

    point: str
    """Place in the code."""
    rank: int
    """Rank or engine; 0 in the driver."""
    round: int
    """Round in which it happens."""
    action: str
    """What happens."""
    once: bool
    """Not again after it has happened."""
    time: int = 1
    """At which time of reaching the place; 0: every time."""


def parse_fault(text: str) -> Fault | None:
    """The fault a text describes; None for an empty one. ValueError when it is malformed."""
    if not text:
        return None
    point, rank, round_, action, *rest = text.split(":")
    if action not in ("kill9", "stop", "raise", "sleep", "enospc", "nan") or rest not in ([], ["once"]):
        raise ValueError(f"{VARIABLE}={text}: not point[@n]:rank:round:action[:once]")
    place, _, time_ = point.partition("@")
    return Fault(place, int(rank), int(round_), action, bool(rest), int(time_ or 1))


def reach(point: str, rank: int, round_: int, marks: Path | None = None) -> bool:
    """Say that a place was reached; the fault that waits there happens. True when the place must poison its numbers.

    `marks` is the folder in which `once` is remembered.
    """
    fault = parse_fault(os.environ.get(VARIABLE, ""))
    if fault is None or (fault.point, fault.rank, fault.round) != (point, rank, round_):
        return False
    _reached[(point, rank, round_)] += 1
    if fault.time and fault.time != _reached[(point, rank, round_)]:
        return False
    if fault.once and marks is not None:
        try:
            (marks / f"fault-{point}-{rank}-{round_}").touch(exist_ok=False)
        except FileExistsError:
            return False
    return _happen(fault)


def arm_learner(engine: Any, rank: int, round_: int, marks: Path) -> None:
    """Put the points of the learner around its engine, for one round; nothing without a fault."""
    fault = parse_fault(os.environ.get(VARIABLE, ""))
    if fault is None or fault.point not in ("fwd", "bwd", "before_step"):
        return
    for point, name in (("fwd", "score"), ("bwd", "backward"), ("before_step", "step")):
        if point == fault.point:
            setattr(engine, name, _armed(getattr(type(engine), name).__get__(engine), point, rank, round_, marks))


def arm_engine(engine: Any, index: int, round_: int, marks: Path) -> None:
    """Put `gen.logprob` where an engine reads the log-probs of a response; nothing without that fault."""
    fault = parse_fault(os.environ.get(VARIABLE, ""))
    if fault is None or fault.point != "gen.logprob":
        return
    read = type(engine)._logprobs.__get__(engine)

    def call(request: Any, response: Any, ids: Any) -> Any:
        if reach("gen.logprob", index, round_, marks):
            response.logprobs.logprobs[0] = float("nan")
        return read(request, response, ids)

    engine._logprobs = call


def _armed(method: Any, point: str, rank: int, round_: int, marks: Path) -> Any:
    def call(*values: Any) -> Any:
        poisoned = reach(point, rank, round_, marks)
        return method(*(value * float("nan") for value in values)) if poisoned else method(*values)

    return call


def _happen(fault: Fault) -> bool:
    if fault.action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "sleep":
        time.sleep(SLEEP_SECONDS)
    elif fault.action == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at {fault.point})")
    elif fault.action == "raise":
        raise RuntimeError(f"injected at {fault.point}, rank {fault.rank}, round {fault.round}")
    return fault.action == "nan"
