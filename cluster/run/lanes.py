"""Work that goes on side by side, engines and learner, in one thread: each in turn makes some progress.

A piece of work is an iterator that never waits long: it looks whether something has come, and yields. So a signal, an
error or the end of the run finds everything in one place, and no lock is needed anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.schedule import Task


class Lanes:
    """The tasks that were begun and have not ended, with their work."""

    def __init__(self) -> None:
        """Nothing runs."""
        self._work: dict[Task, Iterator[object]] = {}

    def __contains__(self, task: Task) -> bool:
        return task in self._work

    def begin(self, task: Task, work: Iterator[object]) -> None:
        """From here on the work makes progress whenever `advance` is called."""
        self._work[task] = work

    def advance(self) -> list[Task]:
        """Let each make some progress; returns those that have ended. What a piece of work raises is raised here."""
        ended = [task for task, work in self._work.items() if next(work, self) is self]
        for task in ended:
            del self._work[task]
        return ended
