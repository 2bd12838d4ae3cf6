"""All rollout engines as one: groups in, groups out as they finish, whatever happens to single engines meanwhile.

Who does what is in shares.py, who is well is in fleet.py; here both meet the engines. A lost engine is restarted while
the others go on, and those that are done take over what it had; so do they for an engine that is much too slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from cluster.care import Care
from cluster.errors import BrokenPromise, RemoteFailure
from cluster.fleet import State
from cluster.fleet_events import (
    Asked,
    Current,
    HandOn,
    Idle,
    Lost,
    Progress,
    Refresh,
    Restart,
    Seated,
    Started,
    Unseated,
)
from cluster.shares import Key, Shares
from cluster.waiting import ENDED, ActorLost, NoSeat, Watch
from rollout.engine import EngineFault, Sampling
from rollout.types import Group, GroupRequest

TICK = 0.05
"""Seconds after which the caller is given its turn, whether or not something came."""


class EngineSource(Protocol):
    """Where engines come from."""

    def begin_engine(self, name: str) -> tuple[Any, Any]:
        """Start a process: (engine, reference that answers when it is up). NoSeat when there is no place for it."""

    def register(self, name: str, about: dict[str, Any]) -> None:
        """A process is up; BrokenPromise when it is not what it should be."""

    def refresh_engine(self, name: str, engine: Any) -> bool:
        """Give one engine the weights that the others hold, and check its receipt; False when they cannot be had now.

        ActorLost when it is lost meanwhile.
        """


class RolloutPool:
    """The engines of one run."""

    def __init__(self, engines: dict[str, Any], care: Care, source: EngineSource, watch: Watch | None = None) -> None:
        """`engines` by name, all of them members of the fleet."""
        self.engines = engines
        """Those that are up: they take part in weight syncs."""
        self.tokens = 0
        """Tokens made by the generation that runs."""
        self._names = tuple(engines)
        self._care, self._source = care, source
        self._watch = Watch() if watch is None else watch
        self._starting: dict[str, Any] = {}
        self._stopped: set[str] = set()
        """Engines whose stream was told to end."""
        self._faults: Counter[Key] = Counter()

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[list[Group]]:
        """Groups as they finish, in any order, every one of them once; an empty list says that there is none yet.

        A group that was lost with its engine is generated again with the same seeds, so it is the same group.
        RemoteFailure when no engine is left, BrokenPromise when a group cannot be had with sound log-probs.
        """
        shares = Shares(requests)
        tokens: Counter[str] = Counter()
        self._faults.clear()
        for action in self._care.take(self._names):
            if isinstance(action, Restart):  # due since the last generation; all else was wanted for that one
                self._carry_out(action, shares, refresh=True)
        idle = [name for name in self._care.fleet.usable() if name not in self._watch]
        for name, part in shares.deal(idle).items() if idle else ():
            self._ask(name, part, sampling)
        while shares.open:
            groups: list[Group] = []
            for name, value in self._news(shares, refresh=True):
                made, count = value
                self._care.tell(Progress(name, count))
                if name not in self._stopped:  # else it is late, perhaps by a whole generation
                    tokens[name] = count
                    groups += [first for group in made if (first := shares.answer(name, group)) is not None]
            self.tokens = tokens.total()
            self._stop_useless(shares)
            self._employ(shares, sampling)
            yield groups
        self._finish(shares)

    def settle(self) -> None:
        """Wait until every engine is either free of work and up, or given up: what a weight sync needs.

        Engines that come up now stay stale: the sync is for them too.
        """
        nothing = Shares([])
        while len(self._watch) or self._awaited():
            self._news(nothing, refresh=False)

    @property
    def restarts(self) -> int:
        """Restarts in this run, of engines and ranks."""
        return self._care.fleet.restarts

    def lost(self, lost: ActorLost) -> None:
        """An engine was lost outside a generation (in a weight sync): it is restarted, `settle` waits for it."""
        self.engines.pop(lost.name, None)
        self._care.tell(Lost(lost.name, lost.reason))

    def welcome(self, name: str) -> None:
        """There is room for an engine that had none: it is started, and gets no work before a good receipt."""
        self._care.tell(Seated(name))
        for action in self._care.take((name,)):
            self._carry_out(action, Shares([]), refresh=False)

    def give_up(self, name: str, reason: str) -> None:
        """An engine must leave its seat, and has no other; what it had is done by the others."""
        self.engines.pop(name, None)
        self._care.tell(Lost(name, reason))
        self._care.tell(Unseated(name, reason))
        self._care.take((name,))  # the restart that a loss asks for: it has no place to be made in

    def _awaited(self) -> bool:
        states = self._care.fleet.states()
        return any(states[name] in (State.DEAD, State.RESTARTING) for name in self._names)

    def _ask(self, name: str, part: list[GroupRequest], sampling: Sampling) -> None:
        self._watch.add(name, self.engines[name].generate.options(num_returns="streaming").remote(part, sampling))
        self._care.tell(Asked(name, len(part)))

    def _news(self, shares: Shares, *, refresh: bool) -> list[tuple[str, Any]]:
        """Items of streams that came; what has happened to engines is seen to on the way."""
        items: list[tuple[str, Any]] = []
        for name, value in self._watch.poll(TICK):
            if name in self._starting:
                self._came_up(name, value)
            elif isinstance(value, ActorLost):
                self._blame(value)
                self._care.tell(Lost(name, value.reason))
            elif value is ENDED:
                self._ended(name, shares)
            else:
                items.append((name, value))
        self._care.tick()
        for action in self._care.take(self._names):
            self._carry_out(action, shares, refresh)
        for name in self._names:
            if name not in self._starting and self._care.is_gone(name):
                self._forget(name, shares)
        return items

    def _carry_out(self, action: Restart | Refresh | HandOn, shares: Shares, refresh: bool) -> None:
        match action:
            case Restart((name,)):
                self._forget(name, shares)
                try:
                    self._starting[name], ready = self._source.begin_engine(name)
                except NoSeat as none:
                    self._care.tell(Unseated(name, none.reason))
                except ActorLost as lost:
                    self._care.tell(Lost(name, lost.reason))
                else:
                    self._watch.add(name, ready)
            case Refresh((name,)) if refresh and name in self.engines:
                self._refresh(name)
            case HandOn(name, reason):
                if shares.offer(name):
                    self._care.say(f"{name} is slow ({reason}): what it has not done is handed to others", "slow", name)

    def _forget(self, name: str, shares: Shares) -> None:
        """Nothing more will come from this process."""
        self.engines.pop(name, None)
        self._watch.drop(name)
        self._stopped.discard(name)
        shares.lost(name)

    def _came_up(self, name: str, value: Any) -> None:
        engine = self._starting.pop(name)
        if isinstance(value, ActorLost):
            self._care.tell(Lost(name, value.reason))
        else:
            self._source.register(name, value)
            self.engines[name] = engine
            self._care.tell(Started(name))

    def _refresh(self, name: str) -> None:
        version = self._care.fleet.version
        try:
            if version is not None and self._source.refresh_engine(name, self.engines[name]):
                self._care.tell(Current(name, version))
        except ActorLost as lost:
            if lost.name != name:
                raise
            self._care.tell(Lost(name, lost.reason))

    def _ended(self, name: str, shares: Shares) -> None:
        missing = shares.wanted(name)
        shares.lost(name)
        if missing and name not in self._stopped:
            self._care.tell(Lost(name, f"it ended without an answer to {missing} groups"))
        self._stopped.discard(name)
        self._care.tell(Idle(name))

    def _employ(self, shares: Shares, sampling: Sampling) -> None:
        """Give what is in the queue to engines that have nothing to do."""
        fleet = self._care.fleet
        idle = [name for name in fleet.usable() if name not in self._watch]
        among = len(idle) + len(fleet.coming())
        for position, name in enumerate(idle):
            if part := shares.take(name, among - position):
                self._ask(name, part, sampling)
        if shares.open and not len(self._watch) and not self._awaited():
            stale = ", ".join(fleet.coming()) or "none"
            raise RemoteFailure(
                f"{shares.open} groups are not generated and no engine can do it: the weights they need are gone, the "
                f"learner has moved on (engines that are up without them: {stale})"
            )

    def _stop_useless(self, shares: Shares) -> None:
        """Stop engines that only work on what others have answered."""
        for name in self._watch.names():
            busy = name not in self._starting and name not in self._stopped
            if busy and shares.unanswered(name) and not shares.wanted(name):
                self._stopped.add(name)
                self._watch.cancel(name)

    def _finish(self, shares: Shares) -> None:
        """Everything is answered: streams that have nothing more to say end by themselves, others are stopped."""
        self._stop_useless(shares)
        while set(self._watch.names()) - self._starting.keys() - self._stopped:
            self._news(shares, refresh=False)

    def _blame(self, lost: ActorLost) -> None:
        """An engine that gives unsound log-probs is replaced; a group that has none from a second one ends the run."""
        if isinstance(lost.cause, EngineFault):
            self._faults[lost.cause.key] += 1
            if self._faults[lost.cause.key] > 1:
                raise BrokenPromise(f"{lost.cause}\n  It was so on two engines, so it is not the engine: {lost.name}")
