"""The one place where supervision meets real processes: events and the time go to the fleet, its decisions are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from cluster.errors import RemoteFailure
from cluster.fleet import Fleet, State
from cluster.fleet_events import Action, Current, Doubt, End, Event, GiveUp, GoWithout, HandOn, Refresh, Restart, Retire


class Hands(Protocol):
    """Who can end processes and talk to people."""

    def end(self, names: tuple[str, ...], reason: str) -> None:
        """Kill whatever is left of these processes, and say why."""

    def say(self, text: str, kind: str, names: tuple[str, ...]) -> None:
        """A line for people and for the event log."""


class Care:
    """The fleet of a run, on the clock of this process.

    What only the owner of a process can do (start it, bring it up to date, hand its work on) is kept in `wanted` until
    the owner asks: the pool for engines, the system for ranks.
    """

    def __init__(self, fleet: Fleet, hands: Hands, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self.fleet = fleet
        self.wanted: list[Restart | Refresh | HandOn] = []
        self.reasons: dict[str, str] = {}
        """Why a member was ended the last time."""
        self._hands, self._clock = hands, clock

    def tell(self, event: Event) -> None:
        """Something happened. RemoteFailure when nobody is left to do the work."""
        self._do(self.fleet.handle(event, self._clock()))

    def tick(self) -> None:
        """Time has passed. RemoteFailure when nobody is left to do the work."""
        self._do(self.fleet.tick(self._clock()))

    def proven(self, names: Iterable[str], version: int) -> None:
        """These have proven to hold a weights version."""
        for name in names:
            self.tell(Current(name, version))

    def take(self, names: tuple[str, ...]) -> list[Restart | Refresh | HandOn]:
        """What is wanted of the owner of these members; it is not given a second time."""
        mine = [action for action in self.wanted if set(_names(action)) <= set(names)]
        self.wanted = [action for action in self.wanted if action not in mine]
        return mine

    def say(self, text: str, kind: str, *names: str) -> None:
        """A line for people and for the event log."""
        self._hands.say(text, kind, names)

    def works(self, name: str) -> bool:
        """Whether a member may be waited for."""
        return self.fleet.states()[name] in (State.HEALTHY, State.SUSPECT)

    def is_gone(self, name: str) -> bool:
        """Whether the process that went by this name is no more."""
        return self.fleet.states()[name] in (State.DEAD, State.RESTARTING, State.RETIRED, State.UNSEATED)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case End(names, reason):
                    self.reasons |= dict.fromkeys(names, reason)
                    self._hands.end(names, reason)
                case Doubt(name, silent):
                    self._hands.say(f"{name}: no progress for {silent:.0f} s", "silent", (name,))
                case Retire(names, reason):
                    self._hands.say(f"{', '.join(names)}: {reason}; not started again", "retired", names)
                case GoWithout(names, reason):
                    self._hands.say(f"{', '.join(names)}: {reason}; the run goes on without", "unseated", names)
                case GiveUp(reason):
                    raise RemoteFailure(reason)
                case Restart() | Refresh() | HandOn():
                    self.wanted.append(action)


def _names(action: Restart | Refresh | HandOn) -> tuple[str, ...]:
    return (action.name,) if isinstance(action, HandOn) else action.names
