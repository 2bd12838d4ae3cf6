"""SIGINT and SIGTERM end a run cleanly within a grace; a second SIGINT ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(end_now: Callable[[int], None], grace: float) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in the main thread once, at SIGINT and at SIGTERM, so that the body ends and is closed.

    It is KeyboardInterrupt for both: Ray looks for signals inside its calls and loses any other exception raised
    there. What is yielded lists the signals as they come, the one that ended the body first. `end_now(signal)` ends
    the process instead: at a second SIGINT, or when the body has not been left `grace` seconds after the first signal.
    """
    seen: list[int] = []
    patience: list[threading.Timer] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        again = number == signal.SIGINT and signal.SIGINT in seen
        seen.append(number)
        if again:
            end_now(number)
        if len(seen) == 1:  # while closing, further signals must not cut the clean-up short
            patience.append(threading.Timer(grace, end_now, (number,)))
            patience[0].daemon = True
            patience[0].start()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for timer in patience:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
