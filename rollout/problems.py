"""Problems of rows and the one report that lists them all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.types import UserError

SHOWN = 50
"""Problems that are written out; of the others the places are listed."""
PLACES_CHARACTERS = 4000
"""Longest list of places."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one row."""

    where: str
    """File and line, or number of the row."""
    index: int
    """Position of the row in its source."""
    kind: str
    """A few words to count by."""
    text: str
    """What is wrong and, where it helps, what to do."""


class BadRows(UserError):
    """Rows with problems; `problems` lists every one of them."""

    def __init__(self, text: str, problems: Sequence[Problem] = ()) -> None:
        """Text is the whole report."""
        super().__init__(text)
        self.problems = tuple(problems)


def report(problems: Sequence[Problem], rows: int) -> str:
    """Everything that is wrong: how often each kind, the first problems in full, the places of all others."""
    problems = sorted(problems, key=lambda problem: problem.index)
    bad = len({problem.index for problem in problems})
    kinds = Counter(problem.kind for problem in problems)
    counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())
    lines = [f"{bad} of {rows} rows have problems ({counts})."]
    lines += [f"  {problem.where}: {problem.text}" for problem in problems[:SHOWN]]
    rest = list(dict.fromkeys(problem.where for problem in problems[SHOWN:]))
    if rest:
        lines.append(f"  and {len(problems) - SHOWN} more at {places(rest)}")
    lines.append("Mend the rows, or leave them out and be told how many: --data.skip-bad-rows")
    return "\n".join(lines)


def places(wheres: Sequence[str]) -> str:
    """Places in a short form: runs of line numbers in one file are written as first-last."""
    runs: list[tuple[str, int, int]] = []
    for where in wheres:
        match = re.fullmatch(r"(.*?)(\d+)", where)
        stem, number = (match[1], int(match[2])) if match else (where, 0)
        if runs and runs[-1][0] == stem and number == runs[-1][2] + 1:
            runs[-1] = (stem, runs[-1][1], number)
        else:
            runs.append((stem, number, number))
    text, last = "", ""
    for stem, first, end in runs:
        piece = f"{first}" if first == end else f"{first}-{end}"
        text += f", {piece}" if text and stem == last else f"{'; ' if text else ''}{stem}{piece}"
        last = stem
        if len(text) > PLACES_CHARACTERS:
            return text[:PLACES_CHARACTERS] + " ..."
    return text
