"""One kind of grading (math-verify, or one user's function): its queue, its processes, its deadlines.

All methods run in the pool's thread. A process works on one item at a time, so an answer that hangs, takes all memory
or crashes costs one deadline and one process, and nothing of what waits beside it.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from cluster.errors import RemoteFailure
from cluster.scorer_process import Channel, Nursery, OwnProcess
from rollout.types import UserError

MATH = ""
"""Name of the lane that asks math-verify; other lanes are named by the function they call."""
START_SECONDS = 120.0
"""A process that has not said hello by then will not."""
MAX_STARTS_IN_VAIN = 3
SLOW_SECONDS = 0.2
"""A math-verify item that takes longer gets a process of its own: another one takes its place in the lane."""
MAX_SPARES = 4
PATIENCE = 2.0
"""The deadline of math-verify is CPU time (scorer_worker.py); on a busy machine the clock may show this much more."""
FAULTY_ITEMS, FAULTY_ROWS = 8, 3
"""So many failures in a row, on so many different rows, are no longer the answers' fault but the grader's."""


@dataclass
class Job:
    """One item and what to do with its result."""

    item: dict[str, Any]
    """What the process gets."""
    row_id: str
    """Row it belongs to."""
    seconds: float
    """Its deadline."""
    done: Callable[[dict[str, Any]], None]
    """Called once with a reply, or with {"lost": why}: deadline, memory or crash; {"broken": text}: not its fault."""
    attempts: int = 0
    """How many processes have died of it."""


@dataclass
class _Seat:
    """A process and what it is doing."""

    process: Channel
    due: float
    """When it is killed: the deadline of its item, or of its start."""
    job: Job | None = None
    ready: bool = False
    since: float = 0.0
    """When it got its item."""


@dataclass
class Lane:
    """The queue and processes of one kind of grading."""

    spec: str
    memory_mb: int
    seconds: float
    size: int
    selector: selectors.BaseSelector
    log: IO[bytes] | None = None
    style: str = ""
    """What the function said about itself; empty until the first process is ready."""
    is_async: bool = False
    jobs: deque[Job] = field(default_factory=deque)
    restarts: int = 0
    """Processes that were killed or died."""
    _seats: list[_Seat] = field(default_factory=list)
    _dying: list[Channel] = field(default_factory=list)
    _nursery: Nursery | None = None
    _failed_rows: list[str] = field(default_factory=list)
    _starts_in_vain: int = 0

    def start(self) -> None:
        """Start one process."""
        setup = {"spec": self.spec, "memory": self.memory_mb, "seconds": self.seconds}
        if self.spec == MATH and (self._nursery is None or not self._nursery.alive()):
            if self._nursery is not None:
                self._nursery.close()
            self._nursery = Nursery(setup, self.log)
        process: Channel = self._nursery.fork() if self._nursery is not None else OwnProcess(setup, self.log)
        seat = _Seat(process, time.monotonic() + START_SECONDS)
        self._seats.append(seat)
        self.selector.register(process.output, selectors.EVENT_READ, lambda: self._receive(seat))
        self._watch_input(seat)

    def work(self) -> None:
        """Give waiting items to free processes, and start processes for the others."""
        self._dying = [process for process in self._dying if not process.reap()]
        for seat in self._seats:
            if self.jobs and seat.ready and seat.job is None:
                self._give(seat, self.jobs.popleft())
        starting = sum(not seat.ready for seat in self._seats)
        for _ in range(min(len(self.jobs) - starting, self._room())):
            self.start()

    def _room(self) -> int:
        """How many processes may be started: stuck ones keep their places only up to a limit."""
        stuck = sum(self._is_stuck(seat, time.monotonic()) for seat in self._seats)
        return self.size + min(stuck, MAX_SPARES) - len(self._seats)

    def _is_stuck(self, seat: _Seat, now: float) -> bool:
        return self.spec == MATH and seat.job is not None and now >= seat.since + SLOW_SECONDS

    def enforce(self, now: float) -> None:
        """Kill what is past its deadline."""
        for seat in [seat for seat in self._seats if (seat.job or not seat.ready) and now >= seat.due]:
            if seat.ready:
                self._lose(seat, self._too_late(), retry=False)
            else:
                self._remove(seat)
                raise RemoteFailure(f"{self.name}: its process was not ready within {START_SECONDS:g} s.")

    def next_due(self) -> float | None:
        """When the lane has to be looked at next: a deadline, or an item that turns out to be slow."""
        now = time.monotonic()
        times = [seat.due for seat in self._seats if seat.job or not seat.ready]
        if self.jobs and self.spec == MATH:
            times += [seat.since + SLOW_SECONDS for seat in self._seats if seat.job and not self._is_stuck(seat, now)]
        return min(times, default=None)

    def close(self) -> None:
        """Kill everything."""
        for seat in list(self._seats):
            self._remove(seat)
        for process in self._dying:
            process.reap(wait=5.0)
        if self._nursery is not None:
            self._nursery.close()

    @property
    def name(self) -> str:
        """What this lane is called in messages."""
        return f"--reward {self.spec}" if self.spec != MATH else "math-verify"

    @property
    def pids(self) -> list[int]:
        """Its living processes, as far as they have said hello."""
        pids = [seat.process.pid for seat in list(self._seats)]
        return [pid for pid in [*pids, self._nursery.pid if self._nursery else 0] if pid]

    def _give(self, seat: _Seat, job: Job) -> None:
        seat.job, seat.since = job, time.monotonic()
        seat.due = seat.since + job.seconds
        seat.process.send(job.item)
        self._watch_input(seat)

    def _watch_input(self, seat: _Seat) -> None:
        """Have the selector say when the pipe has room again, as long as something is unsent."""
        watched = seat.process.input in self.selector.get_map()
        if seat.process.wants_to_write and not watched:
            self.selector.register(seat.process.input, selectors.EVENT_WRITE, lambda: self._flush(seat))
        elif watched and not seat.process.wants_to_write:
            self.selector.unregister(seat.process.input)

    def _flush(self, seat: _Seat) -> None:
        if seat in self._seats:
            seat.process.flush()
            self._watch_input(seat)

    def _receive(self, seat: _Seat) -> None:
        if seat not in self._seats:
            return
        replies, closed = seat.process.receive()
        for reply in replies:
            if "hello" in reply:
                self._ready(seat, reply["hello"])
            elif not seat.ready:
                self._cannot_start(seat, reply)
                return
            else:
                self._reply(seat, reply)
        if closed and seat in self._seats:
            if seat.ready and seat.job is not None:
                late = self.spec == MATH and time.monotonic() >= seat.since + 0.9 * self.seconds
                why = self._too_late() if late else "its process died"
                self._lose(seat, why, retry=self.spec == MATH and not late)
            elif seat.ready:
                self._remove(seat)  # it has served its number of items
            else:
                self._cannot_start(seat, {"broken": "its process died before it was ready"})

    def _ready(self, seat: _Seat, hello: dict[str, Any]) -> None:
        self.style, self.is_async = hello["style"], hello.get("is_async", False)
        seat.process.greet(hello)
        seat.ready, self._starts_in_vain = True, 0

    def _cannot_start(self, seat: _Seat, reply: dict[str, Any]) -> None:
        self._remove(seat)
        if "contract" in reply:
            raise UserError(reply["contract"])
        self._starts_in_vain += 1
        if self._starts_in_vain >= MAX_STARTS_IN_VAIN:
            raise RemoteFailure(f"{self.name}: its process could not start.\n  {reply.get('broken', reply)}")

    def _reply(self, seat: _Seat, reply: dict[str, Any]) -> None:
        job, seat.job = seat.job, None
        if job is None:
            return
        if "contract" in reply:
            raise UserError(reply["contract"])
        if "memory" in reply:
            seat.job = job
            self._lose(seat, f"more than {self.memory_mb} MiB", retry=False)
            return
        if "broken" not in reply:
            self._failed_rows.clear()
        job.done(reply)

    def _lose(self, seat: _Seat, why: str, retry: bool) -> None:
        """The process is killed; its item is given up, or tried once more where the process may have been the cause."""
        job = seat.job
        self._remove(seat)
        self.restarts += 1
        if job is None:
            return
        job.attempts += 1
        if retry and job.attempts == 1:
            self.jobs.appendleft(job)
            return
        self._failed_rows.append(job.row_id)
        if len(self._failed_rows) >= FAULTY_ITEMS and len(set(self._failed_rows)) >= FAULTY_ROWS:
            job.done({"broken": f"{self.name}: {len(self._failed_rows)} items in a row failed, the last: {why}"})
        else:
            job.done({"lost": why})

    def _too_late(self) -> str:
        return f"no verdict within {self.seconds:g} s"

    def _remove(self, seat: _Seat) -> None:
        self._seats.remove(seat)
        for pipe in (seat.process.output, seat.process.input):
            if pipe in self.selector.get_map():
                self.selector.unregister(pipe)
        seat.process.kill()
        self._dying.append(seat.process)
