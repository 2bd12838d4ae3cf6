from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import BrokenPromise
from cluster.schedule import Generate, Record, Schedule, Sync, Task, Train

KINDS = st.sampled_from(["phased", "streamed", "async"])
GROUPS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


class World:
    """Carries out what a schedule starts, in an order that the test draws, and notes what happened."""

    def __init__(self, schedule: Schedule, draw: Any) -> None:
        self.schedule, self.draw = schedule, draw
        self.started: list[Task] = []
        self.ended: list[Task] = []
        self.version = schedule.completed
        self.sampled: dict[int, int] = {}
        self.kept: Counter[tuple[int, int]] = Counter()
        self.dropped: Counter[tuple[int, int]] = Counter()
        self.trained: Counter[tuple[int, int]] = Counter()
        self._to_come: dict[int, list[int]] = {}

    def run(self) -> None:
        for _ in range(10_000):
            while (task := self.schedule.next()) is not None:
                self.start(task)
            if self.schedule.over:
                return
            self.happen()
        raise AssertionError("it never ends")

    def start(self, task: Task) -> None:
        self.started.append(task)
        match task:
            case Generate():
                assert task.version == self.version
                self.sampled[task.round] = task.version
                order = [m for m, count in enumerate(self.schedule.groups) for _ in range(count)]
                self._to_come[task.round] = self.draw(st.permutations(order))
            case Train():
                assert task.minibatches
                if self.schedule.kind != "streamed":
                    assert not self._to_come[task.round]
                for m in task.minibatches:
                    planned = self.schedule.groups[m]
                    assert self.kept[task.round, m] + self.dropped[task.round, m] == planned, "not whole"
                    self.trained[task.round, m] += self.kept[task.round, m]
            case Sync():
                assert not [each for each in self.schedule.running if each is not task], "something runs beside a sync"
            case Record():
                assert self.version == task.round

    def happen(self) -> None:
        """One thing that may happen next: a group comes in, or a task ends."""
        task = self.draw(st.sampled_from(self.schedule.running))
        if isinstance(task, Generate) and (groups := self._to_come[task.round]):
            minibatch, kept = groups.pop(), self.draw(st.booleans())
            (self.kept if kept else self.dropped)[task.round, minibatch] += 1
            self.schedule.settle(task.round, minibatch, kept=kept)
            return
        if isinstance(task, Sync):
            self.version = task.round
        self.ended.append(task)
        self.schedule.done(task)


@given(KINDS, st.integers(1, 5), GROUPS, st.integers(1, 3), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_whatever_happens_in_whatever_order_every_round_is_trained_published_and_recorded(
    kind, rounds, groups, max_lag, completed, data
):
    schedule = Schedule(kind, completed + rounds, groups, max_lag, completed)
    world = World(schedule, data.draw)
    world.run()
    expected = list(range(completed + 1, completed + rounds + 1))
    for each in (Generate, Sync, Record):
        assert [task.round for task in world.ended if isinstance(task, each)] == expected
    # Every planned group was trained once or dropped, and nothing else was.
    for round_ in expected:
        for minibatch, planned in enumerate(groups):
            place = round_, minibatch
            assert world.trained[place] == world.kept[place]
            assert world.kept[place] + world.dropped[place] == planned
    trains = [task for task in world.started if isinstance(task, Train)]
    order = [(task.round, m) for task in trains for m in task.minibatches]
    assert order == sorted(set(order))
    assert sum(task.first for task in trains) == len({task.round for task in trains})
    allowed = max_lag if kind == "async" else 0
    assert all(0 <= round_ - 1 - version <= allowed for round_, version in world.sampled.items())


def starts(schedule: Schedule) -> list[Task]:
    found = []
    while (task := schedule.next()) is not None:
        found.append(task)
    return found


def generated(schedule: Schedule, task: Task) -> None:
    for minibatch, count in enumerate(schedule.groups):
        for _ in range(count):
            schedule.settle(task.round, minibatch, kept=True)
    schedule.done(task)


def test_phased_overlaps_nothing():
    schedule = Schedule("phased", 2, [1, 1])
    seen = []
    while not schedule.over:
        (task,) = starts(schedule)
        seen.append(task)
        generated(schedule, task) if isinstance(task, Generate) else schedule.done(task)
    assert seen == [
        Generate(1, 0), Train(1, (0, 1), True), Sync(1), Record(1),
        Generate(2, 1), Train(2, (0, 1), True), Sync(2), Record(2),
    ]  # fmt: skip


def test_streamed_trains_a_minibatch_while_the_next_is_generated():
    schedule = Schedule("streamed", 2, [2, 1, 1])
    (generate,) = starts(schedule)
    schedule.settle(1, 1, kept=True)
    schedule.settle(1, 0, kept=True)
    assert starts(schedule) == []  # the first minibatch lacks a group, and the second waits for it
    schedule.settle(1, 0, kept=False)
    (train,) = starts(schedule)
    assert train == Train(1, (0,), True)
    schedule.settle(1, 2, kept=True)
    schedule.done(generate)
    assert starts(schedule) == []  # the learner is busy
    schedule.done(train)
    for minibatch in (1, 2):
        (train,) = starts(schedule)
        assert train == Train(1, (minibatch,), False)
        schedule.done(train)
    (sync,) = starts(schedule)
    schedule.done(sync)
    assert starts(schedule) == [Generate(2, 1), Record(1)]  # the engines need not wait for the checkpoint


def test_async_generates_the_next_round_while_one_is_trained():
    schedule = Schedule("async", 3, [1], max_lag=1)
    (first,) = starts(schedule)
    generated(schedule, first)
    second, train = starts(schedule)
    assert (second, train) == (Generate(2, 0), Train(1, (0,), True))
    schedule.done(train)
    assert starts(schedule) == []  # the sync waits: what is in flight is finished on the version it began with
    generated(schedule, second)
    (sync,) = starts(schedule)
    assert sync == Sync(1)
    schedule.done(sync)
    assert starts(schedule) == [Generate(3, 1), Record(1)]


def test_async_runs_ahead_only_as_far_as_it_may():
    schedule = Schedule("async", 9, [1], max_lag=3)
    ahead = []
    while tasks := [task for task in starts(schedule) if isinstance(task, Generate)]:
        ahead += tasks
        generated(schedule, tasks[0])
    assert ahead == [Generate(1, 0), Generate(2, 0), Generate(3, 0), Generate(4, 0)]


def test_a_round_with_nothing_left_to_train_is_published_all_the_same():
    schedule = Schedule("streamed", 1, [1, 1])
    (generate,) = starts(schedule)
    schedule.settle(1, 1, kept=False)
    schedule.settle(1, 0, kept=False)
    schedule.done(generate)
    assert starts(schedule) == [Sync(1)]


def test_groups_that_were_not_planned_or_never_came_stop_the_run():
    schedule = Schedule("phased", 1, [1])
    (generate,) = starts(schedule)
    with pytest.raises(BrokenPromise, match="1 planned groups are neither in nor dropped"):
        schedule.done(generate)
    schedule = Schedule("phased", 1, [1])
    starts(schedule)
    schedule.settle(1, 0, kept=True)
    with pytest.raises(BrokenPromise, match="was not planned"):
        schedule.settle(1, 0, kept=True)
    with pytest.raises(BrokenPromise, match="was not planned"):
        schedule.settle(2, 0, kept=True)
