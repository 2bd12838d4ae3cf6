"""A run on a virtual clock: cluster/schedule.py says what may start, cluster/fleet.py what is done about losses, and
cluster/shares.py which engine does what; this file carries it out with modelled engines and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from cluster.errors import RollearnError
from cluster.fleet import Fleet
from cluster.fleet_events import (
    Action,
    Asked,
    Current,
    Doubt,
    End,
    Event,
    GiveUp,
    GoWithout,
    HandOn,
    Idle,
    Lost,
    Progress,
    Refresh,
    Restart,
    Retire,
    Started,
)
from cluster.schedule import Generate, Record, Schedule, Sync, Task, Train
from cluster.shares import Shares
from cluster.simulator.clock import Clock
from cluster.simulator.engine import ModelledEngine, Piece
from cluster.simulator.outcome import Outcome, RoundTimes
from cluster.simulator.scenario import Fault, Scenario
from rollout.types import Group, GroupRequest, Prompt

RANKS = ("ranks",)
"""All ranks under one name: they live and die together."""
NO_IDS, NO_NUMBERS = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)


class Impossible(RollearnError):
    """The simulated run was given up, as the real one would be."""


def simulate(scenario: Scenario) -> Outcome:
    """Play a run out."""
    world = World(scenario)
    world.run()
    return world.outcome()


class World:
    """Everything that moves."""

    def __init__(self, scenario: Scenario) -> None:
        """All engines and ranks are up, and hold version 0."""
        self.scenario, self.clock = scenario, Clock()
        names = [f"engine-{index}" for index in range(scenario.engines)]
        self.schedule = Schedule(scenario.schedule, scenario.rounds, scenario.groups, scenario.max_lag)
        self.fleet = Fleet(names, RANKS, scenario.limits, 0.0)
        self.engines = {
            name: ModelledEngine(name, scenario.engine, self.clock, self._answered, scenario.slowness.get(name, 1.0))
            for name in names
        }
        self.lengths: dict[int, dict[tuple[str, int], tuple[int, ...]]] = {}
        self.tokens: dict[int, list[float]] = {}
        self.times: dict[int, RoundTimes] = {}
        self.learning = 0.0
        self.lost = 0
        self._shares: Shares | None = None
        self._generation: Generate | None = None
        self._working: Task | None = None
        self._trained: list[int] = []
        self._life = 0
        self._ranks_up = True
        self._postponed: list[Task] = []
        self._ticking = False
        self._news = True
        """Something was told to the schedule, so that something may start."""
        for name in names:
            self.fleet.handle(Started(name), 0.0)
        self.fleet.handle(Started(RANKS[0]), 0.0)
        self.fleet.handle(Current(RANKS[0], 0), 0.0)
        self._publish(0)

    def run(self) -> None:
        """Until the last round is recorded."""
        for fault in self.scenario.faults:
            self.clock.after(fault.at, partial(self._strike, fault))
        while not self.schedule.over:
            while self._news and (task := self.schedule.next()) is not None:
                self._start(task)
            self._news = False
            if not self.schedule.over and not self.clock.step():
                raise Impossible(f"{self.scenario.name}: nothing happens any more after {self.clock.now:.0f} s")

    def outcome(self) -> Outcome:
        """What came of it."""
        return Outcome(
            scenario=self.scenario,
            rounds=tuple(self.times[number] for number in sorted(self.times)),
            seconds=self.clock.now,
            engine_busy=sum(engine.busy for engine in self.engines.values()) / len(self.engines),
            learner_busy=self.learning,
            tokens=sum(sum(sum(piece) for piece in pieces.values()) for pieces in self.lengths.values()),
            restarts=self.fleet.restarts,
            lost_groups=self.lost,
        )

    # Tasks

    def _start(self, task: Task) -> None:
        if not isinstance(task, Generate) and not self._ranks_up:
            self._postponed.append(task)
            return
        match task:
            case Generate():
                self._generate(task)
            case Train():
                self._train(task)
            case Sync():
                self._work(task, self.scenario.sync + self.scenario.turn / 2)
            case Record():
                self._work(task, self.scenario.record)

    def _generate(self, task: Generate) -> None:
        scenario = self.scenario
        drawn = scenario.lengths.draw(sum(scenario.groups), scenario.group_size, scenario.seed + task.round)
        minibatches = np.repeat(np.arange(len(scenario.groups)), scenario.groups)
        requests = [
            GroupRequest(Prompt(str(index), "", NO_IDS, ""), task.round, 0, int(minibatch), scenario.group_size, 0)
            for index, minibatch in enumerate(minibatches)
        ]
        self.lengths[task.round] = {
            request.key: tuple(int(length) for length in row) for request, row in zip(requests, drawn, strict=True)
        }
        rows = drawn.sum(axis=1) + scenario.prompt_tokens * scenario.group_size
        self.tokens[task.round] = [float(rows[minibatches == m].sum()) for m in range(len(scenario.groups))]
        self.times[task.round] = RoundTimes(task.round, task.round - 1 - task.version, self.clock.now)
        self._shares, self._generation = Shares(requests), task
        usable = self.fleet.usable()
        if usable:
            for name, part in self._shares.deal(usable).items():
                self._ask(name, part)
        self._tick()

    def _train(self, task: Train) -> None:
        tokens = self.tokens[task.round]
        seconds = self.scenario.learner.train([tokens[m] for m in task.minibatches])
        if task.first:
            seconds += self.scenario.turn / 2
            if self.schedule.kind != "streamed":
                seconds += self.scenario.learner.old(tokens)
        self._tell(Asked(RANKS[0]))
        self._work(task, seconds)
        self._tick()

    def _work(self, task: Task, seconds: float) -> None:
        """Something the ranks take part in; when they are lost meanwhile, it begins anew."""
        self._working = task
        life, began = self._life, self.clock.now

        def end() -> None:
            if life == self._life:
                self._worked(task, self.clock.now - began)

        self.clock.after(seconds, end)

    def _worked(self, task: Task, seconds: float) -> None:
        self._working = None
        match task:
            case Train():
                self.learning += seconds
                self.times[task.round].learn += seconds
                self.times[task.round].learned = self.clock.now
                self._trained.extend(task.minibatches)
                self._tell(Idle(RANKS[0]))
            case Sync():
                self._publish(task.round)
            case Record():
                self.times[task.round].end = self.clock.now
                self._trained.clear()
        self._news = True
        self.schedule.done(task)

    def _publish(self, version: int) -> None:
        self.fleet.publish(version)
        for name in self.engines:
            self._tell(Current(name, version))

    # Engines

    def _ask(self, name: str, part: Sequence[GroupRequest]) -> None:
        assert self._generation is not None
        lengths = self.lengths[self._generation.round]
        self._tell(Asked(name, len(part)))
        self.engines[name].ask([Piece(request.key, lengths[request.key]) for request in part])

    def _answered(self, name: str, piece: Piece) -> None:
        """A group is finished on an engine."""
        shares, task = self._shares, self._generation
        assert shares is not None
        assert task is not None
        lengths = np.asarray(piece.lengths, dtype=np.int32)
        request = GroupRequest(Prompt(piece.key[0], "", NO_IDS, ""), task.round, 0, 0, len(lengths), 0)
        group = Group(request, task.version, NO_IDS, NO_NUMBERS, lengths, NO_IDS.astype(bool), ())
        if shares.answer(name, group) is not None:
            self._news = True
            self.schedule.settle(task.round, self._minibatch(piece), kept=True)
        if not shares.open:
            self._end_generation(task)
        elif self.engines[name].idle:
            self._tell(Idle(name))
            self._help(name)

    def _minibatch(self, piece: Piece) -> int:
        position, minibatch = int(piece.key[0]), 0
        while position >= self.scenario.groups[minibatch]:
            position -= self.scenario.groups[minibatch]
            minibatch += 1
        return minibatch

    def _end_generation(self, task: Generate) -> None:
        for name, engine in self.engines.items():
            if not engine.hung:
                engine.stop()
                self._tell(Idle(name))
        self.times[task.round].generate = self.clock.now - self.times[task.round].begin
        self._shares = self._generation = None
        self._news = True
        self.schedule.done(task)

    def _help(self, name: str) -> None:
        """An engine with time takes its part of what nobody does."""
        if self._shares is not None and self._shares.queued and name in self.fleet.usable():
            free = [each for each in self.fleet.usable() if self.engines[each].idle]
            part = self._shares.take(name, len(free) + len(self.fleet.coming()))
            if part:
                self._ask(name, part)

    # What goes wrong

    def _strike(self, fault: Fault) -> None:
        if fault.who == RANKS[0]:
            self._tell(Lost(RANKS[0], "simulated"))
        elif fault.how == "hangs":
            self.engines[fault.who].hang()
        else:
            self._tell(Lost(fault.who, "simulated"))

    def _tell(self, event: Event) -> None:
        self._do(self.fleet.handle(event, self.clock.now))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case GiveUp(reason):
                    raise Impossible(f"{self.scenario.name}: {reason}")
                case HandOn(name):
                    if self._shares is not None:
                        self._shares.offer(name)
                        for idle in [each for each in self.fleet.usable() if self.engines[each].idle]:
                            self._help(idle)
                case Restart(names):
                    self._restart(names)
                case Refresh(names):
                    seconds = self.scenario.restore if names == RANKS else self.scenario.sync
                    self.clock.after(seconds, partial(self._refreshed, names))
                case End(names):
                    self._ended(names)
                case Doubt() | Retire() | GoWithout():
                    pass  # for people

    def _ended(self, names: Sequence[str]) -> None:
        """These processes are gone."""
        if tuple(names) == RANKS:
            self._ranks_up = False
            self._life += 1
            return
        for name in names:
            self.engines[name].stop()
            self.engines[name].hung = False
            if self._shares is not None:
                self.lost += self._shares.lost(name)
        for name in self.fleet.usable():
            if self.engines[name].idle:
                self._help(name)

    def _restart(self, names: Sequence[str]) -> None:
        seconds = self.scenario.ranks_start if tuple(names) == RANKS else self.scenario.engine_start

        def up() -> None:
            for name in names:
                self._tell(Started(name))

        self.clock.after(seconds, up)
        self._tick()

    def _refreshed(self, names: Sequence[str]) -> None:
        """New ranks have loaded the last commit, or new engines hold the current weights."""
        if tuple(names) == RANKS:
            self._tell(Current(RANKS[0], self.schedule.recorded))
            self._ranks_up = True
            self._redo()
            return
        for name in names:
            self._tell(Current(name, self.fleet.version or 0))
            self._help(name)

    def _redo(self) -> None:
        """What was lost since the last commit is trained again, then the work goes on."""
        again = 0.0
        if self._trained:
            round_ = self.schedule.recorded + 1
            again = self.scenario.learner.train([self.tokens[round_][m] for m in self._trained])
            self.learning += again
        waiting = ([self._working] if self._working is not None else []) + self._postponed
        self._postponed = []
        for task in waiting:
            self.clock.after(again, partial(self._start, task))

    def _tick(self) -> None:
        """Supervision looks around while anybody has work."""
        if self._ticking:
            return
        self._ticking = True
        self.clock.after(self.scenario.limits.silence / 4, self._look)

    def _look(self) -> None:
        self._ticking = False
        for name, engine in self.engines.items():
            if not engine.idle and not engine.hung:
                self._tell(Progress(name, self.clock.now))
        if self._working is not None and self._ranks_up:
            self._tell(Progress(RANKS[0], self.clock.now))
        self._do(self.fleet.tick(self.clock.now))
        if self._generation is not None or self._working is not None or self.fleet.coming():
            self._tick()
