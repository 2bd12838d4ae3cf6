"""A lost rank: all ranks go back to the last commit and train the batches of the round again, each exactly once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import BrokenPromise, RemoteFailure
from cluster.run.checkpoints import CheckpointStore
from cluster.run.learning import Learning, restore_ranks
from cluster.system import System
from cluster.turns import Turns
from cluster.waiting import ActorLost
from learner.types import UpdateReport, Vote
from tests.pure.checkpoint_makers import manifest_of, writer

LOST = ActorLost("learner-1", "the process died")


@dataclass(frozen=True)
class FakeBatch:
    """A batch that is known by its name."""

    round: int
    name: str


@dataclass
class FakeRanks:
    """Ranks whose weights are the names of the batches they were trained on."""

    losses: list[bool]
    """For each thing that is asked of them: whether a rank is lost in it (False when the list has ended)."""
    weights: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ("learner-0", "learner-1")
    saved: dict[int, list[str]] = field(default_factory=dict)

    def _maybe_lost(self) -> None:
        if self.losses and self.losses.pop(0):
            self.weights = ["garbage"]
            raise LOST

    def update(self, batch: FakeBatch, progress: Any, *, first: bool) -> Iterator[UpdateReport | None]:
        yield None
        self._maybe_lost()
        self.weights = [*self.weights, batch.name]
        yield UpdateReport((), 0.0, 0.0, None, 0)

    def save(self, folder: Path, round_: int, seconds: float) -> dict[str, Vote]:
        (folder / "half").write_text("a file that a lost rank had begun")
        self._maybe_lost()
        (folder / "half").unlink()
        self.saved[round_] = self.weights
        return dict(writer(round_)(folder))

    def restore(self, folder: Path, files: Any, seconds: float) -> str:
        round_ = int(folder.name.rpartition("-")[2])
        self.weights = self.saved[round_]
        return f"weights {round_}"

    def fingerprint(self, seconds: float) -> str:
        self._maybe_lost()
        return "model" if not self.weights else "other"


class FakeSystem:
    """Replaces ranks; as often as it is asked to."""

    def __init__(self, losses: list[bool]) -> None:
        self.learners = FakeRanks(losses)
        self.replaced = 0
        self.said: list[str] = []

    def replace_ranks(self, lost: ActorLost) -> None:
        self.replaced += 1
        self.learners.weights = []

    def tell(self, text: str, kind: str, names: tuple[str, ...]) -> None:
        self.said.append(text)


class World:
    """A run that trains two batches a round and commits after every round."""

    def __init__(self, run: Path, losses: list[bool], every: int = 1) -> None:
        system: Any = FakeSystem(losses)
        self.system = system
        self.store, self.every = CheckpointStore(run), every
        self.learning = Learning(system, self.store, lambda text: pytest.fail(text))
        start = replace(manifest_of(0, initial=True), weights="model")
        self.store.commit(start, lambda _: {}, 0)

    def round(self, number: int) -> None:
        for position, name in enumerate((f"{number}a", f"{number}b")):
            batch: Any = FakeBatch(number, name)
            reports = [r for r in self.learning.update(batch, lambda done: None, first=not position) if r is not None]
            assert len(reports) == 1
        self.learning.surely(self.sync)
        if number % self.every == 0:
            save = self.learning.save
            self.store.commit(manifest_of(number), lambda folder: save(folder, number, 1.0), 0)

    def sync(self) -> None:
        self.system.learners._maybe_lost()


def test_without_a_loss_nothing_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, [])
    world.round(1)
    world.round(2)
    assert world.system.learners.weights == ["1a", "1b", "2a", "2b"]
    assert world.system.replaced == 0


@pytest.mark.parametrize("moment", range(8))
def test_a_rank_lost_at_any_moment_leaves_the_same_weights(moment: int, tmp_path: Path) -> None:
    """First and second batch, sync, commit, of two rounds."""
    world = World(tmp_path, [False] * moment + [True])
    world.round(1)
    world.round(2)
    assert world.system.learners.weights == ["1a", "1b", "2a", "2b"]
    assert world.system.learners.saved == {1: ["1a", "1b"], 2: ["1a", "1b", "2a", "2b"]}
    assert world.system.replaced == 1
    assert len(world.system.said) == 1


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=30))
def test_however_often_ranks_are_lost_every_batch_is_trained_once(losses: list[bool]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), losses)
        for number in (1, 2, 3):
            world.round(number)
        assert world.system.learners.weights == ["1a", "1b", "2a", "2b", "3a", "3b"]
        found = world.store.find_latest(lambda text: pytest.fail(text))
        assert found is not None
        assert found.manifest.round == 3


def test_without_a_commit_of_the_round_before_it_says_so(tmp_path: Path) -> None:
    world = World(tmp_path, [False] * 3 + [True], every=5)
    world.round(1)
    with pytest.raises(RemoteFailure, match=r"start of round 2, and the last commit is of round 0 .--checkpoint.every"):
        world.round(2)
    assert world.system.replaced == 0


def test_a_resumed_run_goes_back_to_what_it_was_resumed_from(tmp_path: Path) -> None:
    world = World(tmp_path, [])
    world.round(1)
    world.system.learners.losses = [True]
    again = Learning(world.system, world.store, lambda text: pytest.fail(text))
    again.resumed(1)
    again.surely(world.sync)
    assert world.system.learners.weights == ["1a", "1b"]


def test_a_loss_of_somebody_else_is_not_the_learners(tmp_path: Path) -> None:
    def lost_engine() -> None:
        raise ActorLost("engine-0", "the process died")

    with pytest.raises(ActorLost, match="engine-0"):
        World(tmp_path, []).learning.surely(lost_engine)


def test_ranks_that_do_not_hold_what_was_committed_are_a_broken_promise(tmp_path: Path) -> None:
    world = World(tmp_path, [])
    world.system.learners.weights = ["something else"]
    checkpoint = world.store.find_latest(lambda text: pytest.fail(text))
    assert checkpoint is not None
    with pytest.raises(BrokenPromise, match="weights of the model directory have changed"):
        restore_ranks(world.system.learners, checkpoint)


def test_an_engine_is_given_its_weights_by_ranks_that_were_put_back() -> None:
    """Node lost in mid-generation: the engine's replacement needs the ranks, before anybody else has missed one."""
    system: Any = System.__new__(System)
    system._trains, system.moved_on, system.version, system.turns = True, False, 3, Turns(False, 1.0)
    system.learners = FakeRanks([])
    done: list[str] = []
    losses = [LOST, ActorLost("learner-0", "died on its way back"), None]

    def sync(engines: dict[str, Any], version: int) -> None:
        done.append(f"sync {', '.join(engines)} to {version}")
        if (lost := losses.pop(0)) is not None:
            raise lost

    system._sync = sync
    system.recover = lambda lost: done.append(f"recover from {lost.name}")
    assert system.refresh_engine("engine-1", object())
    assert done == [
        "sync engine-1 to 3", "recover from learner-1", "sync engine-1 to 3", "recover from learner-0",
        "sync engine-1 to 3",
    ]  # fmt: skip
    losses[:] = [ActorLost("engine-1", "the process died")]
    with pytest.raises(ActorLost, match="engine-1"):
        system.refresh_engine("engine-1", object())
