"""Which responses the report shows: per round the best, the worst, the most disputed groups and some drawn at random.

A run may hold millions of responses. Rounds, groups, responses and characters are chosen until a budget is spent, in an
order that keeps what people look for; what was left out is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cluster.run.journal import read_round, round_files
from cluster.run.report.collect import RunRecord
from cluster.run.report.columns import short
from rollout.seeds import stable_hash

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROUNDS = 48
MAX_GROUPS = 12
MAX_RESPONSES = 24
MAX_FOLLOWED = 12
MAX_VISITS = 8
_MARKS = {"right": "r", "wrong": "w"}
_TAGS = ("disputed", "best", "worst", "random")
FIELDS = ("k", "text", "total", "parts", "advantage", "length", "finished", "outcome", "attempt")


@dataclass(frozen=True, slots=True)
class RoundIndex:
    """Where the groups of a round stand in its table, and how they did."""

    number: int
    path: Path
    rows: list[str]
    """(P,) row id of each group."""
    starts: npt.NDArray[np.int64]
    """(P,) first row of each group."""
    sizes: npt.NDArray[np.int64]
    """(P,) responses of each group."""
    means: npt.NDArray[np.float64]
    """(P,) mean reward."""
    spreads: npt.NDArray[np.float64]
    """(P,) standard deviation of the rewards."""


def index_round(number: int, path: Path) -> RoundIndex:
    """Read only what is needed to choose."""
    table = read_round(path, ["row_id", "k", "reward_total"])
    starts = np.flatnonzero(table["k"].to_numpy() == 0)
    total = table["reward_total"].to_numpy()
    sizes = np.diff(np.append(starts, table.num_rows))
    if not len(starts):
        return RoundIndex(number, path, [], starts, sizes, np.empty(0), np.empty(0))
    means = np.add.reduceat(total, starts) / sizes
    squares = np.add.reduceat(total**2, starts) / sizes
    spreads = np.sqrt(np.maximum(0.0, squares - means**2))
    return RoundIndex(number, path, table["row_id"].take(starts).to_pylist(), starts, sizes, means, spreads)


def choose_rounds(numbers: Sequence[int], wanted: Iterable[int], most: int = MAX_ROUNDS) -> list[int]:
    """First, last, those where something was found, and evenly spread ones between."""
    if len(numbers) <= most:
        return list(numbers)
    chosen = {numbers[0], numbers[-1], *(number for number in wanted if number in set(numbers))}
    for at in np.linspace(0, len(numbers) - 1, most):
        if len(chosen) >= most:
            break
        chosen.add(numbers[round(float(at))])
    return sorted(chosen)


def choose_groups(index: RoundIndex, most: int = MAX_GROUPS) -> dict[int, list[str]]:
    """Group -> why it was chosen, in the order in which room is given to them."""
    count = len(index.rows)
    drawn = np.array([stable_hash(index.number, row) for row in index.rows])
    order = {
        "disputed": [at for at in np.argsort(-index.spreads, kind="stable") if index.spreads[at] > 0],
        "best": list(np.argsort(-index.means, kind="stable")),
        "worst": list(np.argsort(index.means, kind="stable")),
        "random": list(np.argsort(drawn, kind="stable")),
    }
    chosen: dict[int, list[str]] = {}
    for place in range(count):
        if len(chosen) >= most:
            break
        for tag in _TAGS:
            if place < len(order[tag]):
                chosen.setdefault(int(order[tag][place]), []).append(tag)
    return chosen


def browse(run: RunRecord, budget: int) -> dict[str, Any]:
    """What the group browser of one run shows, in at most about `budget` characters."""
    files = round_files(run.folder)
    wanted = [finding.since_round for finding in run.findings]
    indices = [index_round(number, files[number]) for number in choose_rounds(list(files), wanted)]
    indices = [index for index in indices if index.rows]
    rounds = []
    for place, index in enumerate(indices):
        shown, used = _show_round(index, budget // (len(indices) - place))
        budget -= used
        rounds.append(shown)
    return {"fields": list(FIELDS), "rounds": rounds, "kept_rounds": len(files)}


def _show_round(index: RoundIndex, budget: int) -> tuple[dict[str, Any], int]:
    table = read_round(index.path)
    parts = [name.removeprefix("reward_") for name in table.column_names if name.startswith("reward_")]
    parts.remove("total")
    chosen = choose_groups(index)
    largest = min(int(index.sizes.max()), MAX_RESPONSES)
    characters = max(300, min(4000, budget // (4 * largest)))
    groups: list[dict[str, Any]] = []
    used = 0
    for at, tags in chosen.items():
        group = _show_group(table, index, at, parts, characters) | {"tags": tags}
        size = len(json.dumps(group))
        if groups and used + size > budget:
            break
        used += size
        groups.append(group)
    shown = {
        "round": index.number,
        "groups": groups,
        "of": len(index.rows),
        "parts": parts,
        "committed": index.path.suffix == ".parquet",
        "file": f"groups/{index.path.name}",
    }
    return shown, used


def _show_group(table: pa.Table, index: RoundIndex, at: int, parts: list[str], characters: int) -> dict[str, Any]:
    rows = table.slice(int(index.starts[at]), int(index.sizes[at])).to_pylist()
    kept = sorted(_spread_out(rows), key=lambda row: row["k"])
    first = rows[0]
    return {
        "row": cut(first["row_id"], 200),
        "occurrence": first["occurrence"],
        "minibatch": first["minibatch"],
        "dropped": first["dropped"],
        "domain": cut(first["domain"], 200),
        "prompt": cut(first["prompt"], characters),
        "answer": cut(first["answer"], 500),
        "version": first["weights_version"],
        "engine": first["engine"],
        "mean": short(float(index.means[at])),
        "spread": short(float(index.spreads[at])),
        "size": len(rows),
        "rewards": [_number(row["reward_total"]) for row in rows],
        "marks": "".join(_MARKS.get(row["outcome"], "e") for row in rows),
        "responses": [
            [
                row["k"],
                cut(row["response"], characters),
                _number(row["reward_total"]),
                [_number(row[f"reward_{part}"]) for part in parts],
                _number(row["advantage"]),
                row["length"],
                int(row["finished"]),
                row["outcome"],
                row["attempt"],
            ]
            for row in kept
        ],
    }


def _spread_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MAX_RESPONSES of a group, from the best to the worst at even distances."""
    if len(rows) <= MAX_RESPONSES:
        return rows
    ranked = sorted(rows, key=lambda row: (-row["reward_total"], row["k"]))
    return [ranked[round(float(at))] for at in np.linspace(0, len(rows) - 1, MAX_RESPONSES)]


