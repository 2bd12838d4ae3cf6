"""Reading metric rows: of a run directory, or of a log that another system has written.

Whatever the source, rows come out under our names (`round`, `reward/total`, ...), one per round, in order, so that
the doctor and the report need to know nothing about where they come from.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.run.aliases import ROUND_NAMES, STALENESS, ours_from, plain_name
from cluster.run.log_lines import printed_rows
from cluster.run.metrics import METRICS, Row, decode_row
from rollout.types import UserError

_NESTED = ("data", "metrics", "logs", "scalars")
_KINDS = ".csv, .tsv, .jsonl, .json, .log or .txt, or a run directory"
_PRINTED = (".log", ".txt", ".out")
_BOOK_COLUMNS = {"adv_avg", "adv_std", "reward_avg"}


@dataclass(frozen=True)
class Log:
    """Rows under our names, and what was done to get them."""

    path: Path
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """What the reader decided, for people: mapped columns, derived metrics, lines left out."""
    unmapped: tuple[str, ...] = ()
    """Columns for which we have no metric."""


def read_log(path: str | Path) -> Log:
    """Rows of a run directory or of another system's log; UserError when it holds nothing that can be used."""
    place = Path(path)
    if place.is_dir():
        place = _file_in(place)
    if not place.is_file():
        raise UserError(f"{place} does not exist. Give a run directory or a log file ({_KINDS}).")
    notes: list[str] = []
    records = _records(place, notes)
    if not records:
        raise UserError(f"{place} has no rows: nothing has been logged yet, or it is not a log of metrics.")
    if any("round" in record for record in records):
        return Log(place, tuple(_by_round(records, "round", notes)), tuple(notes))
    return _translated(place, records, notes)


def _file_in(folder: Path) -> Path:
    """The log of a run directory: ours, or the state file of a TRL checkpoint."""
    for name in (METRICS, "trainer_state.json"):
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"{folder} has no {METRICS} (and no trainer_state.json): it is not a run directory, or its first round is "
        "not finished yet."
    )


def _records(place: Path, notes: list[str]) -> list[Row]:
    suffix = place.suffix.lower()
    if suffix not in (".csv", ".tsv", ".jsonl", ".ndjson", ".json", *_PRINTED):
        raise UserError(f"{place}: {suffix or 'a file without an ending'} is not a kind of log I can read ({_KINDS}).")
    try:
        text = place.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not a text file (byte {error.start} is not UTF-8).") from error
    if suffix in _PRINTED:
        return printed_rows(text)
    if suffix in (".csv", ".tsv"):
        return _from_csv(place, text, "\t" if suffix == ".tsv" else ",")
    if suffix == ".json":
        return _from_json(place, text)
    return _from_lines(place, text, notes)


def _from_csv(place: Path, text: str, delimiter: str) -> list[Row]:
    reader = csv.DictReader(text.splitlines(), delimiter=delimiter)
    if not reader.fieldnames:
        raise UserError(f"{place} is empty. The first line of a CSV log names its columns.")
    records: list[Row] = []
    for line in reader:
        cells = ((name, _number(cell)) for name, cell in line.items() if name and isinstance(cell, str))
        records.append({name: value for name, value in cells if value is not None})
    return [record for record in records if record]


def _from_json(place: Path, text: str) -> list[Row]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}, line {error.lineno}: not valid JSON ({error.msg}).") from error
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list) and value]
        tables = [value for value in lists if all(isinstance(each, dict) for each in value)]
        document = document["log_history"] if "log_history" in document else tables[0] if tables else [document]
    if not isinstance(document, list):
        raise UserError(f"{place} holds no list of rows (TRL's trainer_state.json has one under `log_history`).")
    return [_flat(record) for record in document if isinstance(record, dict)]


