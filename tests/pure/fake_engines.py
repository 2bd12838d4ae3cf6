"""Engines that exist on a clock only: they answer, dawdle, die, hang and lie as told, in no time at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.care import Care
from cluster.fleet import Fleet, Limits
from cluster.fleet_events import Current, Started
from cluster.rollout_pool import RolloutPool
from cluster.waiting import ENDED, ActorLost, NoSeat
from rollout.engine import EngineFault, Sampling
from rollout.types import Group, GroupRequest, Prompt

SAMPLING = Sampling(1.0, 1.0, 0, 8, (1,))


def request(number: int, size: int = 4) -> GroupRequest:
    prompt = Prompt(f"row-{number}", "1+1=", np.array([1, 2], dtype=np.int32), "2")
    return GroupRequest(prompt, 1, 0, 0, size, 1000 + number)


def group(asked: GroupRequest, engine: str, size: int | None = None) -> Group:
    """The one answer there is to a request: it follows from its seed."""
    rng = np.random.default_rng(asked.seed)
    count = asked.group_size if size is None else size
    lengths = rng.integers(1, 5, count).astype(np.int32)
    tokens = int(lengths.sum())
    return Group(
        asked, 0, rng.integers(0, 9, tokens).astype(np.int32), -rng.random(tokens).astype(np.float32), lengths,
        np.ones(count, dtype=bool), ("",) * count, int(engine[-1]),
    )  # fmt: skip


@dataclass
class Behaviour:
    """What one engine process does."""

    pace: float = 1.0
    """Seconds per group."""
    dies_at: int | None = None
    """After so many groups of its life."""
    hangs_at: int | None = None
    """After so many groups nothing more comes."""
    lies_about: str = ""
    """A row for which it has no sound log-probs."""
    ends_early: bool = False
    """Its stream ends without an answer."""
    obeys: bool = True
    """It stops when it is told to."""
    start: float | None = 10.0
    """Seconds until it is up; None: it dies on the way."""
    seat: bool = True
    """False: no node has room for it."""


@dataclass
class FakeEngine:
    """A process; called as an actor is."""

    name: str
    does: Behaviour
    done: int = 0
    asked: list[list[str]] = field(default_factory=list)

    @property
    def generate(self) -> FakeEngine:
        return self

    def options(self, **_: Any) -> FakeEngine:
        return self

    def remote(self, part: Sequence[GroupRequest], _: Sampling) -> FakeStream:
        self.asked.append([each.prompt.row_id for each in part])
        return FakeStream(self, list(part))


@dataclass
class FakeStream:
    """A stream of a FakeEngine."""

    engine: FakeEngine
    part: list[GroupRequest]
    since: float | None = None
    told_to_stop: bool = False
    made: int = 0

    def news(self, name: str, now: float) -> Any:
        does = self.engine.does
        self.since = now if self.since is None else self.since
        if self.told_to_stop and does.obeys:
            return ENDED
        if does.ends_early:
            return ENDED
        if does.dies_at is not None and self.engine.done >= does.dies_at:
            return ActorLost(name, "the process died")
        if does.hangs_at is not None and self.engine.done >= does.hangs_at:
            return None
        if not self.part:
            return ENDED
        if now - self.since < does.pace:
            return None
        self.since += does.pace
        first = self.part.pop(0)
        if first.prompt.row_id == does.lies_about:
            fault = EngineFault(f"row {first.prompt.row_id} has no log-probs", first.key)
            return ActorLost(name, f"raised there: {fault}", cause=fault)
        self.engine.done += 1
        self.made += 10
        return [group(first, self.engine.name)], self.made


@dataclass
class FakeStart:
    """A process on its way up."""

    name: str
    does: Behaviour
    since: float | None = None

    def news(self, name: str, now: float) -> Any:
        self.since = now if self.since is None else self.since
        if self.does.start is None:
            return ActorLost(name, "the process died on its way up")
        return {"pid": 1} if now - self.since >= self.does.start else None


class World:
    """A clock, what is waited for, and where engines come from: everything a RolloutPool touches."""

    def __init__(self, *lives: list[Behaviour], limits: Limits | None = None) -> None:
        """`lives`: for each engine what its first, second, ... process does; the last for ever."""
        self.now = 0.0
        self.said: list[str] = []
        self.stale = False
        """True: the weights cannot be had, the learner has moved on."""
        self.born: list[FakeEngine] = []
        self._lives = {f"engine-{index}": list(life) for index, life in enumerate(lives)}
        self._open: dict[str, Any] = {}
        self.fleet = Fleet(list(self._lives), [], limits or Limits(), 0.0)
        self.care = Care(self.fleet, self, lambda: self.now)
        self.refreshed: list[str] = []
        self.pool = RolloutPool({name: self._born(name) for name in self._lives}, self.care, self, self)  # type: ignore[arg-type]
        for name in self._lives:
            self.care.tell(Started(name))
        self.fleet.publish(0)
        for name in self._lives:
            self.care.tell(Current(name, 0))

    def run(self, groups: int, stop: Callable[[], bool] = lambda: False) -> list[Group]:
        """Generate so many groups to the end."""
        answers: list[Group] = []
        for some in self.pool.generate([request(number) for number in range(groups)], SAMPLING):
            answers += some
            assert self.now < 10_000, "it never ends"
            if stop():
                break
        return answers

    # the watch

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def names(self) -> list[str]:
        return list(self._open)

    def add(self, name: str, answer: Any) -> None:
        assert name not in self._open, f"{name} is asked twice"
        self._open[name] = answer

    def drop(self, name: str) -> None:
        self._open.pop(name, None)

    def cancel(self, name: str) -> None:
        self._open[name].told_to_stop = True

    def poll(self, seconds: float) -> list[tuple[str, Any]]:
        self.now += max(seconds, 0.25)
        found = [(name, value) for name in list(self._open) if (value := self._open[name].news(name, self.now))]
        for name, value in found:
            if value is ENDED or isinstance(value, ActorLost | dict):
                self.drop(name)
        return found

    # where engines come from

    def begin_engine(self, name: str) -> tuple[Any, Any]:
        if not self._lives[name][0].seat:
            if len(self._lives[name]) > 1:
                self._lives[name].pop(0)
            raise NoSeat(name, "no node has room for it")
        engine = self._born(name)
        return engine, FakeStart(name, engine.does)

    def register(self, name: str, about: dict[str, Any]) -> None:
        assert about["pid"]

    def refresh_engine(self, name: str, engine: Any) -> bool:
        self.refreshed.append(name)
        return not self.stale

    # the hands of supervision

    def end(self, names: tuple[str, ...], reason: str) -> None:
        self.say(f"{', '.join(names)} lost: {reason}", "lost", names)

    def say(self, text: str, kind: str, names: tuple[str, ...]) -> None:
        self.said.append(f"{self.now:.0f} {kind} {text}")

    def _born(self, name: str) -> FakeEngine:
        life = self._lives[name]
        self.born.append(FakeEngine(name, life.pop(0) if len(life) > 1 else life[0]))
        return self.born[-1]
