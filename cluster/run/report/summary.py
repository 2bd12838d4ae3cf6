"""A run in a few numbers."""

from __future__ import annotations

from cluster.run.metrics import Row
from cluster.run.report.collect import RunRecord
from cluster.run.report.columns import is_number
from cluster.run.series import number


def summarise(run: RunRecord) -> list[dict[str, str]]:
    """Tiles: label, value, detail, and the metric whose curve goes with it."""
    rows = run.rows
    tiles = [_rounds(run)]
    for label, key, kind in (
        ("Held-out accuracy", "eval/correctness", "share"),
        ("Training accuracy", "reward/correctness", "share"),
        ("Reward", "reward/total", "plain"),
        ("Format", "reward/format", "share"),
        ("Response length", "response/length", "plain"),
        ("Entropy", "policy/entropy", "plain"),
        ("KL to the reference", "policy/kl", "plain"),
    ):
        values = _values(rows, key)
        if values:
            first, last = _ends(values)
            best = f"best {_show(max(values), kind)}" if key == "eval/correctness" else ""
            tiles.append(_tile(label, f"{_show(first, kind)} → {_show(last, kind)}", best, key))
    tokens, seconds = sum(_values(rows, "tokens/generated")), _values(rows, "time/round")
    if tokens:
        responses = sum(_values(rows, "responses"))
        speed = sum(_values(rows, "time/generate"))
        detail = f"{_count(responses)} responses" + (f", {_count(tokens / speed)}/s while generating" if speed else "")
        tiles.append(_tile("Tokens generated", _count(tokens), detail, "time/generate_tokens_per_s"))
    if seconds:
        median = sorted(seconds)[len(seconds) // 2]
        tiles.append(_tile("Time", _duration(sum(seconds)), f"{number(median)} s per round", "time/round"))
    return tiles


def _rounds(run: RunRecord) -> dict[str, str]:
    done = max((int(row.get("round", 0)) for row in run.rows), default=0)
    planned = run.settings.get("rounds")
    of = f" of {planned}" if isinstance(planned, int) and planned != done else ""
    restarts = int(max(_values(run.rows, "fleet/restarts"), default=0))
    dropped = int(sum(each for row in run.rows for key, each in row.items() if key.startswith("dropped/")))
    notes = [f"{dropped} responses dropped"] if dropped else []
    if restarts:
        notes.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    return _tile("Rounds", f"{done}{of}", ", ".join(notes), "")


def _ends(values: list[float]) -> tuple[float, float]:
    """First and last level: means over the first and last tenth, at least one and at most ten rounds."""
    width = max(1, min(10, len(values) // 10))
    return sum(values[:width]) / width, sum(values[-width:]) / width


def _values(rows: list[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if is_number(row.get(key))]


def _tile(label: str, value: str, detail: str, key: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail, "key": key}


def _show(value: float, kind: str) -> str:
    return f"{100 * value:.1f} %" if kind == "share" else number(value)


def _count(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s"
