"""Checkpoints with small made-up files, for the tests of the protocol."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from cluster.run.manifest import Manifest
from learner.types import SavedFile, Vote

PLAIN = Manifest(
    round=0,
    steps=0,
    world_size=2,
    initial=False,
    weights="",
    files=(),
    metrics_offset=17,
    score=None,
    prompts={"taken": {"*": 8}, "digest": "d"},
    data="rows",
    model="model",
    settings={"learner.lr": 0.001, "kl.coef": None},
    code="code",
    versions={"torch": "2.13"},
)


def manifest_of(round_: int, *, score: float | None = None, initial: bool = False) -> Manifest:
    return replace(PLAIN, round=round_, steps=4 * round_, score=score, initial=initial)


def content(round_: int, rank: int) -> bytes:
    """Different in every round, and more than one block."""
    return hashlib.sha256(f"{round_} {rank}".encode()).digest() * 400


def writer(round_: int, ranks: int = 2) -> Callable[[Path], Mapping[str, Vote]]:
    """What all ranks do together: write their files and vote."""

    def write(folder: Path) -> dict[str, Vote]:
        votes = {}
        (folder / "shards").mkdir()
        for rank in range(ranks):
            data = content(round_, rank)
            name = f"shards/rank_{rank}.pt"
            (folder / name).write_bytes(data)
            file = SavedFile(name, rank, len(data), hashlib.sha256(data).hexdigest())
            votes[f"learner-{rank}"] = Vote(
                rank, (file,), steps=4 * round_, weights="" if rank else f"weights {round_}"
            )
        return votes

    return write


def truncate(path: Path) -> None:
    """Damage: half of the file is gone."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Damage: one bit is another."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def swap_for_link(path: Path) -> None:
    """Damage: a link to the file in its place."""
    other = path.with_suffix(".other")
    path.rename(other)
    path.symlink_to(other)
