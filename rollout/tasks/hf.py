"""Data sets of the Hugging Face hub and directories written by `save_to_disk`.

    --prompts hf:openai/gsm8k:main          configuration after the colon, split after @: hf:NAME:CONFIG@test

The hub needs a network. No script of a data set is ever run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollout.types import UserError

NAME = "hf"

HELD_OUT_SPLITS = ("validation", "test", "eval", "dev", "valid")
"""Splits that are taken for evaluation, in this order, unless a split is named."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for."""

    name: str
    """Hub id or directory."""
    config: str = ""
    """Configuration of the data set; empty for its only one."""
    split: str = ""
    """Split; empty for train, and for the held-out one by its name."""


def parse(spec: str) -> Wanted:
    """`NAME[:CONFIG][@SPLIT]`; a directory that exists is taken as it is."""
    if Path(spec).is_dir():
        return Wanted(spec)
    rest, _, split = spec.partition("@")
    name, _, config = rest.partition(":")
    if not name or (":" in config) or name.count("/") > 1:
        raise UserError(
            f"--prompts hf:{spec} is not understood. Write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG@SPLIT."
        )
    return Wanted(name, config, split)


def check(spec: str) -> None:
    """Spelling only: looking further may need the network."""
    parse(spec)


def rows(spec: str, *, seed: int, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Rows of one split. With a split named by the user there are no held-out rows: they are set aside by hash."""
    del seed
    wanted = parse(spec)
    if split == "eval" and wanted.split:
        return []
    data = _load(wanted)
    parts = {wanted.split or "train": data} if not isinstance(data, dict) else data
    chosen = _choose(parts, wanted, split, spec)
    return [dict(row) for row in parts[chosen]] if chosen else []


def _choose(parts: dict[str, Any], wanted: Wanted, split: Literal["train", "eval"], spec: str) -> str:
    if split == "eval":
        return next((name for name in HELD_OUT_SPLITS if name in parts), "")
    chosen = wanted.split or ("train" if "train" in parts or len(parts) > 1 else next(iter(parts)))
    if chosen not in parts:
        raise UserError(
            f"--prompts hf:{spec}: there is no split {chosen!r}; there are {', '.join(parts)}. Name one: hf:NAME@SPLIT."
        )
    return chosen


def _load(wanted: Wanted) -> Any:
    """A data set, or a dict of them by split."""
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    try:
        if Path(wanted.name).is_dir():
            return datasets.load_from_disk(wanted.name)
        return datasets.load_dataset(wanted.name, wanted.config or None)
    except (OSError, ValueError, DatasetsError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--prompts hf:{wanted.name}: {first}\n"
            "  Is the name right, and is there a network? A file works without: --prompts FILE.parquet"
        ) from error
