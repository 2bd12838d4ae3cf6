"""The run directory: its layout, its lock, and the copy of the code that the actors run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path

from cluster.errors import PlanError

PACKAGES = ("rollout", "learner", "cluster")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RunFolder:
    """One run directory, locked by this process until `release`."""

    def __init__(self, path: Path) -> None:
        """Paths only; `create` touches the disk."""
        self.path = path
        self.code = path / "code"
        self.logs = path / "logs"
        self.model = path / "model"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make a new run directory and lock it. PlanError when the name is bad, in use, or already holds a run."""
        if not _NAME.fullmatch(path.name) or path.name in (".", ".."):
            raise PlanError(f"--run {path}: the last part may hold letters, digits, `.`, `_`, `-`, at most 64 of them.")
        path = path.absolute()
        folder = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        if (path / "metrics.jsonl").exists() or any(path.glob("checkpoints/round-*")):
            folder.release()
            raise PlanError(f"--run {path} already holds a run.\n  Give another directory, or: launch.py resume {path}")
        folder._make_parts()
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Lock a directory that holds a run. PlanError when it holds none, or is in use."""
        if not (path / "config.toml").is_file():
            raise PlanError(f"{path} holds no run: there is no config.toml in it.")
        folder = cls(path.absolute())
        folder.lock()
        folder._make_parts()
        return folder

    def _make_parts(self) -> None:
        for part in (self.code, self.logs):
            part.mkdir(exist_ok=True)

    def lock(self) -> None:
        """Take the directory for this process; a lock left by a process that is gone is taken over."""
        mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "start": start_time(os.getpid())})
        file = self.path / "lock.json"
        for _ in range(2):
            try:
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                holder = _read_lock(file)
                if _alive(holder):
                    raise PlanError(
                        f"{self.path} is in use by process {holder.get('pid')} on {holder.get('host')}.\n"
                        f"  Wait for it, or give another directory with --run."
                    ) from None
                file.unlink(missing_ok=True)
                continue
            with os.fdopen(descriptor, "w") as out:
                out.write(mine)
            return
        raise PlanError(f"{self.path}: the lock {file.name} cannot be taken; remove it if no run uses the directory.")

    def release(self) -> None:
        """Give the directory free."""
        (self.path / "lock.json").unlink(missing_ok=True)

    def write(self, name: str, text: str) -> None:
        """Write a file of the run whole or not at all: it may be there already and be needed again."""
        fresh = self.path / f".{name}.part"
        fresh.write_text(text)
        os.replace(fresh, self.path / name)

    def copy_code(self, source: Path) -> str:
        """Copy the packages that run into `code/`, in place of an earlier copy; returns their digest."""
        for package in PACKAGES:
            shutil.rmtree(self.code / package, ignore_errors=True)
            shutil.copytree(
                source / package,
                self.code / package,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
            )
        return code_digest(self.code)

    def log_tail(self, name: str, lines: int = 15) -> str:
        """Last lines of an actor's log."""
        file = self.logs / f"{name}.log"
        if not file.is_file():
            return ""
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


def default_run(preset: str) -> Path:
    """runs/<time>-<preset> under the current directory."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{preset}"


def code_digest(root: Path) -> str:
    """Hash of all Python files of the packages under root: the driver compares it with what the actors imported."""
    total = hashlib.blake2b(digest_size=8)
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            total.update(str(file.relative_to(root)).encode())
            total.update(file.read_bytes())
    return total.hexdigest()


def _read_lock(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _alive(holder: dict[str, object]) -> bool:
    """True when the process that wrote the lock still runs (its start time tells it from a reused pid)."""
    if holder.get("host") != socket.gethostname():
        return bool(holder)  # another machine on a shared disk: cannot be checked, so it is believed
    pid = holder.get("pid")
    return isinstance(pid, int) and start_time(pid) == holder.get("start") is not None


def start_time(pid: int) -> str | None:
    """When a process began, as the kernel counts; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rsplit(")", 1)[1].split()[19]