def _from_lines(place: Path, text: str, notes: list[str]) -> list[Row]:
    lines = [(at, line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    records: list[Row] = []
    for at, line in lines:
        try:
            records.append(_flat(decode_row(line)))
        except ValueError as error:
            if at != lines[-1][0]:
                raise UserError(f"{place}, line {at}, is not a row of metrics: {error}.") from error
            notes.append(f"The last line ({at}) is cut off and was left out: the run was writing, or it was killed.")
    return records


def _flat(record: Mapping[str, Any]) -> Row:
    """One level: metrics that a logger has wrapped (`{"step": 3, "data": {...}}`) are lifted out."""
    row: Row = {}
    for name, value in record.items():
        if isinstance(value, dict):
            inner = _flat(value)
            row |= inner if name in _NESTED else {f"{name}/{key}": each for key, each in inner.items()}
        else:
            row[name] = value
    return row


def _number(cell: str) -> float | None:
    """A CSV cell as a number; None where it is empty or a word."""
    try:
        return float(cell)
    except ValueError:
        return None


def _by_round(records: Iterable[Row], key: str, notes: list[str]) -> list[Row]:
    """One row per value of `key`, in order; records of the same round complete each other."""
    rows: dict[int, Row] = {}
    last = 0
    without = 0
    for record in records:
        number = record.get(key)
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            last = int(number)
        else:
            without += 1  # belongs to the record before it: loggers write evaluations without a step
        rows.setdefault(last, {}).update({name: value for name, value in record.items() if value is not None})
        rows[last][key] = last
    if without:
        notes.append(f"{without} rows have no `{key}`; each was joined to the row before it.")
    return [rows[number] for number in sorted(rows)]


def _translated(place: Path, records: Sequence[Row], notes: list[str]) -> Log:
    columns = list(dict.fromkeys(name for record in records for name in record))
    by_plain_name = {plain_name(column): column for column in reversed(columns)}
    counter = next((by_plain_name[name] for name in ROUND_NAMES if name in by_plain_name), None)
    if counter is None:
        records = [record | {"step": at} for at, record in enumerate(records, 1)]
        notes.append("No column counts the steps; rows are numbered from 1.")
        counter = "step"
    mapping = ours_from(column for column in columns if column != counter)
    staleness = next((by_plain_name[name] for name in STALENESS if name in by_plain_name), None)
    if not mapping:
        shown = ", ".join(columns[:12]) + (", ..." if len(columns) > 12 else "")
        raise UserError(
            f"{place}: none of its columns is a metric I know. It has: {shown}. I know the names of TRL, verl, "
            "OpenRLHF, SkyRL, the book's CSV, and ours (docs/metrics.md)."
        )
    rows: list[Row] = []
    for record in _by_round(records, counter, notes):
        row: Row = {"round": record[counter]}
        row |= {ours: record[theirs] for theirs, ours in mapping.items() if isinstance(record.get(theirs), int | float)}
        if staleness is not None and isinstance(record.get(staleness), int | float):
            row["weights_version"] = row["round"] - 1 - record[staleness]
        rows.append(row)
    if mapping.get("loss") == "policy/loss" and mapping.get("kl_loss") == "policy/kl_loss":
        for row in rows:
            if "policy/loss" in row and "policy/kl_loss" in row:
                row["policy/loss"] -= row["policy/kl_loss"]
        notes.append("policy/loss is the column loss without kl_loss, which it contains.")
    notes += _shares_from_percent(rows, mapping, set(columns))
    notes += _derived_correctness(rows) or _share_of_signed(rows)
    known = {*mapping, counter, staleness}
    return Log(place, tuple(rows), tuple(notes), tuple(column for column in columns if column not in known))


def _shares_from_percent(rows: list[Row], mapping: Mapping[str, str], columns: set[str]) -> list[str]:
    """Evaluation in percent becomes a share; the book's logs are always in percent."""
    source = next((theirs for theirs, ours in mapping.items() if ours == "eval/correctness"), None)
    values = [row["eval/correctness"] for row in rows if "eval/correctness" in row]
    book = source == "eval_acc" and columns >= _BOOK_COLUMNS
    if not values or not (book or 1.5 < max(values) <= 100):
        return []
    for row in rows:
        if "eval/correctness" in row:
            row["eval/correctness"] /= 100
    return [f"{source} was read as percent."]


def _derived_correctness(rows: list[Row]) -> list[str]:
    """Correctness from the total and the format part, where only those are logged and one weight fits all rows."""
    if any("reward/correctness" in row for row in rows):
        return []
    both = [row for row in rows if "reward/total" in row and "reward/format" in row]
    if len(both) < 2:
        return []
    total = np.array([row["reward/total"] for row in both], dtype=float)
    form = np.array([row["reward/format"] for row in both], dtype=float)
    weight = _format_weight(total, form)
    if weight is None:
        return []
    for row, value in zip(both, np.clip(total - weight * form, 0, 1), strict=True):
        row["reward/correctness"] = float(value)
    return [f"reward/correctness was derived as total - {weight:g} * format, the weight that fits all rows."]


def _share_of_signed(rows: list[Row]) -> list[str]:
    """Correctness from rewards that are -1 for a wrong answer and 1 for a right one."""
    values = [row["reward/total"] for row in rows if "reward/total" in row]
    if any("reward/correctness" in row for row in rows) or not values:
        return []
    if not (-1 <= min(values) <= -0.5 and max(values) <= 1):
        return []
    for row in rows:
        if "reward/total" in row:
            row["reward/correctness"] = (row["reward/total"] + 1) / 2
    return ["reward/correctness was derived as (total + 1) / 2: rewards seem to be -1 and 1."]


def _format_weight(total: np.ndarray[Any, Any], form: np.ndarray[Any, Any]) -> float | None:
    """The weight for which total - weight * format is a share of right answers in every row; None if that is unsure.

    Means over G responses are multiples of 1/G, for correctness as for format; that singles out one weight where few
    responses stand behind a row. Of several that fit, the largest: a smaller one would leave format in the rest.
    """
    size = next((size for size in (4, 8, 16, 32, 64) if _multiples(form, size)), None)
    weights = (1.0, 0.5, 0.25, 0.2, 0.1, 0.05, 0.01, 0.0)
    rests = {weight: total - weight * form for weight in weights}
    possible = [weight for weight, rest in rests.items() if rest.min() >= -1e-3 and rest.max() <= 1 + 1e-3]
    if size is not None:
        return next((weight for weight in possible if _multiples(rests[weight], size)), None)
    return possible[0] if len(possible) == 1 else None


def _multiples(values: np.ndarray[Any, Any], size: int) -> bool:
    return bool(np.all(np.abs(values * size - np.round(values * size)) <= 2e-3))
