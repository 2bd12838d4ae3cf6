"""Checkpoints on disk: written beside, voted on, proven, renamed; at every instant LATEST names a whole one.

    checkpoints/LATEST                round-00003
    checkpoints/round-00003/          manifest.json and the files it lists
    checkpoints/.tmp-round-00004-...  being written; removed at the next start

Order of a commit: files of all ranks on the disk, votes counted, manifest, rename, LATEST, and only then is anything
old removed. DeepSpeed's own `latest` is never read or written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cluster import faults
from cluster.errors import PlanError
from cluster.run.manifest import (
    Damaged,
    Manifest,
    NotSaved,
    count_votes,
    evictable,
    folder_name,
    round_of,
    search_order,
)
from cluster.run.records import sync_folder
from learner.types import SavedFile, Vote

FOLDER, LATEST, MANIFEST = "checkpoints", "LATEST", "manifest.json"
SPARE = 1.2
"""Free space asked for before writing, as a multiple of the size of the last checkpoint."""
MAX_FAILURES = 3
"""Checkpoints that may fail in a row."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose manifest verified."""

    path: Path
    manifest: Manifest


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, run_folder: Path, keep: int = 2) -> None:
        """`keep` newest are kept, and the best one."""
        self.path = run_folder / FOLDER
        self.failures = 0
        """Commits that failed since the last that did not."""
        self._keep = keep

    def commit(
        self, manifest: Manifest, write: Callable[[Path], Mapping[str, Vote]], expected_bytes: int
    ) -> Checkpoint:
        """Make a checkpoint: `write` has all ranks write into the folder it is given and returns their votes.

        `manifest` comes without files, weights and steps. NotSaved when it cannot be made: LATEST stays as it was.
        """
        round_ = manifest.round
        try:
            with self._temporary(round_) as folder:
                self._check_space(expected_bytes)
                votes = {} if manifest.initial else write(folder)
                faults.reach("ckpt.vote", 0, round_)
                if not manifest.initial:
                    files, weights, steps = count_votes(votes, manifest.world_size)
                    _check_written(folder, files)
                    manifest = replace(manifest, files=files, weights=weights, steps=steps)
                faults.reach("ckpt.manifest", 0, round_)
                _write_synced(folder / MANIFEST, manifest.as_bytes())
                sync_folder(folder)
                faults.reach("ckpt.rename", 0, round_)
                target = self.path / folder_name(round_)
                folder.rename(target)
                sync_folder(self.path)
                faults.reach("ckpt.latest", 0, round_)
                self._point_to(target.name)
        except (NotSaved, OSError) as error:
            self.failures += 1
            raise NotSaved(f"the checkpoint of round {round_} was not made: {error}") from None
        self.failures = 0
        return Checkpoint(target, manifest)

    def evict(self, current: int) -> None:
        """Remove what is no longer kept, once `current` is committed; damaged folders are left for people to see."""
        faults.reach("ckpt.evict", 0, current)
        scores: dict[int, float | None] = {}
        for path in self.path.iterdir():
            if (round_ := round_of(path.name)) is not None:
                with contextlib.suppress(Damaged):
                    scores[round_] = read_manifest(path).score
        for round_ in evictable(scores, self._keep, current):
            doomed = self.path / f".tmp-old-{folder_name(round_)}-{secrets.token_hex(4)}"
            (self.path / folder_name(round_)).rename(doomed)  # at once, so that no half of it is found later
            _remove(doomed)

    def find_latest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that verifies, the one LATEST names first; `say` hears of every one that does not.

        None when the run never had one. Raises PlanError when there are some and none verifies.
        """
        self._refuse_link()
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        order, complaint = search_order(self._read_latest(), names)
        if not order and not (self.path / LATEST).exists():
            return None
        if complaint:
            say(f"{self.path / LATEST}: {complaint}; looking for the newest checkpoint that verifies")
        for name in order:
            try:
                return Checkpoint(self.path / name, verify(self.path / name))
            except Damaged as damage:
                say(f"checkpoint {name} is damaged and is not used: {damage}")
        raise PlanError(
            f"{self.path}: no checkpoint verifies, so there is nothing to resume from. The run is not started anew "
            f"in its place.\n  To start over, give a new directory: launch.py --config "
            f"{self.path.parent / 'config.toml'} --run NEW_DIRECTORY"
        )

    def adopt(self, checkpoint: Checkpoint) -> Path | None:
        """Make a checkpoint the current one before the run goes on from it: LATEST names it, leftovers go.

        Checkpoints of later rounds are moved to `discarded.<time>/`, which is returned; those rounds are done again.
        """
        self._point_to(checkpoint.path.name)
        self.remove_leftovers()
        later = [p for p in self.path.iterdir() if (round_of(p.name) or 0) > checkpoint.manifest.round]
        if not later:
            return None
        target = self.path / f"discarded.{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(3)}"
        target.mkdir()
        for path in later:
            path.rename(target / path.name)
        sync_folder(self.path)
        return target

    def remove_leftovers(self) -> None:
        """Remove what a killed commit left behind; only while nobody commits."""
        for path in self.path.glob(".tmp-*"):
            _remove(path)

    @contextmanager
    def _temporary(self, round_: int) -> Iterator[Path]:
        """A folder nobody takes for a checkpoint; gone afterwards, unless it was renamed."""
        self._refuse_link()
        self.path.mkdir(exist_ok=True)
        folder = self.path / f".tmp-{folder_name(round_)}-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _remove(folder)

    def _point_to(self, name: str) -> None:
        fresh = self.path / f".tmp-{LATEST}-{secrets.token_hex(4)}"
        _write_synced(fresh, f"{name}\n".encode())
        os.replace(fresh, self.path / LATEST)
        sync_folder(self.path)

    def _check_space(self, expected_bytes: int) -> None:
        needed = int(SPARE * expected_bytes)
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise NotSaved(
                f"it needs about {needed / 2**20:,.0f} MiB and {self.path} has {free / 2**20:,.0f} MiB free; make "
                f"room, or resume with a lower --checkpoint.keep"
            )

    def _read_latest(self) -> str | None:
        file = self.path / LATEST
        if file.is_symlink() or not file.is_file():
            return None
        return file.read_bytes()[:200].decode("utf-8", errors="replace")

    def _refuse_link(self) -> None:
        if self.path.is_symlink():
            raise PlanError(
                f"{self.path} is a symbolic link; checkpoints are written and loaded only inside the run directory.\n"
                f"  To keep them on another disk, put the whole run there: --run DIRECTORY"
            )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; Damaged when it is missing, changed, or of another round than the folder."""
    if folder.is_symlink() or not folder.is_dir():
        raise Damaged(f"{folder} is not a folder")
    file = folder / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise Damaged(f"{file} is missing")
    manifest = Manifest.from_bytes(file.read_bytes())
    if round_of(folder.name) != manifest.round:
        raise Damaged(f"{file} belongs to round {manifest.round}")
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest, after every file was found with its size and hash, and nothing beside them; else Damaged."""
    manifest = read_manifest(folder)
    listed = {file.name for file in manifest.files} | {MANIFEST}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if found != listed:
        odd = sorted(found ^ listed)[0]
        raise Damaged(f"{folder / odd} is {'not in the manifest' if odd in found else 'missing'}")
    for file in manifest.files:
        path = folder / file.name
        if path.is_symlink() or not path.is_file():
            raise Damaged(f"{path} is not a plain file")
        if path.stat().st_size != file.size:
            raise Damaged(f"{path} has {path.stat().st_size} bytes, the manifest says {file.size}")
    for file in manifest.files:
        with (folder / file.name).open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                raise Damaged(f"{folder / file.name} has changed since it was written (sha256 differs)")
    return manifest


def _check_written(folder: Path, files: tuple[SavedFile, ...]) -> None:
    """The driver sees what the ranks say they wrote (they may run on other machines)."""
    found = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    if found != {file.name: file.size for file in files}:
        odd = sorted(found.keys() ^ {file.name for file in files}) or ["sizes differ"]
        raise NotSaved(
            f"the ranks wrote other files than this machine sees in {folder} ({odd[0]}); a run over several machines "
            f"needs its run directory on a shared file system"
        )


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
