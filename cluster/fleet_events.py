"""What supervision is told and what it answers: events of engines and ranks, and the actions that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """A process is up (for ranks: all of them)."""

    name: str


@dataclass(frozen=True, slots=True)
class Current:
    """It has proven to hold a weights version: a good receipt, or for ranks the hash of what they restored."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Asked:
    """It was given work of so many groups (ranks: 0). From now on its silence counts."""

    name: str
    groups: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Its counter of progress (tokens, microbatches) stands at `counter`; a counter that did not rise says nothing."""

    name: str
    counter: float


@dataclass(frozen=True, slots=True)
class Idle:
    """It has done what it was asked for, or stopped doing it."""

    name: str


@dataclass(frozen=True, slots=True)
class Lost:
    """It died, raised, or cannot be reached."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unseated:
    """An engine that is lost cannot be started again: its node is gone and no other has room for it."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Seated:
    """There is room for an engine that had none."""

    name: str


Event = Started | Current | Asked | Progress | Idle | Lost | Unseated | Seated


# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class End:
    """Kill whatever is left of these processes, and tell the user why; they are not coming back as they are."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these anew, together. Answer with Started or Lost."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refresh:
    """These are up with old weights: bring them up to date, and answer with Current or Lost."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandOn:
    """Offer the unfinished groups of this slow engine to those that are done."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """Tell the user that this member is silent."""

    name: str
    silent: float


@dataclass(frozen=True, slots=True)
class Retire:
    """Tell the user that these are given up."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GoWithout:
    """Tell the user that the run goes on without these until there is room for them."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop the run: nobody is left to do the work."""

    reason: str


Action = End | Restart | Refresh | HandOn | Doubt | Retire | GoWithout | GiveUp
