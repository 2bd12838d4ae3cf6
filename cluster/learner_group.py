"""All learner ranks as one: the same batch to each, one report back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from cluster.errors import BrokenPromise, RemoteFailure
from cluster.waiting import ActorLost, fetch_all, stream
from learner.types import Batch, SavedFile, UpdateReport, Vote


class LearnerGroup:
    """A group of ranks that live and die together."""

    def __init__(self, ranks: list[Any], heartbeat: float) -> None:
        """`ranks` in rank order, loaded."""
        self.ranks = ranks
        self._heartbeat = heartbeat

    def update(
        self, batch: Batch, progress: Callable[[int], None], *, first: bool = True
    ) -> Iterator[UpdateReport | None]:
        """Train on a batch: yields None while the ranks are at work, and at the end the report.

        `first` says that no step of the round has been made yet; `progress` hears how many minibatches are done.
        Raises RemoteFailure when a rank is lost (the others are then stuck in a collective: the group is finished),
        BrokenPromise when engine and learner disagree.
        """
        shared = ray.put(batch)
        streams = {
            f"learner-{rank}": actor.update.options(num_returns="streaming").remote(shared, first)
            for rank, actor in enumerate(self.ranks)
        }
        reports: dict[str, UpdateReport] = {}
        try:
            for name, item in stream(streams, self._heartbeat):
                if isinstance(item, UpdateReport):
                    reports[name] = item
                elif name == "learner-0":
                    progress(item)
                yield None
        except ActorLost as lost:
            if "MismatchError" in lost.reason:
                raise BrokenPromise(_last_line(lost.reason, "MismatchError")) from None
            raise RemoteFailure(f"{lost}") from None
        yield reports["learner-0"]

    def check(self, batch: Batch, seconds: float) -> tuple[float, float]:
        """(mean, largest) |engine - learner| log-prob of some responses; BrokenPromise where it is above the limit."""
        calls = {f"learner-{rank}": actor.check.remote(batch) for rank, actor in enumerate(self.ranks)}
        try:
            gaps = fetch_all(calls, seconds, "comparing engine and learner").values()
        except RemoteFailure as failure:
            if "MismatchError" in str(failure):
                raise BrokenPromise(_last_line(str(failure), "MismatchError")) from None
            raise
        return sum(mean for mean, _ in gaps) / len(gaps), max(largest for _, largest in gaps)

    def shapes(self, seconds: float) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors."""
        shapes: dict[str, tuple[int, ...]] = fetch_all({"learner-0": self.ranks[0].shapes.remote()}, seconds, "shapes")[
            "learner-0"
        ]
        return shapes

    def save(self, directory: Path, round_: int, seconds: float) -> dict[str, Vote]:
        """Have every rank write its part of a checkpoint into a directory; their votes. RemoteFailure without one."""
        calls = {f"learner-{rank}": actor.save.remote(str(directory), round_) for rank, actor in enumerate(self.ranks)}
        return fetch_all(calls, seconds, f"saving round {round_}")

    def restore(self, directory: Path, files: Sequence[SavedFile], seconds: float) -> str:
        """Have every rank load a checkpoint; hash of the weights they then hold."""
        calls = {
            f"learner-{rank}": actor.restore.remote(str(directory), files) for rank, actor in enumerate(self.ranks)
        }
        return str(fetch_all(calls, seconds, f"loading {directory}")["learner-0"])

    def fingerprint(self, seconds: float) -> str:
        """Hash of the weights."""
        calls = {f"learner-{rank}": actor.fingerprint.remote() for rank, actor in enumerate(self.ranks)}
        return str(fetch_all(calls, seconds, "reading the weights")["learner-0"])

    def export(self, directory: Path, seconds: float) -> None:
        """Write the model in Hugging Face format."""
        calls = {f"learner-{rank}": actor.export.remote(str(directory)) for rank, actor in enumerate(self.ranks)}
        fetch_all(calls, seconds, "exporting the model")


def _last_line(reason: str, marker: str) -> str:
    lines = [line for line in reason.splitlines() if marker in line]
    return lines[-1].split(f"{marker}:", 1)[-1].strip() if lines else reason
