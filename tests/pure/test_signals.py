"""Signals: the first one lets a run close, the second SIGINT or the end of the grace does not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from cluster.run.signals import handled


def run(number: signal.Signals, ended: list[int], grace: float, close: Callable[[], None] = lambda: None) -> None:
    """A run that is sent a signal, and what it does while it closes."""
    with handled(ended.append, grace) as received:
        try:
            os.kill(os.getpid(), number)
            time.sleep(1.0)
        finally:
            assert received == [number]
            close()


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.01)


def test_the_first_signal_is_raised_once_and_later_ones_do_not_cut_the_clean_up_short() -> None:
    ended: list[int] = []
    closed: list[bool] = []

    def close() -> None:
        send(signal.SIGTERM, signal.SIGINT)
        closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        run(signal.SIGTERM, ended, 60.0, close)
    assert closed
    assert ended == []


def test_a_second_sigint_ends_at_once() -> None:
    ended: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(signal.SIGINT, ended, 60.0, lambda: send(signal.SIGINT))
    assert ended == [signal.SIGINT]


def test_what_does_not_close_within_its_grace_is_ended() -> None:
    ended: list[int] = []

    def hang() -> None:
        deadline = time.monotonic() + 10
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run(signal.SIGTERM, ended, 0.05, hang)
    assert ended == [signal.SIGTERM]


def test_after_a_clean_end_nothing_is_ended_later() -> None:
    ended: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(signal.SIGINT, ended, 0.05)
    time.sleep(0.15)
    assert ended == []
    assert signal.getsignal(signal.SIGINT) is before
