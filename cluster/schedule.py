"""What may start next: the schedules phased, streamed and async as one pure state machine, without clock or process.

    schedule = Schedule("streamed", rounds=12, groups=[32] * 16)
    while not schedule.over:
        while (task := schedule.next()) is not None:
            ...                                 # start it: it counts as running from here
        ...                                     # wait for something that runs; then say what happened:
        schedule.settle(round, minibatch, kept=True)        # a group of a round that is being generated is in
        schedule.done(task)                                 # a task has ended

There are two places to work in, engines and learner. `Generate` occupies the engines, `Train` and `Record` the learner,
`Sync` both. Rounds are generated, trained, published and recorded in their order, each once. In all schedules:

* a round is generated from one weights version; a sync waits until all of it has been finished on the version it began
  with (so no response and no group ever mixes versions), and comes before the next generation;
* every version is published before the learner goes on, so that every round can be evaluated and committed;
* `version` of a Generate is at most the allowed lag behind the round.

| schedule | Generate(r) waits for | Train hands over | lag |
|---|---|---|---|
| phased | Record(r - 1) | the round, when it is generated | 0 |
| streamed | Sync(r - 1) | one minibatch after the other, each when it and all before it are generated | 0 |
| async | Sync(r - 1 - max_lag) or a later one | the round, when it is generated | <= max_lag |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.errors import BrokenPromise

Kind = Literal["phased", "streamed", "async"]


@dataclass(frozen=True, slots=True)
class Generate:
    """Have the engines answer all prompts of a round, those of the first minibatch first."""

    round: int
    """1, 2, ..."""
    version: int
    """Weights version the engines hold meanwhile."""


@dataclass(frozen=True, slots=True)
class Train:
    """Hand minibatches of a round to the learner, which makes one step of each, in this order."""

    round: int
    """1, 2, ..."""
    minibatches: tuple[int, ...]
    """Those that have a group to train on; never empty."""
    first: bool
    """True when the policy is still as it was before the round: no step of the round has been made."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Publish the weights after a round as version `round`; evaluate them where that is due."""

    round: int
    """1, 2, ..."""


@dataclass(frozen=True, slots=True)
class Record:
    """Write the round down and commit it; the learner holds the weights after it."""

    round: int
    """1, 2, ..."""


Task = Generate | Train | Sync | Record


@dataclass(slots=True)
class _Ledger:
    """The groups of one round, by minibatch."""

    open: list[int]
    """Planned and not yet in."""
    kept: list[int]
    """Scored, to be trained."""
    dropped: list[int]
    """Left out for a reason."""
    handed: int = 0
    """Minibatches that were handed over, or have nothing to train."""
    whole: bool = False
    """True when generation of the round has ended."""


@dataclass
class Schedule:
    """Decides; see the top of this file. Every method is a plain change of state."""

    kind: Kind
    """phased, streamed or async."""
    rounds: int
    """The last round."""
    groups: Sequence[int]
    """(M,) groups planned per minibatch, the same in every round."""
    max_lag: int = 0
    """Async: weights versions a response may be behind (the others allow none)."""
    completed: int = 0
    """Rounds that are recorded already (a resume); the engines hold this version."""
    running: list[Task] = field(default_factory=list)
    """What was started and has not ended, in that order."""

    def __post_init__(self) -> None:
        self.asked = self.trained = self.published = self.recorded = self.completed
        self._ledgers: dict[int, _Ledger] = {}

    @property
    def over(self) -> bool:
        """True when the last round is recorded."""
        return self.recorded >= self.rounds

    @property
    def allowed_lag(self) -> int:
        """Largest lag of a group."""
        return self.max_lag if self.kind == "async" else 0

    def next(self) -> Task | None:
        """A task that may start now; it counts as running. None: wait for one that runs, or `over`."""
        task = self._sync() or self._generate() or self._record() or self._train()
        if task is not None:
            self.running.append(task)
        elif not self.running and not self.over:
            raise BrokenPromise(f"the schedule {self.kind} stands still after round {self.recorded}: nothing may start")
        return task

    def settle(self, round_: int, minibatch: int, *, kept: bool) -> None:
        """A planned group is in: kept for training, or dropped for a reason. Each planned group once."""
        ledger = self._ledgers.get(round_)
        if ledger is None or not ledger.open[minibatch]:
            raise BrokenPromise(f"round {round_}: a group of minibatch {minibatch} came in that was not planned")
        ledger.open[minibatch] -= 1
        (ledger.kept if kept else ledger.dropped)[minibatch] += 1

    def done(self, task: Task) -> None:
        """A running task has ended."""
        self.running.remove(task)
        match task:
            case Generate(round=round_):
                ledger = self._ledgers[round_]
                if any(ledger.open):
                    raise BrokenPromise(f"round {round_}: {sum(ledger.open)} planned groups are neither in nor dropped")
                ledger.whole = True
            case Train():
                pass
            case Sync(round=round_):
                self.published = round_
            case Record(round=round_):
                self.recorded = round_
                del self._ledgers[round_]
        self._pass_over_empty()

    def _sync(self) -> Sync | None:
        idle = not self._runs(Generate, Train, Record, Sync)
        return Sync(self.published + 1) if idle and self.trained > self.published else None

    def _generate(self) -> Generate | None:
        round_ = self.asked + 1
        if round_ > self.rounds or self._runs(Generate, Sync):
            return None
        if self.kind == "phased" and (self.recorded < self.asked or self._runs(Record)):
            return None
        if self.trained > self.published or round_ - 1 - self.published > self.allowed_lag:
            return None
        self.asked = round_
        count = len(self.groups)
        self._ledgers[round_] = _Ledger(list(self.groups), [0] * count, [0] * count)
        self._pass_over_empty()
        return Generate(round_, self.published)

    def _record(self) -> Record | None:
        idle = not self._runs(Train, Record, Sync)
        return Record(self.recorded + 1) if idle and self.published > self.recorded else None

    def _train(self) -> Train | None:
        round_ = self.trained + 1
        ledger = self._ledgers.get(round_)
        if ledger is None or self.recorded < round_ - 1 or self._runs(Train, Record, Sync):
            return None
        if not ledger.whole and self.kind != "streamed":
            return None
        start, end = ledger.handed, ledger.handed
        while end < len(ledger.open) and not ledger.open[end]:
            end += 1
            if self.kind == "streamed" and ledger.kept[end - 1]:
                break  # one at a time, however many are there: what is done does not depend on who was faster
        minibatches = tuple(m for m in range(start, end) if ledger.kept[m])
        if not minibatches:
            return None
        ledger.handed = end
        return Train(round_, minibatches, first=not any(ledger.kept[:start]))

    def _pass_over_empty(self) -> None:
        """A round is trained when all of its minibatches were; those without a group left make no step."""
        ledger = self._ledgers.get(self.trained + 1)
        if ledger is None or self._runs(Train) or self.recorded < self.trained:
            return
        while ledger.handed < len(ledger.open) and not ledger.open[ledger.handed] and not ledger.kept[ledger.handed]:
            ledger.handed += 1
        if ledger.whole and ledger.handed == len(ledger.open):
            self.trained += 1

    def _runs(self, *kinds: type[Task]) -> bool:
        return any(isinstance(task, kinds) for task in self.running)
