"""All learner ranks as one: the same batch to each, one report back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from cluster.care import Care
from cluster.errors import BrokenPromise, RemoteFailure
from cluster.fleet_events import Asked, Idle, Progress
from cluster.waiting import ENDED, ActorLost, Watch, fetch_all
from learner.types import Batch, SavedFile, UpdateReport, Vote

TICK = 0.05
"""Seconds after which the caller is given its turn, whether or not something came."""
AUTOPSY = 5.0
"""Seconds in which the death of one rank must come to light after another has raised."""


class LearnerGroup:
    """A group of ranks that live and die together."""

    def __init__(self, ranks: list[Any], care: Care) -> None:
        """`ranks` in rank order, loaded."""
        self.ranks = ranks
        self._care = care

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the ranks in the fleet."""
        return tuple(f"learner-{rank}" for rank in range(len(self.ranks)))

    @property
    def named(self) -> dict[str, Any]:
        """Name -> rank."""
        return dict(zip(self.names, self.ranks, strict=True))

    def update(
        self, batch: Batch, progress: Callable[[int], None], *, first: bool = True
    ) -> Iterator[UpdateReport | None]:
        """Train on a batch: yields None while the ranks are at work, and at the end the report.

        `first` says that no step of the round has been made yet; `progress` hears how many minibatches are done.
        Raises ActorLost when a rank died or hangs (the others are then stuck in a collective: all must be replaced),
        RemoteFailure when one raised, BrokenPromise when engine and learner disagree.
        """
        shared, watch = ray.put(batch), Watch()
        for name, actor in self.named.items():
            watch.add(name, actor.update.options(num_returns="streaming").remote(shared, first))
            self._care.tell(Asked(name))
        reports: dict[str, UpdateReport] = {}
        beats = dict.fromkeys(self.names, 0)
        while len(watch):
            for name, value in watch.poll(TICK):
                if isinstance(value, ActorLost):
                    raise _verdict(value, watch)
                beats[name] += 1
                self._care.tell(Idle(name) if value is ENDED else Progress(name, beats[name]))
                if isinstance(value, UpdateReport):
                    reports[name] = value
                elif name == self.names[0] and value is not ENDED:
                    progress(value)
            self._care.tick()
            for name in self.names:
                if not self._care.works(name):
                    raise ActorLost(name, self._care.reasons[name].partition(": ")[2], hung=True)
            yield None
        yield reports[self.names[0]]

    def check(self, batch: Batch, seconds: float) -> tuple[float, float]:
        """(mean, largest) |engine - learner| log-prob of some responses; BrokenPromise where it is above the limit."""
        calls = {name: actor.check.remote(batch) for name, actor in self.named.items()}
        try:
            gaps = fetch_all(calls, seconds, "comparing engine and learner").values()
        except RemoteFailure as failure:
            if "MismatchError" in str(failure):
                raise BrokenPromise(_last_line(str(failure), "MismatchError")) from None
            raise
        return sum(mean for mean, _ in gaps) / len(gaps), max(largest for _, largest in gaps)

    def shapes(self, seconds: float) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors."""
        answer = fetch_all({"learner-0": self.ranks[0].shapes.remote()}, seconds, "asking for the tensors")
        shapes: dict[str, tuple[int, ...]] = answer["learner-0"]
        return shapes

    def save(self, directory: Path, round_: int, seconds: float) -> dict[str, Vote]:
        """Have every rank write its part of a checkpoint into a directory; their votes. RemoteFailure without one."""
        calls = {name: actor.save.remote(str(directory), round_) for name, actor in self.named.items()}
        return fetch_all(calls, seconds, f"saving round {round_}")

    def restore(self, directory: Path, files: Sequence[SavedFile], seconds: float) -> str:
        """Have every rank load a checkpoint; hash of the weights they then hold."""
        calls = {name: actor.restore.remote(str(directory), files) for name, actor in self.named.items()}
        return str(fetch_all(calls, seconds, f"loading {directory}")["learner-0"])

    def fingerprint(self, seconds: float) -> str:
        """Hash of the weights."""
        calls = {name: actor.fingerprint.remote() for name, actor in self.named.items()}
        return str(fetch_all(calls, seconds, "reading the weights")["learner-0"])

    def export(self, directory: Path, seconds: float) -> None:
        """Write the model in Hugging Face format."""
        calls = {name: actor.export.remote(str(directory)) for name, actor in self.named.items()}
        fetch_all(calls, seconds, "exporting the model")


def _verdict(lost: ActorLost, watch: Watch) -> Exception:
    """What to make of the first rank that failed: a rank that raised may only have noticed that another died."""
    if "MismatchError" in lost.reason:
        return BrokenPromise(_last_line(lost.reason, "MismatchError"))
    if lost.cause is None:
        return lost
    until = time.monotonic() + AUTOPSY
    while len(watch) and time.monotonic() < until:
        for _, value in watch.poll(TICK):
            if isinstance(value, ActorLost) and value.cause is None:
                return value
    return RemoteFailure(str(lost))


def _last_line(reason: str, marker: str) -> str:
    lines = [line for line in reason.splitlines() if marker in line]
    return lines[-1].split(f"{marker}:", 1)[-1].strip() if lines else reason
