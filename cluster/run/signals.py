"""SIGINT and SIGTERM end a run cleanly; a second SIGINT ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cluster.errors import INTERRUPTED


class Terminated(BaseException):
    """SIGTERM was received (preemption); raised in the main thread like KeyboardInterrupt."""


@contextmanager
def handled(end_now: Callable[[], None]) -> Iterator[None]:
    """Raise KeyboardInterrupt or Terminated in the main thread once; on a second SIGINT call `end_now` and exit 130."""
    seen: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        again = number == signal.SIGINT and signal.SIGINT in seen
        seen.append(number)
        if again:
            end_now()
            os._exit(INTERRUPTED)
        if len(seen) == 1:  # while closing, further signals must not cut the clean-up short
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
