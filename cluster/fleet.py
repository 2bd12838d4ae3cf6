"""Supervision as a pure state machine: what is known of every engine and rank, and what is to be done about it.

    RESTARTING --Started--> STALE --Current--> HEALTHY <--> SUSPECT
        ^                     ^-- publish() ------/            |
        |  delay, then Restart                                 | Lost, or silent for too long
        DEAD <-------------------------------------------------/   (too many restarts: RETIRED, for good;
                                                                    no node with room: UNSEATED, until Seated)

Events go in with the time at which they happened, actions come out (cluster/fleet_events.py has both); whoever carries
them out (cluster/care.py on real processes, a simulator on a clock of its own) reports back with events. No clock, no
process and no thread is in here.

* An engine is supervised alone. Ranks live and die together: with one lost, all are restarted.
* What counts is progress (a counter that rose), not being alive: a process that answers and gets nowhere is lost.
* DEAD never becomes HEALTHY by itself. What comes back is another process, which is STALE, and gets no work, until it
  has proven to hold the current weights.
* Restarts are bounded within a window of time; then the member is RETIRED. An engine whose node is gone may have no
  room elsewhere: it is UNSEATED until a node with room joins. Without ranks, or without the last engine, the run is
  given up.
* When everything was stopped together (a suspended machine), nobody is to blame: a gap between two calls counts for
  nobody's silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
    Seated,
    Started,
    Unseated,
)


class State(StrEnum):
    """What is known of a member."""

    HEALTHY = "healthy"
    """Holds the current weights and makes progress, or has nothing to do."""
    SUSPECT = "suspect"
    """Has work and is silent; another word from it and it is healthy again."""
    DEAD = "dead"
    """Lost; will be restarted after a delay."""
    RESTARTING = "restarting"
    """A new process in its place is on its way."""
    STALE = "stale"
    """Up, but has not proven to hold the current weights: no work for it."""
    RETIRED = "retired"
    """Lost too often; not restarted any more."""
    UNSEATED = "unseated"
    """An engine whose node is gone, while no other has room for it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When what is done. All times in seconds."""

    silence: float = 60.0
    """Without progress while it has work: lost. Half of it: suspect."""
    starting: float = 300.0
    """For a new process to be up."""
    restarts: int = 3
    """Restarts of one member (or of the ranks) within `window`."""
    window: float = 3600.0
    """How long a restart counts."""
    backoff: float = 1.0
    """Before the second restart within the window; doubled with each one. The first comes at once."""
    slow: float = 3.0
    """An engine is slow when it takes this many times as long for its groups as the engines that are done took."""
    slow_floor: float = 5.0
    """... and at least this long."""
    gap: float = 5.0
    """More between two calls: everything stood still, nobody was silent."""


@dataclass(slots=True)
class _Member:
    """What is remembered of one engine, or of all ranks together."""

    names: tuple[str, ...]
    state: State = State.RESTARTING
    since: float = 0.0
    """When it came into its state."""
    restarts: list[float] = field(default_factory=list)
    """When it was restarted, within the window."""
    waiting: set[str] = field(default_factory=set)
    """Names that have yet to say Started (or Current)."""
    due: float | None = None
    """When a dead one is to be restarted."""
    heard: dict[str, float] = field(default_factory=dict)
    """Name -> when it last made progress, while it has work."""
    counter: dict[str, float] = field(default_factory=dict)
    """Name -> how far it has come."""
    asked: float = 0.0
    """When its work was given."""
    groups: int = 0
    """How many groups that work has."""
    pace: float | None = None
    """Seconds per group of the last work it has done."""
    handed_on: bool = False
    """Its work was offered to others."""


class Fleet:
    """The engines and ranks of one run."""

    def __init__(self, engines: Sequence[str], ranks: Sequence[str], limits: Limits, now: float) -> None:
        """All of them are on their way up at `now`: RESTARTING until Started."""
        self.limits = limits
        self.version: int | None = None
        """Weights version the engines must hold; None before the first publish."""
        self.restarts = 0
        """Restarts so far, of whatever kind."""
        self._now = now
        units = [(name,) for name in engines] + ([tuple(ranks)] if ranks else [])
        members = [_Member(names, since=now, waiting=set(names)) for names in units]
        self._units = tuple(members)
        self._members = {name: member for member in members for name in member.names}
        self._engines, self._ranks = tuple(engines), tuple(ranks)
        self._dead: list[_Member] = []

    # What is asked of it

    def states(self) -> dict[str, State]:
        """State by name, for people: engines first."""
        return {name: member.state for name, member in self._members.items()}

    def usable(self) -> tuple[str, ...]:
        """Engines that may be given work."""
        return tuple(n for n in self._engines if self._members[n].state in (State.HEALTHY, State.SUSPECT))

    def coming(self) -> tuple[str, ...]:
        """Engines that are not usable now, and will be."""
        return tuple(n for n in self._engines if self._members[n].state in (State.DEAD, State.RESTARTING, State.STALE))

    def unseated(self) -> tuple[str, ...]:
        """Engines that wait for room."""
        return tuple(n for n in self._engines if self._members[n].state is State.UNSEATED)

    # What is told to it

    def publish(self, version: int) -> None:
        """The learner's weights are version `version` from now on: every engine is STALE until it proves to hold it."""
        self.version = version
        for name in self._engines:
            member = self._members[name]
            if member.state in (State.HEALTHY, State.SUSPECT, State.STALE):
                self._turn(member, State.STALE, self._now)
                member.waiting = set(member.names)

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done after an event. KeyError for a name that is not one of the fleet's."""
        self._pass_time(now)
        member = self._members[event.name]
        actions: list[Action] = []
        match event:
            case Started(name):
                actions = self._started(member, name)
            case Current(name, version):
                self._current(member, name, version)
            case Asked(name, groups):
                member.heard[name] = self._now
                member.counter.pop(name, None)
                member.asked, member.groups, member.handed_on = self._now, groups, False
            case Progress(name, counter):
                self._progress(member, name, counter)
            case Idle(name):
                self._idle(member, name)
            case Lost(name, reason):
                actions = self._lost(member, f"{name}: {reason}")
            case Unseated(_, reason):
                actions = self._unseat(member, reason)
            case Seated() if member.state is State.UNSEATED:
                self._revive(member, self._now)
        return actions + self._due()

    def tick(self, now: float) -> list[Action]:
        """What is to be done because time has passed; call it about once a second while anybody has work."""
        self._pass_time(now)
        actions: list[Action] = []
        for member in self._units:
            actions += self._check_silence(member) or self._check_start(member)
        return actions + self._slow() + self._due()

    # Transitions

    def _started(self, member: _Member, name: str) -> list[Action]:
        if member.state is not State.RESTARTING:
            return []
        member.waiting.discard(name)
        if member.waiting:
            return []
        self._turn(member, State.STALE, self._now)
        member.waiting = set(member.names)
        # Before the first publish nobody can be up to date, and everybody will be in it.
        return [] if self.version is None else [Refresh(member.names)]

    def _current(self, member: _Member, name: str, version: int) -> None:
        if member.state is not State.STALE or (name in self._engines and version != self.version):
            return
        member.waiting.discard(name)
        if not member.waiting:
            self._turn(member, State.HEALTHY, self._now)

    def _progress(self, member: _Member, name: str, counter: float) -> None:
        if name not in member.heard or counter <= member.counter.get(name, float("-inf")):
            return
        member.counter[name] = counter
        member.heard[name] = self._now
        if member.state is State.SUSPECT and not any(self._doubtful(member)):
            self._turn(member, State.HEALTHY, self._now)

    def _idle(self, member: _Member, name: str) -> None:
        if member.heard.pop(name, None) is None:
            return
        if member.groups and not member.handed_on:
            member.pace = (self._now - member.asked) / member.groups
        if member.state is State.SUSPECT and not any(self._doubtful(member)):
            self._turn(member, State.HEALTHY, self._now)

    def _lost(self, member: _Member, reason: str) -> list[Action]:
        if member.state in (State.DEAD, State.RETIRED, State.UNSEATED):
            return []  # it is known: of ranks, every one may report the same death
        limits = self.limits
        member.heard.clear()
        member.pace = None
        member.restarts = [at for at in member.restarts if self._now - at < limits.window]
        ended: list[Action] = [End(member.names, reason)]
        if len(member.restarts) >= limits.restarts:
            self._turn(member, State.RETIRED, self._now)
            lost = f"lost {len(member.restarts) + 1} times within {limits.window / 60:g} min, the last time {reason}"
            ended.append(Retire(member.names, lost))
            if self._no_engine() or member.names == self._ranks:
                ended.append(GiveUp(f"{', '.join(member.names)}: {lost}"))
            return ended
        earlier = len(member.restarts)
        self._revive(member, self._now + (limits.backoff * 2 ** (earlier - 1) if earlier else 0.0))
        return ended

    def _revive(self, member: _Member, due: float) -> None:
        self._turn(member, State.DEAD, self._now)
        member.due = due
        self._dead.append(member)

    def _unseat(self, member: _Member, reason: str) -> list[Action]:
        """Known to be lost: its restart is not made, and does not count."""
        if member.state is State.RESTARTING and member.restarts:
            member.restarts.pop()
            self.restarts -= 1
        elif member.state is State.DEAD:
            self._dead.remove(member)
            member.due = None
        else:
            return []
        self._turn(member, State.UNSEATED, self._now)
        without: list[Action] = [GoWithout(member.names, reason)]
        return [*without, GiveUp(f"{', '.join(member.names)}: {reason}")] if self._no_engine() else without

    def _no_engine(self) -> bool:
        return all(self._members[name].state in (State.RETIRED, State.UNSEATED) for name in self._engines)

    def _due(self) -> list[Action]:
        """Restarts whose delay is over."""
        actions: list[Action] = []
        for member in tuple(self._dead):
            if member.due is not None and self._now >= member.due:
                self._dead.remove(member)
                member.due = None
                member.restarts.append(self._now)
                self.restarts += 1
                self._turn(member, State.RESTARTING, self._now)
                member.waiting = set(member.names)
                actions.append(Restart(member.names))
        return actions

    def _check_silence(self, member: _Member) -> list[Action]:
        if member.state not in (State.HEALTHY, State.SUSPECT):
            return []
        for name in self._doubtful(member):
            silent = self._now - member.heard[name]
            if silent > self.limits.silence:
                return self._lost(member, f"{name}: no progress for {silent:.0f} s")
            if member.state is State.HEALTHY:
                self._turn(member, State.SUSPECT, self._now)
                return [Doubt(name, silent)]
        return []

    def _check_start(self, member: _Member) -> list[Action]:
        if member.state is State.RESTARTING and self._now - member.since > self.limits.starting:
            missing = ", ".join(sorted(member.waiting))
            return self._lost(member, f"{missing}: not up after {self._now - member.since:.0f} s")
        return []

    def _slow(self) -> list[Action]:
        """Engines that others, who have done their own part, should help out."""
        members = [self._members[name] for name in self.usable()]
        paces = [member.pace for member in members if not member.heard and member.pace is not None]
        if not paces:
            return []
        actions: list[Action] = []
        for member in members:
            taken, expected = self._now - member.asked, max(paces) * member.groups
            limit = max(self.limits.slow_floor, self.limits.slow * expected)
            if member.heard and member.groups and not member.handed_on and taken > limit:
                member.handed_on = True
                reason = f"at work for {taken:.0f} s on what took the others {expected:.0f} s"
                actions.append(HandOn(member.names[0], reason))
        return actions

    def _doubtful(self, member: _Member) -> list[str]:
        """Names that were silent for half of what is allowed, the longest first."""
        silent = sorted(member.heard, key=lambda name: member.heard[name])
        return [name for name in silent if self._now - member.heard[name] > self.limits.silence / 2]

    def _turn(self, member: _Member, state: State, now: float) -> None:
        member.state, member.since = state, now

    def _pass_time(self, now: float) -> None:
        gap = now - self._now
        if gap > self.limits.gap:
            for member in self._units:
                member.heard = {name: at + gap for name, at in member.heard.items()}
                member.asked += gap
                member.since += gap
        self._now = max(self._now, now)
