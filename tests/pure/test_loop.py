"""The loop of launch.py under every schedule, with engines and ranks that only pretend: what is trained, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import launch
from cluster.errors import BrokenPromise
from cluster.model_facts import read_model_facts
from cluster.plan import Plan, make_plan
from cluster.resources import Resources
from cluster.run.cli import parse
from cluster.run.config import Config
from cluster.run.generation import Generation
from cluster.run.journal import Journal
from cluster.run.resume import salvage
from cluster.run.round import Round
from cluster.run.speed import Work
from cluster.run.stages import Run
from learner.types import Batch, StepReport, UpdateReport
from rollout.stream import PromptStream
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup

WORDS = ["--rollouts", "32", "--group-size", "4", "--minibatches", "4", "--rounds", "3"]
REWARDS = np.arange(4, dtype=np.float64)
PROMPTS = [Prompt(f"row{n}", "?", np.array([n], dtype=np.int32), "1") for n in range(11)]


class Ended(Exception):
    """The machine went off."""


class Pretend:
    """Engines, ranks, scorer, console and commits in one: they note what happens, in which order."""

    def __init__(
        self, version: int = 0, minibatches: int = 4, stop: Callable[[str], bool] = lambda said: False
    ) -> None:
        self.minibatches = minibatches
        self.said: list[str] = []
        self.version = version  # of the engines
        self.steps = version  # rounds behind the learner's weights
        self.busy = ""
        self.trained: Counter[tuple[int, tuple[str, int]]] = Counter()
        self.asked: list[GroupRequest] = []
        self.lags: dict[int, set[int]] = {}
        self.prompts: dict[int, Any] = {}
        self.metrics = SimpleNamespace(last_round=version)
        self.rows: list[dict[str, Any]] = []
        self.journal: Journal | None = None
        self.members: dict[str, Any] = {}
        self.hosts: dict[str, str] = {}
        self._queue: list[Group] = []
        self._stop = stop
        self.moved_on = False
        self.tokens = 0
        self.pool = self.learners = self

    def say(self, what: str) -> None:
        self.said.append(what)
        if self._stop(what):
            raise Ended

    # engines

    def generate(self, requests: Sequence[GroupRequest], sampling: object) -> Iterator[list[Group]]:
        version, self.busy = self.version, "generating"
        for request in requests:
            yield []
            assert self.version == version, "new weights while something is in flight"
            if request.round > 0:
                self.asked.append(request)
                self.say(f"answered {request.round}/{request.minibatch}")
            size = request.group_size
            yield [
                Group(
                    request, version, np.arange(size, dtype=np.int32), np.zeros(size, np.float32),
                    np.ones(size, np.int32), np.ones(size, bool), ("",) * size,
                )
            ]  # fmt: skip
        self.busy = ""

    def sync(self, version: int) -> Any:
        assert not self.busy
        assert version == self.steps
        self.version, self.moved_on = version, False
        self.say(f"sync {version}")
        return SimpleNamespace(seconds=0.0)

    def usage(self) -> tuple[dict[str, int], Work]:
        return {}, Work(0.0, {})

    # ranks

    def before_learning(self) -> None: ...

    def update(self, batch: Batch, progress: Callable[[int], None], *, first: bool) -> Iterator[UpdateReport | None]:
        assert first == (batch.round == self.steps + 1 and 0 in batch.minibatches)
        numbers = [int(m) for m in np.unique(batch.minibatches)]
        self.lags.setdefault(batch.round, set()).update((batch.round - 1 - batch.weights_versions).tolist())
        for minibatch in numbers:
            for _ in range(3):
                yield None
            self.say(f"trained {batch.round}/{minibatch}")
        if numbers[-1] == self.minibatches - 1:
            self.steps += 1
        yield UpdateReport(tuple(StepReport(0, m, False, {}) for m in numbers), 0.0, 0.0, None, batch.size)

    def surely(self, work: Callable[[], Any]) -> Any:
        return work()

    def check(self, batch: Batch, seconds: float) -> tuple[float, float]:
        assert batch.current
        assert batch.round == self.steps + 1 == self.version + 1
        return 0.0, 0.0

    # scorer

    def submit(self, group: Group) -> None:
        self._queue.append(group)

    def ready(self) -> list[ScoredGroup]:
        scored = [
            ScoredGroup(g, {"correctness": REWARDS, "format": REWARDS}, REWARDS, ("right",) * 4) for g in self._queue
        ]
        self._queue.clear()
        return scored

    def arrivals(self) -> Iterator[ScoredGroup | None]:
        yield None
        yield from self.ready()

    # console

    def phase(self, *_: object, **__: object) -> None: ...
    def advance(self, *_: object) -> None: ...
    def rest(self, lane: str) -> None: ...

    # recording

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def round(self, turn: Round) -> None:
        self.say(f"recording {turn.number}")
        for scored in turn.trained:
            self.trained[turn.number, scored.group.request.key] += 1
        self.prompts[turn.number] = turn.prompts
        self.metrics.last_round = turn.number
        self.say(f"recorded {turn.number}")


@cache
def planned(*words: str) -> tuple[Config, Plan]:
    config = parse([*WORDS, *words])
    return config, make_plan(config, Resources(cpus=2, gpus=0, memory=16 << 30), read_model_facts("demo"))


def run_of(pretend: Pretend, folder: Path, *words: str, prompts: PromptStream) -> Run:
    config, plan = planned(*words)
    journal = Journal(folder)
    pretend.journal = journal
    parts: dict[str, Any] = {"config": config, "plan": plan, "system": pretend, "console": pretend}
    generation = Generation(**parts, prompts=prompts, scorer=pretend, journal=journal, stop_token_ids=())  # type: ignore[arg-type]
    parts |= {"generation": generation, "recording": pretend, "learning": pretend}
    parts |= {"folder": None, "held_out": (), "tokenizer": None}
    return Run(**{name: value for name, value in parts.items() if name in Run.__dataclass_fields__})


def stream() -> PromptStream:
    return PromptStream(PROMPTS, seed=3)


@pytest.fixture(params=["phased", "streamed", "async"])
def schedule(request: pytest.FixtureRequest) -> list[str]:
    return ["--cluster.schedule", request.param]


def test_every_group_is_trained_once_and_prompts_are_drawn_as_in_every_other_schedule(
    schedule: list[str], tmp_path: Path
) -> None:
    pretend = Pretend()
    launch.loop(run_of(pretend, tmp_path, *schedule, prompts=stream()))
    assert len(pretend.trained) == 3 * 8
    assert set(pretend.trained.values()) == {1}
    drawn = stream()
    for number in (1, 2, 3):
        expected = [prompt.row_id for prompt, _ in drawn.take(8)]
        assert [r.prompt.row_id for r in pretend.asked if r.round == number] == expected
        assert pretend.prompts[number] == drawn.state()
    assert [said for said in pretend.said if "sync" in said] == [f"sync {n}" for n in range(4)]


def test_a_run_is_evaluated_at_its_start_at_its_end_and_as_often_between_as_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []

    def evaluation(_: Run, round_: int) -> dict[str, Any]:
        evaluated.append(round_)
        return {}

    monkeypatch.setattr(Run, "evaluation", evaluation)
    for name, every, rounds, expected in (
        ("short", None, 3, [0, 3]),  # 32 responses per round: by itself every 16 rounds
        ("long", None, 20, [0, 16, 20]),
        ("asked", "2", 3, [0, 2, 3]),
        ("never", "0", 3, []),
    ):
        pretend = Pretend()
        words = ["--rounds", str(rounds), *(["--eval.every", every] if every else [])]
        run = run_of(pretend, tmp_path / name, *words, prompts=stream())
        run.held_out = tuple(PROMPTS)
        launch.loop(run)
        assert evaluated == expected, name
        evaluated.clear()


def order(pretend: Pretend, *events: str) -> list[int]:
    return [pretend.said.index(event) for event in events]


def last(pretend: Pretend, event: str) -> int:
    return len(pretend.said) - 1 - pretend.said[::-1].index(event)


def test_phased_trains_when_the_round_is_there(tmp_path: Path) -> None:
    pretend = Pretend()
    launch.loop(run_of(pretend, tmp_path, prompts=stream()))
    assert last(pretend, "answered 2/3") < pretend.said.index("trained 2/0")
    assert pretend.said.index("recorded 1") < pretend.said.index("answered 2/0")
    assert pretend.lags == {1: {0}, 2: {0}, 3: {0}}


def test_streamed_trains_the_first_minibatch_while_later_ones_are_generated(tmp_path: Path) -> None:
    pretend = Pretend()
    launch.loop(run_of(pretend, tmp_path, "--cluster.schedule", "streamed", prompts=stream()))
    for round_ in ("1", "2", "3"):
        assert last(pretend, f"answered {round_}/0") < pretend.said.index(f"trained {round_}/0")
        assert pretend.said.index(f"trained {round_}/0") < last(pretend, f"answered {round_}/3")
    assert pretend.lags == {1: {0}, 2: {0}, 3: {0}}


def test_async_generates_the_next_round_meanwhile_and_stays_within_its_lag(tmp_path: Path) -> None:
    pretend = Pretend()
    launch.loop(run_of(pretend, tmp_path, "--cluster.schedule", "async", prompts=stream()))
    assert pretend.said.index("answered 2/0") < pretend.said.index("trained 1/3")
    assert last(pretend, "answered 2/3") < pretend.said.index("sync 1")
    assert pretend.lags == {1: {0}, 2: {1}, 3: {1}}


def test_more_lag_is_used_where_the_learner_is_slower_and_never_exceeded(tmp_path: Path) -> None:
    pretend = Pretend()
    words = ["--cluster.schedule", "async", "--cluster.max-lag", "2", "--rounds", "6"]
    launch.loop(run_of(pretend, tmp_path, *words, prompts=stream()))
    assert all(lags <= {0, 1, 2} for lags in pretend.lags.values())
    assert len(pretend.trained) == 6 * 8


def test_a_run_that_ends_anywhere_goes_on_without_training_a_group_twice_or_generating_one_again(
    schedule: list[str], tmp_path: Path
) -> None:
    schedule = [*schedule, "--rollouts", "16", "--minibatches", "2"]
    whole = Pretend(minibatches=2)
    launch.loop(run_of(whole, tmp_path / "whole", *schedule, prompts=stream()))
    for place in range(len(whole.said)):
        folder = tmp_path / str(place)
        # Before it has happened or after it: in between lies everything a kill can meet.
        left = iter(range(place, -1, -1))
        first = Pretend(minibatches=2, stop=lambda said, left=left: next(left) == 0)  # type: ignore[misc]
        run = run_of(first, folder, *schedule, prompts=stream())
        with pytest.raises(Ended):
            launch.loop(run)
        run.generation.journal.close()
        committed = first.metrics.last_round
        prompts = stream()
        if committed:
            prompts.restore(first.prompts[committed])
        second = Pretend(committed, minibatches=2)
        run = run_of(second, folder, *schedule, prompts=prompts)
        run.generation.salvaged = salvage(run.generation.journal, committed, run.plan.max_lag)
        kept = set(run.generation.salvaged)
        run.generation.journal.set_aside(committed, keep=kept)
        launch.loop(run)
        both = first.trained + second.trained
        assert both == whole.trained, place
        assert {n: second.lags[n] for n in second.lags} == {n: whole.lags[n] for n in second.lags}, place
        again = Counter((r.round, r.key) for r in [*first.asked, *second.asked] if r.round in kept)
        assert [times for times in again.values() if times > 1] in ([], [2]), place  # the one in flight


def test_groups_further_behind_than_allowed_are_not_trained(tmp_path: Path) -> None:
    class Forgetful(Pretend):
        def sync(self, version: int) -> Any:
            report = super().sync(version)
            self.version = 0 if version else self.version
            return report

    with pytest.raises((BrokenPromise, AssertionError), match=r"weights version 0|new weights"):
        launch.loop(run_of(Forgetful(), tmp_path, prompts=stream()))
