"""Sources of prompts: one file in this folder is one source, found by itself.

A source is a module with two names: `NAME`, the word a user writes in front of the colon in `--prompts NAME:spec`, and
`rows(spec, *, seed, split)`, which gives raw rows. A row is a dict with `prompt`, `answer`, `row_id`, `domain` and any
further columns. Modules stay light: heavy libraries are imported inside `rows`, because every source is imported to
list the names.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollout.types import UserError

Split = Literal["train", "eval"]
Row = dict[str, Any]

DEMO_MODEL = Path(__file__).resolve().parent / "demo"
"""Directory of the model that is shipped with the package (Hugging Face format, with `rollearn.json` beside it)."""
DEMO_SOURCE = "arithmetic"
"""Source the shipped model was made for."""


@dataclass(frozen=True, slots=True)
class Source:
    """One place prompts come from."""

    name: str
    """What `--prompts` calls it."""
    rows: Callable[..., list[Row]]
    """`rows(spec, *, seed, split)`: the raw rows of one split."""


def sources() -> dict[str, Source]:
    """All sources in this folder, by name; modules without `NAME` and `rows` are not sources."""
    found: dict[str, Source] = {}
    for module_info in pkgutil.iter_modules(__path__):
        where = f"{__name__}.{module_info.name}"
        module = importlib.import_module(where)
        name, rows = getattr(module, "NAME", None), getattr(module, "rows", None)
        if name is None and rows is None:
            continue
        if not isinstance(name, str) or not callable(rows):
            raise UserError(
                f"{where} is half a source of prompts. Define both NAME (text) and rows(spec, *, seed, split)."
            )
        if name in found:
            raise UserError(f"Two sources of prompts are called {name!r}; {where} is the second. Rename one of them.")
        found[name] = Source(name, rows)
    return found


def source(name: str) -> Source:
    """The source called `name`; an unknown name is the user's mistake."""
    known = sources()
    if name not in known:
        raise UserError(f"There is no source of prompts called {name!r}. Known: {', '.join(sorted(known))}, or a file.")
    return known[name]
