"""Metric rows as columns for curves: few enough points, few enough digits, and how sure a share is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from cluster.run.metrics import Row
from cluster.run.report.collect import RunRecord

MAX_POINTS = 1500
_PHASES = ("time/generate", "time/score", "time/old_logprobs", "time/learn", "sync/seconds", "time/eval")
_KEEP_LARGEST = ("max", "grad_norm", "restarts", "errors", "timeouts", "skipped_steps")
Column = dict[str, Any]


def run_columns(run: RunRecord) -> dict[str, Column]:
    """Metric -> {x, y} (and {low, high} where a band is known): rounds and values, absent ones left out."""
    rows = [_with_derived(row) for row in run.rows]
    width = max(1, math.ceil(len(rows) / MAX_POINTS))
    portions = [rows[start : start + width] for start in range(0, len(rows), width)]
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if is_number(value) and key != "round")
    columns = {key: _column(key, portions) for key in keys}
    _add_band(columns, "reward/correctness", _prompts_per_point(run, width))
    _add_band(columns, "eval/correctness", _held_out(run) * width)
    return columns


def rounds_per_point(run: RunRecord) -> int:
    """How many rounds one point of a curve stands for."""
    return max(1, math.ceil(len(run.rows) / MAX_POINTS))


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share that was seen in `count` independent cases."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def short(value: float) -> float:
    """A value with five significant digits, which is finer than a screen shows."""
    return float(f"{value:.5g}")


def _with_derived(row: Row) -> Row:
    """The row with the time that belongs to no phase."""
    derived = dict(row)
    total = row.get("time/round")
    if is_number(total):
        known = sum(row[key] for key in _PHASES if is_number(row.get(key)))
        derived["time/other"] = max(0.0, total - known)
    return derived


def _column(key: str, portions: Sequence[Sequence[Row]]) -> Column:
    pick = max if key.endswith(_KEEP_LARGEST) else lambda values: sum(values) / len(values)
    rounds, values = [], []
    for portion in portions:
        known = [float(row[key]) for row in portion if is_number(row.get(key))]
        if known:
            rounds.append(portion[-1].get("round", 0))
            values.append(short(pick(known)))
    return {"x": rounds, "y": values}


def _add_band(columns: dict[str, Column], key: str, count: int) -> None:
    if key in columns and count > 0 and all(0 <= value <= 1 for value in columns[key]["y"]):
        bands = [wilson(value, count) for value in columns[key]["y"]]
        columns[key] |= {"low": [short(low) for low, _ in bands], "high": [short(high) for _, high in bands]}


def _prompts_per_point(run: RunRecord, width: int) -> int:
    """Independent cases behind one point: prompts, not responses, because those of one prompt resemble each other."""
    sizes = [row["responses"] for row in run.rows if is_number(row.get("responses"))]
    return int(width * sorted(sizes)[len(sizes) // 2] / run.group_size) if sizes else 0


def _held_out(run: RunRecord) -> int:
    size = run.settings.get("eval.size")
    return size if isinstance(size, int) else 0


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a cell of a row is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
