"""Starting and stopping: Ray, the actors, the code they run, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster import transport as transports
from cluster.actors import LearnerActor, RolloutActor
from cluster.care import Care
from cluster.errors import BrokenPromise, RemoteFailure
from cluster.fleet import Fleet, Limits
from cluster.fleet_events import Lost, Restart, Started
from cluster.gpu_requests import Request, engine_request, rank_request
from cluster.learner_group import LearnerGroup
from cluster.memory import resident
from cluster.node_changes import follow_losses, use_room
from cluster.paths_on_nodes import Sight
from cluster.placement import Bundle, Layout
from cluster.plan import Plan
from cluster.ports import on_a_free_port
from cluster.private import remove_abandoned
from cluster.reseating import number
from cluster.rollout_pool import RolloutPool
from cluster.run.config import Config
from cluster.run.folder import RunFolder
from cluster.run.secrecy import hidden
from cluster.run.speed import Work
from cluster.seats import Seats
from cluster.settings import engine_settings, rank_settings
from cluster.turns import Turns
from cluster.waiting import ActorLost, NoSeat, fetch_all, fetch_those, headline
from cluster.weight_sync import SyncReport, sync_weights
from learner import device as learner_device
from rollout import device as rollout_device

START_SECONDS = 600.0
"""An actor may take this long to start (a large model is read from a slow disk)."""
SYNC_SECONDS = 600.0
"""A weight sync may take this long."""


@dataclass
class System:
    """The running processes of one run."""

    config: Config
    plan: Plan
    folder: RunFolder
    code: str
    """Digest of the code the actors must run."""
    temp: Path
    """Ray's own directory, removed at the end."""
    pids: dict[str, int]
    """Actor name -> pid, on this machine; filled as actors start."""
    actors: dict[str, Any] = field(default_factory=dict)
    """Every actor that is there, or on its way."""
    tell: Callable[[str, str, tuple[str, ...]], None] = lambda text, kind, names: None
    """Told of what happens to processes: a text for people, a word for the event log, and whom it is about."""
    abouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Actor name -> where and what it is (Shell.about)."""
    seats: Seats | None = field(init=False)
    """Where each process is started in a cluster that was joined; a private Ray has one node and room for all."""
    turns: Turns = field(init=False)
    """Who uses a device that engines and ranks share."""
    recover: Callable[[ActorLost], None] = lambda lost: _not_recoverable(lost)
    """Puts the ranks back when one is lost while engines are at work (Learning.rebuild)."""
    moved_on: bool = False
    """True while the learner has been given a batch since the last publish: what it holds is not `version` any more."""

    def __post_init__(self) -> None:
        self.turns = Turns(self.plan.placement == "colocated", SYNC_SECONDS)
        joined = bool(self.config.cluster.address)
        self.seats = Seats(self.plan.layout, self.config.rollout.tensor_parallel) if joined else None

    def launch(self, model: str) -> None:
        """Start all actors on a model directory at once, wait for all of them, and connect the transport.

        PlanError when the cluster does not have the seats (any more), or its nodes do not see model and run directory.
        """
        self.model = model
        self._take_seats()
        ranks = []
        if self.turns.shared:
            # Engines are shown the GPUs that their ranks were given; nothing is loaded yet.
            ranks = [self._rank_actor(rank) for rank in range(self.plan.ranks)]
            self._await({f"learner-{rank}": actor.about.remote() for rank, actor in enumerate(ranks)})
        names = [f"engine-{index}" for index in range(self.plan.engines)]
        engines = {name: self._engine_actor(name) for name in names}
        starting = {name: actor.ready.remote() for name, actor in engines.items()}
        if self.turns.shared:
            # vLLM measures what is free on the device; ranks must not load into it meanwhile.
            self._await(starting)
            self.turns.to_ranks([], engines)
        ranks = self._start_ranks(starting, ranks)
        self._supervise(engines, [f"learner-{rank}" for rank in range(self.plan.ranks)])
        self.learners = LearnerGroup(ranks, self.care)
        self.shapes = self.learners.shapes(START_SECONDS)
        self.transport = transports.make(self.plan.transport)
        self.transport.connect(ranks, engines, START_SECONDS)
        self._prove_ranks()

    def launch_engines(self, model: str) -> None:
        """Start engines only, on the weights of a model directory (evaluation)."""
        self.model = model
        self._take_seats()
        engines = {f"engine-{index}": self._engine_actor(f"engine-{index}") for index in range(self.plan.engines)}
        self._await({name: actor.ready.remote() for name, actor in engines.items()})
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
        if self.seats is not None:
            use_room(self.seats, self.pool, self.care.fleet, self.tell)
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
        return {name: str(self.abouts[name]["host"]) for name in self.members}

    def usage(self) -> tuple[dict[str, int], Work]:
        """Resident bytes by process, the driver included; and how long each has been at work.

        One that does not answer is left out here, and to those who need it.
        """
        calls = {name: actor.usage.remote() for name, actor in self.members.items()}
        used = fetch_those(calls, 10.0)
        memory = {name: each[0] for name, each in used.items()}
        return memory | {"driver": resident()}, Work(time.monotonic(), {name: each[1] for name, each in used.items()})

    def close(self) -> None:
        """Stop everything; at the end no process of the run is left on this machine."""
        # Actors write nothing of value on the way out, so they are ended, not asked.
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        ray.shutdown()
        _end(list(self.pids.values()), 5.0)
        shutil.rmtree(self.temp, ignore_errors=True)
        remove_abandoned(self.temp.parent)  # that of a killed run whose last processes wrote while this one started

    def begin_engine(self, name: str) -> tuple[Any, Any]:
        """Start an engine on the weights of the model directory: (actor, reference that answers when it is up).

        NoSeat when its node is gone and there is no room elsewhere, NoRoom when the run cannot go on at all.
        """
        if self.seats is not None:
            follow_losses(self.seats, self.pool, self.tell)
            if name not in self.seats:
                raise NoSeat(name, "its node is gone, and no other has room for it now")
            if self._trains and self.turns.shared and not self._ranks_are_at(self.seats.layout.of_engine(number(name))):
                raise NoSeat(name, "its node is gone, and its ranks are not up on another yet")
        actor = self._engine_actor(name)
        return actor, actor.ready.remote()

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
            if self.seats is not None:
                follow_losses(self.seats, self.pool, self.tell)
            try:
                self.learners.ranks = self._start_ranks({})
                break
            except ActorLost as again:
                self.care.tell(Lost(names[0], again.reason))
        self._prove_ranks()

    def end(self, names: tuple[str, ...], reason: str) -> None:
        """Kill whatever is left of these processes, and say that they are replaced, and why."""
        for name in names:
            self.turns.forget(name)
            if (actor := self.actors.pop(name, None)) is not None:
                ray.kill(actor, no_restart=True)
            if (pid := self.pids.pop(name, None)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # a stopped process ignores Ray's kill for seconds
        self.tell(f"{', '.join(names)} lost: {headline(reason)}", "lost", names)

    def say(self, text: str, kind: str, names: tuple[str, ...]) -> None:
        """Pass on what supervision has to say."""
        self.tell(text, kind, names)

    def _take_seats(self) -> None:
        if self.seats is not None:
            self.seats.reserve(Sight(self.folder.path, self.model))

    @property
    def _layout(self) -> Layout:
        return self.plan.layout if self.seats is None else self.seats.layout

    def _ranks_are_at(self, seat: Bundle) -> bool:
        """Whether the ranks of a colocated engine are up where it has its seat."""
        return all(self.abouts[f"learner-{rank}"]["node"] == seat.node for rank in seat.ranks)

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
        )

    def _start_ranks(self, others: dict[str, Any], begun: list[Any] | None = None) -> list[Any]:
        """All ranks, loaded; `others` are waited for together with them. ActorLost, and then none of them is left.

        `begun` are ranks that were started already and have loaded nothing.
        """
        begun = begun or []

        def attempt() -> list[Any]:
            ranks = [begun.pop(0) if begun else self._rank_actor(rank) for rank in range(self.plan.ranks)]
            try:
                address = fetch_all({"learner-0": ranks[0].free_port.remote()}, START_SECONDS, "finding a port")
                settings = [rank_settings(self.config, self.plan, self.model, rank) for rank in range(len(ranks))]
                loading = [a.load.remote(s, *address["learner-0"]) for a, s in zip(ranks, settings, strict=True)]
                self._await({f"learner-{rank}": call for rank, call in enumerate(loading)} | others)
            except ActorLost:
                for rank in ranks:
                    ray.kill(rank, no_restart=True)
                raise
            return ranks

        return on_a_free_port(attempt)

    def _await(self, calls: dict[str, Any]) -> None:
        """Wait until actors are up; write down who and where they are. ActorLost names the log."""
        try:
            started = fetch_all(calls, START_SECONDS, "starting the actors")
        except ActorLost as lost:
            reason = f"{lost.reason}\n  log of {lost.name}: {self.folder.logs / lost.name}.log"
            raise ActorLost(lost.name, reason, hung=lost.hung, cause=lost.cause) from None
        for name, about in started.items():
            self.register(name, about)

    def register(self, name: str, about: dict[str, Any]) -> None:
        """Write down who and where a process is; BrokenPromise when it runs other code."""
        if about["code"] != self.code:
            raise BrokenPromise(
                f"{name} on {about['host']} runs other code than this command (digest {about['code']}, expected "
                f"{self.code}): another package named rollout, learner or cluster comes first on its path."
            )
        here = socket.gethostname()
        if about["host"] == here:
            self.pids[name] = about["pid"]
        self.abouts[name] = about
        elsewhere = {n: a for n, a in self.abouts.items() if n in self.actors and a["host"] != here}
        (self.folder.path / "pids.txt").write_text(pids_text(self.pids, elsewhere))

    def _engine_actor(self, name: str) -> Any:
        index = int(name.rsplit("-", 1)[1])
        settings = engine_settings(self.config, self.plan, self.model, index)
        request = engine_request(self._layout, index, self.abouts)
        return self._start(RolloutActor, name, rollout_device.environment(self.plan.device), request, settings)

    def _rank_actor(self, rank: int) -> Any:
        environment = learner_device.environment(self.plan.device)
        return self._start(LearnerActor, f"learner-{rank}", environment, rank_request(self._layout, rank))

    def _start(self, kind: Any, name: str, environment: dict[str, str], request: Request, *settings: Any) -> Any:
        environment = environment | dict(request.environment)
        place = NodeAffinitySchedulingStrategy(request.node, soft=False) if request.node else "DEFAULT"
        log = str(self.folder.logs / f"{name}.log")
        # Whatever libraries leave in the temporary directory goes when the run's own is removed; and what has no use
        # for your tokens and keys does not get them. In a joined cluster, processes have their node's environment.
        ours = {} if self.config.cluster.address else hidden() | {"TMPDIR": str(self.temp)}
        variables = ours | environment
        arguments = (*settings, log, self.config.trace_round)
        options: dict[str, Any] = {"runtime_env": {"env_vars": variables}, "scheduling_strategy": place}
        seat = self.seats.options(name) if self.seats is not None else {}
        actor = kind.options(**(options | dict(request.resources) | seat)).remote(*arguments)
        self.actors[name] = actor
        return actor


def pids_text(pids: Mapping[str, int], elsewhere: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per process: its pid here, or `pid@host` on another machine (`elsewhere`: what it said of itself)."""
    lines = {name: f"{name} {pid}" for name, pid in pids.items()}
    lines |= {name: f"{name} {about['pid']}@{about['host']}" for name, about in elsewhere.items()}
    return "".join(f"{lines[name]}\n" for name in sorted(lines))


def _not_recoverable(lost: ActorLost) -> None:
    raise lost


def _end(pids: list[int], seconds: float) -> None:
    """Wait for processes to go, and end those that do not (a stopped process ignores Ray's kill for seconds)."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)
