"""Gathers what every process did in the round of `--trace-round`, and writes it as RUN/trace-round-N.json."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.run.folder import RunFolder
from cluster.run.trace import Track, chrome_trace, clock_offset, in_lanes, trace_text
from cluster.schedule import Generate, Task, Train
from cluster.timeline import Timeline
from cluster.waiting import fetch_those

if TYPE_CHECKING:
    from cluster.system import System

CLOCK_READINGS = 5
CLOCK_SECONDS = 5.0
"""For one reading."""
SECONDS = 30.0
"""For everybody to answer: it is asked for when all are idle."""


class Tracer:
    """Does nothing at all without a round to trace."""

    def __init__(
        self, round_: int, folder: RunFolder | None = None, say: Callable[[str], object] = lambda text: None
    ) -> None:
        """`round_` 0: nothing is traced; otherwise the trace goes into the folder, and `say` tells where it is."""
        self.round = round_
        self.driver = Timeline(on=round_ > 0)
        """What the driver does."""
        self.scorer = Timeline(on=round_ > 0)
        """When each group was scored."""
        self._folder, self._say = folder, say
        self._began: dict[Task, float] = {}
        self._hosts: dict[str, str] = {}
        self._offsets: dict[str, float] = {}
        self._asked: tuple[float, float, dict[str, Any]] | None = None
        self._written = False

    def begun(self, task: Task) -> None:
        """The driver has begun a task of the schedule."""
        if self.round:
            self._began[task] = time.monotonic()

    def ended(self, task: Task) -> None:
        """... and it has ended. Generation and training may go on side by side, each in a lane of its own."""
        if self.round:
            lane = {Generate: "engines", Train: "learner"}.get(type(task), "")
            name = type(task).__name__.lower()
            self.driver.add(name, self._began.pop(task), time.monotonic(), lane, round=task.round)

    def align(self, round_: int, system: System) -> None:
        """Compare clocks, while everybody is idle."""
        if self.round and round_ == self.round:
            self._hosts = system.hosts
            for name, actor in system.members.items():
                offset = _offset(name, actor, self._hosts[name])
                if offset is not None:
                    self._offsets[name] = offset

    def ask(self, round_: int, began: float, system: System) -> None:
        """A round was recorded: if it is the one, ask everybody for their spans, and wait for nobody."""
        if self.round and round_ == self.round:
            end = time.monotonic()
            calls = {
                name: actor.spans.remote(began - self._offsets[name], end - self._offsets[name])
                for name, actor in system.members.items()
                if name in self._offsets
            }
            self._asked = began, end, calls

    def write(self) -> None:
        """Write the trace if it has been asked for; whoever does not answer is missing in it, and named."""
        if self._asked is None or self._written or self._folder is None:
            return
        began, end, calls = self._asked
        here = socket.gethostname()
        spans = fetch_those(calls, SECONDS)
        tracks = [Track(name, self._hosts[name], self._offsets[name], spans[name]) for name in spans]
        tracks.append(Track("driver", here, 0.0, self.driver.between(began, end)))
        tracks.append(Track("scorer", here, 0.0, in_lanes(self.scorer.between(began, end), "scoring")))
        name = f"trace-round-{self.round}.json"
        self._folder.write(name, trace_text(chrome_trace(self.round, began, end, tracks)))
        self._written = True
        missing = ", ".join(sorted(set(self._hosts) - set(spans)))
        without = f" (without {missing}, gone since)" if missing else ""
        self._say(
            f"trace      round {self.round} is in {self._folder.path / name}{without}: open it in ui.perfetto.dev"
        )

    def close(self) -> None:
        """The end of the run: write what is left, or say that there is no trace."""
        self.write()
        if self.round and not self._written:
            self._say(f"--trace-round {self.round}: this start did not make that round, so there is no trace of it")


def _offset(name: str, actor: Any, host: str) -> float | None:
    """Seconds to add to the clock of a process; on the driver's machine all have the same one. None without answer."""
    if host == socket.gethostname():
        return 0.0
    samples = []
    for _ in range(CLOCK_READINGS):
        sent = time.monotonic()
        answer = fetch_those({name: actor.clock.remote()}, CLOCK_SECONDS)
        if name in answer:
            samples.append((sent, float(answer[name]), time.monotonic()))
    return clock_offset(samples) if samples else None
