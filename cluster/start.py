"""Starting and stopping: the actors, the code they run, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import LearnerActor, RolloutActor
from cluster.errors import BrokenPromise
from cluster.gpu_requests import Request, engine_request, rank_request
from cluster.paths_on_nodes import Sight
from cluster.placement import Layout
from cluster.plan import Plan
from cluster.ports import on_a_free_port
from cluster.private import remove, remove_abandoned
from cluster.reseating import number
from cluster.run.config import Config
from cluster.run.folder import RunFolder, start_time
from cluster.run.secrecy import hidden
from cluster.seats import Seats
from cluster.settings import engine_settings, rank_settings
from cluster.waiting import ActorLost, fetch_all
from learner import device as learner_device
from rollout import device as rollout_device

START_SECONDS = 600.0
"""An actor may take this long to start (a large model is read from a slow disk)."""


@dataclass
class Processes:
    """The actors of one run, one by one: how each is started, who and where it is, and how it is ended."""

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
    abouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Actor name -> where and what it is (Shell.about)."""
    seats: Seats | None = field(init=False)
    """Where each process is started in a cluster that was joined; a private Ray has one node and room for all."""
    model: str = field(init=False)
    """Model directory (or, for nodes of a cluster that was joined, hub id) that everybody loads."""

    def __post_init__(self) -> None:
        joined = bool(self.config.cluster.address)
        self.seats = Seats(self.plan.layout, self.config.rollout.tensor_parallel) if joined else None

    def take_seats(self, model: str) -> None:
        """Hold a seat for every process that will load `model`.

        PlanError when the cluster does not have the seats (any more), or its nodes do not see model and run directory.
        """
        self.model = model
        if self.seats is not None:
            self.seats.reserve(Sight(self.folder.path, self.model))

    def start_engine(self, name: str) -> Any:
        """A rollout actor on its way up."""
        settings = engine_settings(self.config, self.plan, self.model, number(name))
        request = engine_request(self._layout, number(name), self.abouts)
        return self._start(RolloutActor, name, rollout_device.environment(self.plan.device), request, settings)

    def start_rank(self, rank: int) -> Any:
        """A learner actor on its way up; it loads nothing yet."""
        environment = learner_device.environment(self.plan.device)
        return self._start(LearnerActor, f"learner-{rank}", environment, rank_request(self._layout, rank))

    def load_ranks(self, others: dict[str, Any], begun: list[Any] | None = None) -> list[Any]:
        """All ranks, started and loaded; `others` are waited for together with them.

        ActorLost, and then none of them is left. `begun` are ranks that were started already and have loaded nothing.
        """
        begun = begun or []

        def attempt() -> list[Any]:
            ranks = [begun.pop(0) if begun else self.start_rank(rank) for rank in range(self.plan.ranks)]
            try:
                address = fetch_all({"learner-0": ranks[0].free_port.remote()}, START_SECONDS, "finding a port")
                settings = [rank_settings(self.config, self.plan, self.model, rank) for rank in range(len(ranks))]
                loading = [a.load.remote(s, *address["learner-0"]) for a, s in zip(ranks, settings, strict=True)]
                self.await_up({f"learner-{rank}": call for rank, call in enumerate(loading)} | others)
            except ActorLost:
                for rank in ranks:
                    ray.kill(rank, no_restart=True)
                raise
            return ranks

        return on_a_free_port(attempt)

    def await_up(self, calls: dict[str, Any]) -> None:
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
        # Two machines may have the same name, and what is a rank there is anything here: it would be killed.
        if about["host"] == socket.gethostname() and about["started"] == start_time(about["pid"]):
            self.pids[name] = about["pid"]
        self.abouts[name] = about
        elsewhere = {n: a for n, a in self.abouts.items() if n in self.actors and n not in self.pids}
        (self.folder.path / "pids.txt").write_text(pids_text(self.pids, elsewhere))

    def has_ranks(self, engine: str) -> bool:
        """Whether the ranks of a colocated engine are up where it has its seat."""
        seat = self._layout.of_engine(number(engine))
        return all(self.abouts[f"learner-{rank}"]["node"] == seat.node for rank in seat.ranks)

    def kill(self, name: str) -> None:
        """Kill whatever is left of a process."""
        if (actor := self.actors.pop(name, None)) is not None:
            ray.kill(actor, no_restart=True)
        if (pid := self.pids.pop(name, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # a stopped process ignores Ray's kill for seconds

    def close(self) -> None:
        """Stop everything; at the end no process of the run is left on this machine."""
        # Actors write nothing of value on the way out, so they are ended, not asked.
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        ray.shutdown()
        _end(list(self.pids.values()), 5.0)
        with contextlib.suppress(OSError):  # what Ray's last processes still write keeps its owner, and goes next time
            remove(self.temp)
        remove_abandoned(self.temp.parent)  # that of a killed run whose last processes wrote while this one started

    @property
    def _layout(self) -> Layout:
        return self.plan.layout if self.seats is None else self.seats.layout

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