def follow(run: RunRecord, budget: int) -> list[dict[str, Any]]:
    """The same prompts over the rounds: held-out ones where evaluations are kept, else those that came most often."""
    files = round_files(run.folder, "eval") or round_files(run.folder)
    numbers = choose_rounds(list(files), [], 4 * MAX_ROUNDS)
    indices = {number: index_round(number, files[number]) for number in numbers}
    visits: dict[str, list[tuple[int, int]]] = {}
    for number, index in indices.items():
        seen: set[str] = set()
        for at, row in enumerate(index.rows):
            if row not in seen:
                seen.add(row)
                visits.setdefault(row, []).append((number, at))
    often = sorted((row for row in visits if len(visits[row]) > 1), key=lambda row: (-len(visits[row]), row))
    followed = often[:MAX_FOLLOWED]
    characters = max(300, min(4000, budget // (MAX_FOLLOWED * MAX_VISITS * 2)))
    wanted: dict[int, list[tuple[str, int]]] = {}
    for row in followed:
        places = np.linspace(0, len(visits[row]) - 1, min(MAX_VISITS, len(visits[row])))
        for number, at in (visits[row][round(float(place))] for place in places):
            wanted.setdefault(number, []).append((row, at))
    shown: dict[str, dict[str, Any]] = {row: {"row": cut(row, 200), "visits": []} for row in followed}
    columns = ["prompt", "answer", "response", "reward_total", "length", "finished", "outcome", "weights_version"]
    for number in sorted(wanted):
        table = read_round(files[number], columns)
        for row, at in wanted[number]:
            index = indices[number]
            first = table.slice(int(index.starts[at]), 1).to_pylist()[0]
            shown[row].update(prompt=cut(first["prompt"], characters), answer=cut(first["answer"], 500))
            shown[row]["visits"].append(
                {
                    "version": first["weights_version"],
                    "text": cut(first["response"], characters),
                    "total": _number(first["reward_total"]),
                    "outcome": first["outcome"],
                    "length": first["length"],
                    "finished": int(first["finished"]),
                    "mean": short(float(index.means[at])),
                    "size": int(index.sizes[at]),
                }
            )
    return list(shown.values())


def cut(text: str | None, characters: int) -> str:
    """The text, or its beginning and end with a note of how much lies between."""
    text = text or ""
    if len(text) <= characters:
        return text
    tail = characters // 3
    return f"{text[: characters - tail]}\n[... {len(text) - characters:,} characters left out ...]\n{text[-tail:]}"


def _number(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else short(value)
