"""The three ways a run can end badly (DESIGN: plan, promise, remote) and the exit codes they carry."""

from __future__ import annotations

from rollout.types import UserError

DONE, BAD_REQUEST, RESUMABLE, NOT_RESUMABLE, CRITICAL_FINDING, INTERRUPTED = 0, 2, 3, 4, 5, 130


class RollearnError(Exception):
    """Base of every error that is meant for people: its text says what was wrong, where, and what to do."""


class PlanError(RollearnError, UserError):
    """The request cannot work; found before any process starts. Exit 2, no traceback."""


class BrokenPromise(RollearnError, RuntimeError):
    """An invariant failed during the run: stop at once, name tensors, rows and values. Exit 3 or 4."""


class RemoteFailure(RollearnError, RuntimeError):
    """Another process died, hung past its deadline or raised. Exit 3 or 4.

    Picklable: everything is in the message.
    """


class Stopped(RollearnError):
    """A run ended before its time; carries the exit code and what is left."""

    def __init__(self, code: int, text: str) -> None:
        """`text` is shown as it is."""
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        """Picklable with both arguments."""
        return (type(self), (self.code, str(self)))
