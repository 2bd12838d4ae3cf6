"""The private directory of a run: those of killed runs are removed by the next, those in use never."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.private import OWNER, PREFIX, remove, remove_abandoned
from cluster.run.folder import start_time


def folder(where: Path, name: str, owner: str | None) -> Path:
    made = where / f"{PREFIX}{name}"
    (made / "session").mkdir(parents=True)
    if owner is not None:
        (made / OWNER).write_text(owner)
    return made


def test_directories_of_killed_runs_go_and_all_others_stay(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    dead = folder(tmp_path, "dead", f"{child.pid} 12345")
    reused = folder(tmp_path, "reused", f"{os.getpid()} 12345")
    used = folder(tmp_path, "used", f"{os.getpid()} {start_time(os.getpid())}")
    new = folder(tmp_path, "new", None)
    strange = folder(tmp_path, "strange", "no number")
    (elsewhere / OWNER).write_text(f"{child.pid} 12345")
    for number in range(4):  # as Ray's `session_latest`; some come before what they lead to
        (dead / f"latest-{number}").symlink_to(dead / "session")
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    remove_abandoned(tmp_path)
    assert not dead.exists()
    assert not reused.exists()
    assert used.exists()
    assert new.exists()
    assert strange.exists()
    assert (elsewhere / OWNER).exists()


def test_what_could_not_be_removed_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's last processes may still be writing when the next run cleans up: the one after that finds it."""
    dead = folder(tmp_path, "dead", "1 1")
    with monkeypatch.context() as writing:
        writing.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove(dead)
    assert (dead / OWNER).exists()
    remove_abandoned(tmp_path)
    assert not dead.exists()
