"""Rows out of a directory of files, sorted into training and held-out by what the files are called.

    train.jsonl test.jsonl        data/train-00000-of-00002.parquet        validation/part1.csv

A directory in which no name says what it is for is training data as a whole.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rollout.tasks.files import READERS, RawRow, read_file
from rollout.types import UserError

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_ABOUT = re.compile(r"dataset_infos?|dataset_dict|state|package|metadata|config")
"""Names of JSON files that speak about the data."""


def saved_dataset(path: Path) -> bool:
    """True for what `save_to_disk` of the datasets library wrote."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def read_folder(path: Path, split: Literal["train", "eval"]) -> list[RawRow]:
    """Rows of one split, file by file; no held-out file gives no held-out rows."""
    files = sort_files(path)
    if split == "train":
        chosen = files["train"] or files[""]
        if not chosen:
            found = ", ".join(str(file.relative_to(path)) for held_out in files.values() for file in held_out)
            raise UserError(f"{path} has only held-out files ({found}). Name one as --prompts, or call one train.")
    else:
        chosen = files["validation"] or files["test"]
    rows: list[RawRow] = []
    for file in chosen:
        rows += [replace(row, index=len(rows) + row.index) for row in read_file(file)]
    return rows


def sort_files(path: Path) -> dict[str, list[Path]]:
    """Files with a known ending by what they are for; under the empty name those that do not say."""
    files: dict[str, list[Path]] = {"train": [], "validation": [], "test": [], "": []}
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        known = file.suffix.lower() in READERS and not any(part.startswith(".") for part in parts)
        if known and file.is_file() and not _ABOUT.fullmatch(file.stem):
            files[_purpose(" ".join((*parts[:-1], file.stem)))].append(file)
    if not any(files.values()):
        raise UserError(f"{path} holds no files with prompts. Known endings: {', '.join(sorted(READERS))}.")
    if files[""] and any(files[name] for name in ("train", "validation", "test")):
        unclear = ", ".join(str(file.relative_to(path)) for file in files[""])
        raise UserError(
            f"{path}: some files say what they are for, but these do not: {unclear}.\n"
            "  Put train, validation or test into their names, or give one file as --prompts."
        )
    return files


def _purpose(name: str) -> str:
    words = re.split(r"[^a-z]+", name.lower())
    return next((purpose for purpose, known in _WORDS.items() if any(word in known for word in words)), "")
