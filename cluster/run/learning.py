"""The learner of a run, whole again after a rank was lost: the last commit, and what was trained since, once more.

Ranks live and die together. When one is gone, all are started anew, take up the last commit and train the batches of
the round again, which are all there: generated, scored and journalled. Same weights, same randomness, same batches:
the same result as if nothing had happened.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from cluster.errors import BrokenPromise, RemoteFailure
from cluster.learner_group import LearnerGroup
from cluster.run.checkpoints import Checkpoint, CheckpointStore
from cluster.run.commits import patience
from cluster.system import System
from cluster.waiting import ActorLost
from learner.types import Batch, UpdateReport, Vote

Result = TypeVar("Result")


class Learning:
    """What a run asks of its learner. A lost rank costs time, and ends the run only when it cannot be put back."""

    def __init__(self, system: System, store: CheckpointStore, say: Callable[[str], None]) -> None:
        """The system is launched; `say` speaks to the user."""
        self._system, self._store, self._say = system, store, say
        self._round = 0
        self._trained: list[tuple[Batch, bool]] = []
        """Batches of the round `_round` that are in the weights, in their order."""

    def resumed(self, round_: int) -> None:
        """The ranks hold the weights after this round, and it is committed."""
        self._round = round_

    def update(
        self, batch: Batch, progress: Callable[[int], None], *, first: bool = True
    ) -> Iterator[UpdateReport | None]:
        """LearnerGroup.update, whatever happens to the ranks."""
        if batch.round != self._round:
            self._round, self._trained = batch.round, []
        while True:
            try:
                for item in self._system.learners.update(batch, progress, first=first):
                    if item is not None:
                        self._trained.append((batch, first))
                    yield item
                return
            except ActorLost as lost:
                self.rebuild(lost)

    def surely(self, work: Callable[[], Result]) -> Result:
        """Do something that needs the ranks, again from the start when one is lost meanwhile."""
        while True:
            try:
                return work()
            except ActorLost as lost:
                if lost.name not in self._system.learners.names:
                    raise
                self.rebuild(lost)

    def save(self, directory: Path, round_: int, seconds: float) -> dict[str, Vote]:
        """LearnerGroup.save, whatever happens to the ranks."""

        def write() -> dict[str, Vote]:
            for path in directory.iterdir():  # what ranks had written when one was lost
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            return self._system.learners.save(directory, round_, seconds)

        return self.surely(write)

    def fingerprint(self, seconds: float) -> str:
        """LearnerGroup.fingerprint, whatever happens to the ranks."""
        return self.surely(lambda: self._system.learners.fingerprint(seconds))

    def export(self, directory: Path, seconds: float) -> None:
        """LearnerGroup.export, whatever happens to the ranks."""
        self.surely(lambda: self._system.learners.export(directory, seconds))

    def rebuild(self, lost: ActorLost) -> None:
        """Ranks anew, with the weights they had when the lost work began. RemoteFailure when that cannot be had."""
        checkpoint = self._checkpoint(lost)
        while True:
            self._system.replace_ranks(lost)
            try:
                restore_ranks(self._system.learners, checkpoint)
                if checkpoint.manifest.round < self._round:
                    for batch, first in self._trained:
                        for _ in self._system.learners.update(batch, lambda done: None, first=first):
                            pass
                break
            except ActorLost as again:
                lost = again
        self._system.tell(
            f"ranks are back: after round {checkpoint.manifest.round}, {len(self._trained)} batches trained again",
            "ranks_back",
            self._system.learners.names,
        )

    def _checkpoint(self, lost: ActorLost) -> Checkpoint:
        checkpoint = self._store.find_latest(self._say)
        has = None if checkpoint is None else checkpoint.manifest.round
        if checkpoint is None or has not in (self._round - 1, self._round):
            raise RemoteFailure(
                f"{lost}\n  All ranks would have to go back to the start of round {self._round}, and "
                f"{'nothing is committed' if has is None else f'the last commit is of round {has}'}"
                f" (--checkpoint.every): the rounds after it have to be done again"
            )
        return checkpoint


def restore_ranks(learners: LearnerGroup, checkpoint: Checkpoint) -> None:
    """Give the ranks the state of a checkpoint; BrokenPromise when they then hold other weights than it was made of."""
    manifest = checkpoint.manifest
    seconds = patience(manifest.size)
    if manifest.initial:  # nothing was saved: the model and the seed give it
        weights = learners.fingerprint(seconds)
    else:
        weights = learners.restore(checkpoint.path, manifest.files, seconds)
    if weights != manifest.weights:
        raise BrokenPromise(
            f"the ranks hold other weights than {checkpoint.path} was made of (sha256 {weights[:12]}, expected "
            f"{manifest.weights[:12]}). "
            + ("The weights of the model directory have changed." if manifest.initial else "This is a fault of ours.")
        )
