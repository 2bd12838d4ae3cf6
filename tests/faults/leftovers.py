"""What a run leaves behind on the machine: processes, shared memory, temporary directories. It should be nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MARK = "ROLLEARN_TEST_MARK"


class Leftovers:
    """A run is started with `environment` in its environment; afterwards `found` says what is still there."""

    def __init__(self) -> None:
        """Gives the run a temporary directory of its own (short: Ray puts sockets into it)."""
        self.temp = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
        self._mark = uuid.uuid4().hex
        self._shared_before = _shared_memory()
        self.environment = {MARK: self._mark, "TMPDIR": str(self.temp)}

    def found(self, seconds: float = 90.0) -> list[str]:
        """What is still there after at most so many seconds, for people; the temporary directory is removed."""
        deadline = time.monotonic() + seconds
        while (left := self._look()) and time.monotonic() < deadline:
            time.sleep(0.2)
        shutil.rmtree(self.temp, ignore_errors=True)
        return left

    def _look(self) -> list[str]:
        processes = [
            f"process {pid}: {_command(pid)}"
            for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
            if f"{MARK}={self._mark}".encode() in _read(Path(f"/proc/{pid}/environ")).split(b"\0")
        ]
        fresh = _shared_memory() - self._shared_before
        mapped = _mapped() if fresh else ""
        # What a living process of somebody else uses is none of ours: all of ours must be gone.
        shared = [f"shared memory {name}" for name in sorted(fresh) if f"{SHARED_MEMORY}/{name}" not in mapped]
        files = [f"temporary file {path}" for path in sorted(self.temp.iterdir())]
        return processes + (shared if not processes else []) + files


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _mapped() -> str:
    maps = [_read(path).decode(errors="replace") for path in Path("/proc").glob("[0-9]*/maps")]
    opened = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            opened.append(os.readlink(path))
    return "\n".join(maps + opened)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has just ended
        return b""


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace")[:120]
