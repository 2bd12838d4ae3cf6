"""The private corner of a run: a directory nobody else can read, and a token without which Ray answers nobody.

Must run before `ray` is imported: Ray reads the authentication mode once, at import.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from cluster.joining import refuse_open_cluster
from cluster.run.folder import start_time

PREFIX, OWNER = "rollearn-", "owner"


def private_ray(address: str) -> Path:
    """Make the directory (mode 0700) and set the environment of Ray; returns the directory.

    A cluster that is joined (`address`) brings its own token; joining one without authentication is refused.
    """
    if "ray" in sys.modules:
        raise RuntimeError("private_ray must run before ray is imported")
    refuse_open_cluster(address)
    # Ray puts sockets below it, whose paths may not exceed 107 characters.
    where = tempfile.gettempdir()
    where = where if len(where) <= 32 else "/tmp"
    remove_abandoned(Path(where))
    temp = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    (temp / OWNER).write_text(f"{os.getpid()} {start_time(os.getpid())}")
    os.environ["RAY_AUTH_MODE"] = "token"
    if not address:
        token = temp / "token"
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(os.urandom(32).hex())
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets any other process starve the run
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Torch makes this directory as soon as some library imports its compiler, and would leave it behind.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(temp / "inductor")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return temp


def remove_abandoned(where: Path) -> None:
    """Remove the directories of runs that were killed (`kill -9` gives a run no time to do it); those in use stay."""
    for folder in where.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError):  # somebody else's, or gone meanwhile, or not one of ours after all
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            pid, started = (folder / OWNER).read_text().split()
            if start_time(int(pid)) != started:  # numbers of processes are used again
                remove(folder)


def remove(folder: Path) -> None:
    """Remove a private directory, its owner's name last.

    Ray's last processes may still write into it: what is left then keeps its owner, and goes another time.
    """
    for path in folder.iterdir():
        if path.name != OWNER and path.is_dir() and not path.is_symlink():  # Ray leaves a link to its newest session
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != OWNER:
            path.unlink(missing_ok=True)
    if {path.name for path in folder.iterdir()} <= {OWNER}:
        shutil.rmtree(folder)
