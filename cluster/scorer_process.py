"""The parent's end of grading processes: start, send, receive, kill. Nothing here blocks.

Users' functions run in processes of their own. math-verify takes seconds to import, so one nursery process imports it
once and forks a grading process whenever one is needed: what was killed is replaced within milliseconds. The nursery
has no threads, so that forking it is safe; the driver, which has, is never forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any

from cluster import scorer_worker

ROOT = Path(__file__).resolve().parent.parent
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# All that math-verify's processes get of our environment: no keys, no tokens.
_PASSED_TO_MATH = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME")


class Channel(ABC):
    """Two pipes to a grading process: pickled items go in, lines of JSON come out."""

    def __init__(self, input_: int, output: int) -> None:
        self.input, self.output = input_, output
        self.pid = 0
        """Process id; 0 until it is known."""
        os.set_blocking(input_, False)
        os.set_blocking(output, False)
        self._unsent = b""
        self._unread = b""
        self._open = [input_, output]

    @property
    def wants_to_write(self) -> bool:
        """Whether something is left that the pipe had no room for."""
        return bool(self._unsent)

    def send(self, item: dict[str, Any]) -> None:
        """Hand over an item, now or as soon as the pipe has room."""
        data = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        self._unsent += struct.pack("<I", len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe takes; a process that is gone is noticed when it is read from."""
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self.input, self._unsent) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._unsent = b""

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """(replies that have arrived, whether the process has closed its end)."""
        closed = False
        while True:
            try:
                data = os.read(self.output, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                closed = True
                break
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [_decoded(line) for line in lines], closed

    def greet(self, hello: dict[str, Any]) -> None:
        """The process has said that it is ready."""
        self.pid = hello["pid"]

    def stop(self) -> None:
        """Let it end by itself: it has nothing more to do."""
        while self._open:
            os.close(self._open.pop())

    @abstractmethod
    def kill(self) -> None:
        """End it and what it started."""

    @abstractmethod
    def reap(self, wait: float | None = None) -> bool:
        """Whether it has ended and nothing of it is left."""


class OwnProcess(Channel):
    """A process for one user's function."""

    def __init__(self, setup: dict[str, Any], log: IO[bytes] | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", scorer_worker.__file__, "serve", str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log if log is not None else subprocess.DEVNULL,
            env=_THREADS | os.environ,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(os.dup(self._process.stdin.fileno()), os.dup(self._process.stdout.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        self.pid = self._process.pid
        self.send(setup | {"parent": os.getpid()})

    def kill(self) -> None:
        """End it and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    def reap(self, wait: float | None = None) -> bool:
        """Whether it has ended, waiting at most so long."""
        try:
            return (self._process.poll() if wait is None else self._process.wait(wait)) is not None
        except subprocess.TimeoutExpired:
            return False


class ForkedProcess(Channel):
    """A process that the nursery forked; the nursery reaps it."""

    _handle: int | None = None

    def greet(self, hello: dict[str, Any]) -> None:
        """Now its number is known; a handle makes sure that no other process with this number is ever killed."""
        super().greet(hello)
        with contextlib.suppress(ProcessLookupError):
            self._handle = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """End it. It starts nothing of its own; one that is not ready yet ends when its pipe closes."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None
        self.stop()

    def stop(self) -> None:
        """Let it end by itself."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        super().stop()

    def reap(self, wait: float | None = None) -> bool:
        """Nothing to do here: the nursery collects its children."""
        del wait
        return True


class Nursery:
    """The process that has imported math-verify and forks grading processes."""

    def __init__(self, setup: dict[str, Any], log: IO[bytes] | None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", scorer_worker.__file__, "nursery", str(ROOT)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=log if log is not None else subprocess.DEVNULL,
                env=_THREADS | {name: os.environ[name] for name in _PASSED_TO_MATH if name in os.environ},
                start_new_session=True,
            )
        self._socket.send(pickle.dumps(setup | {"parent": os.getpid()}))
        self.pid = self._process.pid

    def fork(self) -> ForkedProcess:
        """A new grading process: it gets its ends of two pipes and says hello when it is ready."""
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe()
        with contextlib.suppress(OSError):  # a nursery that is gone: the pipes close, and that is noticed
            socket.send_fds(self._socket, [b"\0"], [their_input, their_output])
        os.close(their_input)
        os.close(their_output)
        return ForkedProcess(our_input, our_output)

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it; its children end with it."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(5.0)


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    return reply if isinstance(reply, dict) else {"broken": f"not a reply: {line[:200]!r}"}
