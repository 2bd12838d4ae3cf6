"""The running system of one run: its engines as a pool, its ranks as a group, the weights between them, under care."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster import transport as transports
from cluster.care import Care
from cluster.errors import RemoteFailure
from cluster.fleet import Fleet, Limits
from cluster.fleet_events import Lost, Restart, Started
from cluster.learner_group import LearnerGroup
from cluster.memory import resident
from cluster.node_changes import follow_losses, use_room
from cluster.rollout_pool import RolloutPool
from cluster.run.speed import Work
from cluster.start import START_SECONDS, Processes
from cluster.turns import Turns
from cluster.waiting import ActorLost, NoSeat, fetch_those, headline
from cluster.weight_sync import SyncReport, sync_weights

SYNC_SECONDS = 600.0
"""A weight sync may take this long."""


@dataclass
class System:
    """The running processes of one run."""

    processes: Processes
    """Its actors one by one."""
    tell: Callable[[str, str, tuple[str, ...]], None] = lambda text, kind, names: None
    """Told of what happens to processes: a text for people, a word for the event log, and whom it is about."""
    turns: Turns = field(init=False)
    """Who uses a device that engines and ranks share."""
    recover: Callable[[ActorLost], None] = lambda lost: _not_recoverable(lost)
    """Puts the ranks back when one is lost while engines are at work (Learning.rebuild)."""
    moved_on: bool = False
    """True while the learner has been given a batch since the last publish: what it holds is not `version` any more."""

    def __post_init__(self) -> None:
        self.config, self.plan = self.processes.config, self.processes.plan
        self.turns = Turns(self.plan.placement == "colocated", SYNC_SECONDS)

    def launch(self, model: str) -> None:
        """Start all actors on a model directory at once, wait for all of them, and connect the transport.

        PlanError when the cluster does not have the seats (any more), or its nodes do not see model and run directory.
        """
        self.model = model
        self.processes.take_seats(model)
        ranks = []
        if self.turns.shared:
            # Engines are shown the GPUs that their ranks were given; nothing is loaded yet.
            ranks = [self.processes.start_rank(rank) for rank in range(self.plan.ranks)]
            self.processes.await_up({f"learner-{rank}": actor.about.remote() for rank, actor in enumerate(ranks)})
        engines = self._start_engines()
        starting = {name: actor.ready.remote() for name, actor in engines.items()}
        if self.turns.shared:
            # vLLM measures what is free on the device; ranks must not load into it meanwhile.
            self.processes.await_up(starting)
            self.turns.to_ranks([], engines)
        ranks = self.processes.load_ranks(starting, ranks)
        self._supervise(engines, [f"learner-{rank}" for rank in range(self.plan.ranks)])
        self.learners = LearnerGroup(ranks, self.care)
        self.shapes = self.learners.shapes(START_SECONDS)
        self.transport = transports.make(self.plan.transport)
        self.transport.connect(ranks, engines, START_SECONDS)
        self._prove_ranks()

    def launch_engines(self, model: str) -> None:
        """Start engines only, on the weights of a model directory (evaluation)."""
        self.model = model
        self.processes.take_seats(model)
        engines = self._start_engines()
        self.processes.await_up({name: actor.ready.remote() for name, actor in engines.items()})
        self._supervise(engines, [])
        self.care.fleet.publish(self.version)
        self.care.proven(engines, self.version)

    def sync(self, version: int) -> SyncReport:
        """Give every engine the learner's weights as `version`, and check the receipts.

        An engine that is lost on the way is replaced, and all are synced again: none ever holds half of two versions.
        """
        self.pool.settle()
        self.care.fleet.publish(version)
        while True:
            try:
                self.turns.to_weights(self.learners.ranks, self.pool.engines)
                report = self._sync(self.pool.engines, version)
                self.turns.to_engines(self.pool.engines)
                break
            except ActorLost as lost:
                if lost.name not in self.pool.engines:
                    raise
                self.pool.lost(lost)
                self.pool.settle()
        self.care.proven(self.pool.engines, version)
        self.version, self.moved_on = version, False
        if self.processes.seats is not None:
            use_room(self.processes.seats, self.pool, self.care.fleet, self.tell)
        return report

    def before_learning(self) -> None:
        """Hand a shared device over to the ranks."""
        self.turns.to_ranks(self.learners.ranks, self.pool.engines)

    @property
    def members(self) -> dict[str, Any]:
        """Every engine and rank, by name."""
        return self.pool.engines | self.learners.named

    @property
    def hosts(self) -> dict[str, str]:
        """Where every engine and rank runs."""
        return {name: str(self.processes.abouts[name]["host"]) for name in self.members}

    def usage(self) -> tuple[dict[str, int], Work]:
        """Resident bytes by process, the driver included; and how long each has been at work.

        One that does not answer is left out here, and to those who need it.
        """
        calls = {name: actor.usage.remote() for name, actor in self.members.items()}
        used = fetch_those(calls, 10.0)
        memory = {name: each[0] for name, each in used.items()}
        return memory | {"driver": resident()}, Work(time.monotonic(), {name: each[1] for name, each in used.items()})

    def close(self) -> None:
        """Stop everything (Processes.close)."""
        self.processes.close()

    def begin_engine(self, name: str) -> tuple[Any, Any]:
        """Start an engine on the weights of the model directory: (actor, reference that answers when it is up).

        NoSeat when its node is gone and there is no room elsewhere, NoRoom when the run cannot go on at all.
        """
        if self.processes.seats is not None:
            follow_losses(self.processes.seats, self.pool, self.tell)
            if name not in self.processes.seats:
                raise NoSeat(name, "its node is gone, and no other has room for it now")
            if self._trains and self.turns.shared and not self.processes.has_ranks(name):
                raise NoSeat(name, "its node is gone, and its ranks are not up on another yet")
        actor = self.processes.start_engine(name)
        return actor, actor.ready.remote()

    def register(self, name: str, about: dict[str, Any]) -> None:
        """Write down who and where a process is (Processes.register)."""
        self.processes.register(name, about)

    def refresh_engine(self, name: str, engine: Any) -> bool:
        """Give one engine the weights the others hold. False when the learner has moved on; ActorLost."""
        if not self._trains:
            return True  # it came up with the only weights there are
        if self.moved_on:
            return False
        while True:
            try:
                self._sync({name: engine}, self.version)
                return True
            except ActorLost as lost:
                if lost.name not in self.learners.names:
                    raise
                self.recover(lost)
                if self.turns.shared:
                    self.turns.to_weights(self.learners.ranks, {})

    def replace_ranks(self, lost: ActorLost) -> None:
        """All ranks anew, on the weights of the model directory; a commit must be restored before they are used.

        RemoteFailure when ranks were lost too often, NoRoom when their node is gone and there is no other for them.
        """
        if not self.care.is_gone(lost.name):
            self.care.tell(Lost(lost.name, lost.reason))
        self.transport.close()
        names = self.learners.names
        while True:
            while not any(isinstance(action, Restart) for action in self.care.take(names)):
                time.sleep(0.1)  # the delay before the next restart
                self.care.tick()
            if self.processes.seats is not None:
                follow_losses(self.processes.seats, self.pool, self.tell)
            try:
                self.learners.ranks = self.processes.load_ranks({})
                break
            except ActorLost as again:
                self.care.tell(Lost(names[0], again.reason))
        self._prove_ranks()

    def end(self, names: tuple[str, ...], reason: str) -> None:
        """Kill whatever is left of these processes, and say that they are replaced, and why."""
        for name in names:
            self.turns.forget(name)
            self.processes.kill(name)
        self.tell(f"{', '.join(names)} lost: {headline(reason)}", "lost", names)

    def say(self, text: str, kind: str, names: tuple[str, ...]) -> None:
        """Pass on what supervision has to say."""
        self.tell(text, kind, names)

    def _start_engines(self) -> dict[str, Any]:
        names = [f"engine-{index}" for index in range(self.plan.engines)]
        return {name: self.processes.start_engine(name) for name in names}

    def _supervise(self, engines: dict[str, Any], ranks: list[str]) -> None:
        limits = Limits(silence=self.config.cluster.heartbeat, starting=START_SECONDS)
        self.care = Care(Fleet(list(engines), ranks, limits, time.monotonic()), self)
        self.pool = RolloutPool(engines, self.care, self)
        self._trains, self.version = bool(ranks), -1
        for name in [*engines, *ranks]:
            self.care.tell(Started(name))

    def _prove_ranks(self) -> None:
        """The ranks are up, and their weights are what the run goes on from (or what it restores a commit into)."""
        for name in self.learners.names:
            self.care.tell(Started(name))
        self.care.proven(self.learners.names, self.version)
        self.care.take(self.learners.names)

    def _sync(self, engines: dict[str, Any], version: int) -> SyncReport:
        if self.moved_on and version == self.version:
            raise RemoteFailure(
                f"{', '.join(engines)} must be given weights version {version}, and the learner has gone on from it "
                f"(schedule {self.plan.schedule}): nobody holds these weights any more"
            )
        return sync_weights(
            self.learners.ranks,
            engines,
            self.transport,
            self.shapes,
            version,
            self.plan.engine_dtype,
            SYNC_SECONDS,
            self.config.cluster.heartbeat,
        )


def _not_recoverable(lost: ActorLost) -> None:
    raise lost
