"""metrics.jsonl (one row per round, no gap, no duplicate) and events.jsonl (what happened between the numbers).

Rows are plain JSON lines in ASCII. JSON has no NaN and no infinity, so a value that is not finite is written as null
and named in the row's `non_finite` object; `read_metrics` puts it back. So a run that diverged stays readable.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cluster.errors import BrokenPromise
from cluster.run.records import append_bytes, sync_folder
from cluster.run.secrecy import redacted
from rollout.types import UserError

Row = dict[str, Any]
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
_NOTE = "non_finite"


def encode_row(row: Mapping[str, Any]) -> bytes:
    """A row as one line of ASCII JSON, whatever numbers and text it holds."""
    return json.dumps(_cleaned(row), ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


def decode_row(line: str | bytes) -> Row:
    """The inverse of `encode_row`; raises ValueError when the line is no JSON object."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    restored: Row = _restored(row)
    return restored


def read_metrics(run: Path) -> list[Row]:
    """All rows of a run directory (or of a metrics file), in order; a last line without its end is left out."""
    return read_lines(run / METRICS if run.is_dir() else run)


def read_events(run: Path) -> list[Row]:
    """All events of a run directory, in order."""
    path = run / EVENTS if run.is_dir() else run
    return read_lines(path) if path.exists() else []


def read_lines(path: Path) -> list[Row]:
    """The rows of a file of JSON lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give a run directory that has made its first round.") from None
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        if line.strip():
            try:
                rows.append(decode_row(line))
            except ValueError as error:
                raise UserError(f"{path}, line {number}, is not a row of metrics: {error}.") from None
    return rows


class LineFile:
    """A file of JSON lines, open for appending; a torn last line is set aside when it is opened."""

    def __init__(self, path: Path) -> None:
        """Create the file, or go on behind its last whole line."""
        self.path = path
        self.torn_bytes = 0
        """Bytes of an unfinished last line that were set aside."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        sync_folder(path.parent)
        data = path.read_bytes()
        self.offset = data.rfind(b"\n") + 1
        """Bytes of whole lines."""
        if len(data) > self.offset:
            self.torn_bytes = len(data) - self.offset
            self._set_aside(data[self.offset :])

    def write(self, row: Mapping[str, Any]) -> int:
        """Append a row, bring it onto the disk, and return the length of the file after it."""
        self.offset = append_bytes(self._handle, encode_row(row), self.offset, self.path)
        os.fdatasync(self._handle)
        return self.offset

    def truncate_to(self, offset: int) -> Path | None:
        """Move everything behind `offset` to `<name>.discarded.<time>.jsonl`; returns that file, if there is one."""
        data = self.path.read_bytes()
        if not 0 <= offset <= len(data):
            raise BrokenPromise(
                f"{self.path} has {len(data)} bytes, but the checkpoint was made when it had {offset}: rows are lost."
            )
        if offset and data[offset - 1 : offset] != b"\n":
            raise BrokenPromise(f"{self.path} has no line end before byte {offset}: the file was changed by hand.")
        self.offset = offset
        return self._set_aside(data[offset:]) if len(data) > offset else None

    def close(self) -> None:
        """Close the file; twice does no harm."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _set_aside(self, tail: bytes) -> Path:
        """Keep the tail in a file of its own first, then cut it off here."""
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        target = self.path.with_name(f"{self.path.stem}.discarded.{moment}.jsonl")
        with target.open("xb") as file:
            file.write(tail)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(target.parent)
        os.ftruncate(self._handle, self.offset)
        os.fsync(self._handle)
        return target


class MetricsLog:
    """The rows of one run, round after round."""

    def __init__(self, run_folder: Path) -> None:
        """Use `metrics.jsonl` of the run directory, and go on behind the rows it has."""
        self._file = LineFile(run_folder / METRICS)
        self.last_round = self._last_round()
        """Round of the last row; None while there is none."""

    @property
    def next_round(self) -> int:
        """The first round of training that has no row."""
        return (self.last_round or 0) + 1

    @property
    def offset(self) -> int:
        """Length of the file in bytes; a checkpoint keeps it, and a resume hands it to `truncate_to`."""
        return self._file.offset

    @property
    def torn_bytes(self) -> int:
        """Bytes of an unfinished last line that were set aside when the file was opened."""
        return self._file.torn_bytes

    def append(self, row: Mapping[str, Any]) -> int:
        """Append the row of the next round and return the length of the file after it."""
        round_ = row.get("round")
        if not isinstance(round_, int) or isinstance(round_, bool):
            raise BrokenPromise(f"A row of {METRICS} needs an integer `round`, not {round_!r}.")
        expected = (0, 1) if self.last_round is None else (self.last_round + 1,)
        if round_ not in expected:
            raise BrokenPromise(
                f"{self._file.path} ends with round {self.last_round}; round {round_} would leave a "
                f"{'gap' if self.last_round is None or round_ > self.last_round else 'duplicate'}. "
                f"Expected {' or '.join(map(str, expected))}."
            )
        offset = self._file.write(row)
        self.last_round = round_
        return offset

    def truncate_to(self, offset: int) -> Path | None:
        """Move the rows behind a checkpoint's offset to `metrics.discarded.<time>.jsonl`."""
        moved = self._file.truncate_to(offset)
        self.last_round = self._last_round()
        return moved

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _last_round(self) -> int | None:
        rows = read_metrics(self._file.path)
        rounds = [row.get("round") for row in rows]
        if rounds and (rounds[0] not in (0, 1) or rounds != list(range(rounds[0], rounds[0] + len(rounds)))):
            raise BrokenPromise(f"{self._file.path} does not hold rounds 0..n once each and in order: {rounds[:20]}.")
        return rounds[-1] if rounds else None


class EventLog:
    """What happened: diagnoses, restarts, skips, drops. One JSON object per line, never taken back."""

    def __init__(self, run_folder: Path) -> None:
        """Use `events.jsonl` of the run directory."""
        self._file = LineFile(run_folder / EVENTS)

    def append(self, kind: str, *, round: int | None = None, **details: Any) -> Row:
        """Append an event of the given kind, stamped with the time, and return it."""
        if "time" in details:
            raise ValueError("An event is stamped with the time it is written at; call the detail something else.")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        # Texts come from anywhere, errors of libraries included.
        told = {key: redacted(value) if isinstance(value, str) else value for key, value in details.items()}
        event = {"time": now, "round": round, "kind": kind, **told}
        self._file.write(event)
        return event

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cleaned(value: Any) -> Any:
    """The value with numpy turned into Python and what is not finite turned into null, named beside it."""
    if isinstance(value, Mapping):
        row = {str(key): _cleaned(each) for key, each in value.items()}
        odd = {str(key): str(float(each)) for key, each in value.items() if _odd(each)}
        return {**row, _NOTE: odd} if odd else row
    if isinstance(value, list | tuple):
        return [_cleaned(each) for each in value]
    if isinstance(value, np.ndarray):
        return _cleaned(value.tolist())
    if isinstance(value, np.generic):
        return _cleaned(value.item())
    if isinstance(value, Path):
        return str(value)
    return None if _odd(value) else value


def _odd(value: Any) -> bool:
    return isinstance(value, float | np.floating) and not math.isfinite(value)


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        row = {key: _restored(each) for key, each in value.items() if key != _NOTE}
        odd = value.get(_NOTE)
        if isinstance(odd, dict):
            row.update({key: float(text) for key, text in odd.items()})
        return row
    if isinstance(value, list):
        return [_restored(each) for each in value]
    return value
