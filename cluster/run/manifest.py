"""What a checkpoint says about itself, and the decisions about checkpoints that need no disk. Pure.

The manifest is written last: a folder without one that verifies is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from learner.types import SavedFile, Vote
from rollout.types import UserError

FORMAT = 1
_FOLDER = re.compile(r"round-(\d{5,9})")
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class Damaged(UserError):
    """A checkpoint that does not verify; the text names the file and what is wrong with it."""


class NotSaved(Exception):
    """This checkpoint could not be made; the ones before it are untouched."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a resume must know before it loads a byte."""

    round: int
    """Rounds completed: also the version of the weights."""
    steps: int
    """Optimizer steps done, skipped ones included."""
    world_size: int
    """Ranks that wrote it; the same number can read it."""
    initial: bool
    """True for round 0: the state is what the model directory and the seed give, so there are no files."""
    weights: str
    """sha256 over all parameters."""
    files: tuple[SavedFile, ...]
    """Every file beside the manifest."""
    metrics_offset: int
    """Bytes of metrics.jsonl that belong to it."""
    score: float | None
    """Held-out accuracy of these weights, where it was measured: the best checkpoint is kept."""
    prompts: Mapping[str, Any]
    """Place in the prompts (PromptStream.state)."""
    data: str
    """Hash of the rows that are trained and evaluated on."""
    model: str
    """Hash of the model's configuration and tokenizer."""
    settings: Mapping[str, Any]
    """Every setting that changes a result, as it was resolved."""
    code: str
    """Digest of the code that ran."""
    versions: Mapping[str, str]
    """Versions of the libraries that compute."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def as_bytes(self) -> bytes:
        """The manifest as JSON, with a hash of itself."""
        content = {"format": FORMAT} | asdict(self)
        return json.dumps(content | {"sha256": _self_hash(content)}, indent=1, ensure_ascii=True).encode() + b"\n"

    @staticmethod
    def settings_from(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as they are after their way through JSON, to be compared with saved ones."""
        return dict(json.loads(json.dumps(settings)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The inverse of `as_bytes`; Damaged when it is not whole, was changed, or names files outside."""
        try:
            content = json.loads(data)
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
            stated = content.pop("sha256", None)
        except ValueError as error:
            raise Damaged(f"the manifest is not readable ({error})") from None
        if content.get("format") != FORMAT:
            raise Damaged(f"the manifest has format {content.get('format')}, this version reads {FORMAT}")
        if stated != _self_hash(content):
            raise Damaged("the manifest does not match its own sha256")
        del content["format"]
        if set(content) != {field.name for field in fields(cls)}:
            raise Damaged(f"the manifest has other fields: {sorted(set(content) ^ {f.name for f in fields(cls)})}")
        files = tuple(SavedFile(**file) for file in content.pop("files"))
        for file in files:
            check_name(file.name)
        return cls(files=files, **content)


def _self_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def folder_name(round_: int) -> str:
    """Name of a checkpoint's folder."""
    return f"round-{round_:05d}"


def round_of(name: str) -> int | None:
    """Round of a folder name, or None when it is not one of ours (`../x`, an empty text, a temporary folder)."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found and folder_name(int(found[1])) == name else None


def check_name(name: str) -> None:
    """Damaged unless a file name is plain and stays inside its folder."""
    if len(name.split("/")) > 2 or not all(_PART.fullmatch(part) for part in name.split("/")):
        raise Damaged(f"the manifest names a file {name[:200]!r}: not a plain name inside the checkpoint")


def count_votes(votes: Mapping[str, Vote], world_size: int) -> tuple[tuple[SavedFile, ...], str, int]:
    """(files, weights hash, steps) when every rank voted yes and they agree; NotSaved with all reasons otherwise."""
    against = [f"{name}: {vote.error}" for name, vote in sorted(votes.items()) if vote.error]
    if against:
        raise NotSaved("\n  ".join(against))
    if {vote.rank for vote in votes.values()} != set(range(world_size)):
        raise NotSaved(f"votes came from ranks {sorted(v.rank for v in votes.values())}, not from all {world_size}")
    files = tuple(sorted((file for vote in votes.values() for file in vote.files), key=lambda file: file.name))
    if len({file.name for file in files}) != len(files):
        raise NotSaved("two ranks wrote a file of the same name")
    steps = {vote.steps for vote in votes.values()}
    if len(steps) != 1:
        raise NotSaved(f"the ranks have done different numbers of optimizer steps: {sorted(steps)}")
    weights = next(vote.weights for vote in votes.values() if vote.rank == 0)
    return files, weights, steps.pop()


def evictable(scores: Mapping[int, float | None], keep: int, current: int) -> list[int]:
    """Rounds whose checkpoint may go: all but the `keep` newest, the best one, and the current one. Oldest first."""
    newest = sorted(scores)[-max(1, keep) :]
    measured = {round_: score for round_, score in scores.items() if score is not None}
    best = max(measured, key=lambda round_: (measured[round_], round_), default=None)
    return [round_ for round_ in sorted(scores) if round_ not in (*newest, best, current)]


def search_order(latest: str | None, names: Iterable[str]) -> tuple[list[str], str]:
    """(folders to try, what is wrong with LATEST or an empty text): the named one, then the others, newest first."""
    found = sorted((name for name in names if round_of(name) is not None), key=lambda n: -(round_of(n) or 0))
    if latest is None:
        return found, "LATEST is missing"
    named = latest.strip()
    if round_of(named) is None:
        return found, f"LATEST holds {named[:80]!r}, which names no checkpoint"
    if named not in found:
        return found, f"LATEST names {named}, which does not exist"
    return [named, *(name for name in found if name != named)], ""


def setting_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[tuple[str, Any, Any]]:
    """(name, saved, now) of every setting that is not the same."""
    missing = object()
    names = sorted(saved.keys() | now.keys())
    return [
        (name, saved.get(name), now.get(name)) for name in names if saved.get(name, missing) != now.get(name, missing)
    ]
