"""Rows out of files: JSON Lines, JSON, CSV, TSV and Parquet, each row with the place it stands at.

Nothing here stops at the first bad row: a row that cannot be read becomes a `RawRow` with its problem, so that one
report can list them all. Only a file that cannot be read as a whole raises. Reading is line by line with a cap on the
length of a line; no reader runs code that stands in the data.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rollout.types import UserError

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Longer lines are problems: no prompt needs them, and one of them could fill the memory."""
BYTE_ORDER_MARK = "\ufeff"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it was found, before columns are mapped."""

    where: str
    """Place for messages: `file:line`, or the number of the row where there are no lines."""
    index: int
    """Position among the rows of its source, counted from 0, unreadable rows included."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Values by column."""
    problem: str = ""
    """Why the row could not be read; empty when it could."""
    kind: str = ""
    """One or two words for the problem, to count by."""
    row_id: str = ""
    """Name given by the source; files give none."""


def read_file(path: Path) -> list[RawRow]:
    """All rows of one file; the ending of its name says how it is read."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"{path} is not a kind of file that holds prompts. Known endings: {', '.join(sorted(READERS))}."
        )
    try:
        rows = reader(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not rows:
        raise UserError(f"{path} holds no rows.")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line without its end); None stands for a line beyond the cap, whose text is not kept."""
    with path.open("rb") as file:
        start = file.read(2)
        if start in _WIDE_MARKS:
            raise UserError(f"{path} is UTF-16. Save it as UTF-8.")
        file.seek(0)
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
                yield number, line.rstrip(b"\n").removesuffix(b"\r")
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield number, None


def _decode(line: bytes, number: int) -> tuple[str, str]:
    """(text, problem) of one line; the mark that may begin a file is dropped, because it is no part of the data."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8 at byte {error.start + 1} (0x{line[error.start]:02x})"
    return (text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text), ""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_json(text: str) -> tuple[Any, str]:
    """(value, problem) of a JSON text."""
    try:
        return json.loads(text, parse_constant=_no_constant), ""
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        return None, f"invalid JSON: {error.msg} at {place}"
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        return None, f"invalid JSON: {reason}"


def _too_long() -> str:
    return f"line longer than {MAX_LINE_BYTES // 2**20} MiB"


def read_jsonl(path: Path) -> list[RawRow]:
    """One JSON object per line; empty lines are passed over."""
    rows: list[RawRow] = []
    for number, line in _lines(path):
        where, index = f"{path}:{number}", len(rows)
        if line is None:
            rows.append(RawRow(where, index, problem=_too_long(), kind="line too long"))
            continue
        text, problem = _decode(line, number)
        if problem:
            rows.append(RawRow(where, index, problem=problem, kind="invalid UTF-8"))
            continue
        if not text.strip():
            continue
        value, problem = _parse_json(text)
        rows.append(_object_row(where, index, value, problem))
    return rows


def _object_row(where: str, index: int, value: Any, problem: str) -> RawRow:
    if problem:
        return RawRow(where, index, problem=problem, kind="invalid JSON")
    if not isinstance(value, dict):
        found = type(value).__name__
        return RawRow(where, index, problem=f"a JSON object is needed, this is {found}", kind="not an object")
    return RawRow(where, index, columns=value)


def read_json(path: Path) -> list[RawRow]:
    """One JSON list of objects."""
    data = path.read_bytes()
    if data[:2] in _WIDE_MARKS:
        raise UserError(f"{path} is UTF-16. Save it as UTF-8.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: invalid UTF-8 (0x{data[error.start]:02x}). Save the file as UTF-8.") from error
    value, problem = _parse_json(text)
    if problem:
        raise UserError(f"{path}: {problem}. One object per line belongs in a .jsonl file.")
    if not isinstance(value, list):
        raise UserError(f"{path} holds one {type(value).__name__}; a list of objects is needed, or a .jsonl file.")
    return [_object_row(f"{path} row {index + 1}", index, item, "") for index, item in enumerate(value)]


def _read_delimited(path: Path, delimiter: str) -> list[RawRow]:
    undecodable: dict[int, tuple[str, str]] = {}
    seen = 0

    def texts() -> Iterator[str]:
        nonlocal seen
        for number, line in _lines(path):
            seen = number
            if line is None:
                undecodable[number] = (_too_long(), "line too long")
                yield "\n"
                continue
            text, problem = _decode(line, number)
            if problem:
                undecodable[number] = (problem, "invalid UTF-8")
                text = line.decode("utf-8", errors="replace")
            yield text + "\n"

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    rows: list[RawRow] = []
    while True:
        first = seen + 1
        try:
            cells = next(reader, None)
            problem, kind = "", ""
        except csv.Error as error:
            cells, problem, kind = [], f"invalid CSV: {error}", "invalid CSV"
        if cells is None:
            return rows
        spoilt = next((undecodable[n] for n in range(first, seen + 1) if n in undecodable), None)
        if not cells and not problem and spoilt is None:
            continue
        if header is None:
            header = _header(path, cells, spoilt[0] if spoilt else problem)
            continue
        if spoilt is not None:
            problem, kind = spoilt
        elif not problem and len(cells) != len(header):
            problem, kind = f"{len(cells)} cells, but the header has {len(header)}", "wrong number of cells"
        columns = {} if problem else dict(zip(header, cells, strict=True))
        rows.append(RawRow(f"{path}:{first}", len(rows), columns, problem, kind))


def _header(path: Path, cells: list[str], problem: str) -> list[str]:
    if problem:
        raise UserError(f"{path}:1: the header cannot be read: {problem}.")
    twice = sorted({cell for cell in cells if cells.count(cell) > 1})
    if twice:
        raise UserError(f"{path}:1: the header names {', '.join(map(repr, twice))} twice.")
    return cells


def read_csv(path: Path) -> list[RawRow]:
    """Comma separated values; the first line names the columns."""
    return _read_delimited(path, ",")


def read_tsv(path: Path) -> list[RawRow]:
    """Tab separated values; the first line names the columns."""
    return _read_delimited(path, "\t")


def read_parquet(path: Path) -> list[RawRow]:
    """Parquet, nested columns included."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows: list[RawRow] = []
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                rows += _batch_rows(path, batch, len(rows))
    except pa.ArrowException as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}.") from error
    return rows


def _batch_rows(path: Path, batch: Any, start: int) -> list[RawRow]:
    try:
        values: list[dict[str, Any] | None] = batch.to_pylist()
    except UnicodeDecodeError:  # Parquet does not check its texts: find the rows that are broken
        values = [_one_row(batch, i) for i in range(batch.num_rows)]
    rows = []
    for index, columns in enumerate(values, start):
        where = f"{path} row {index + 1}"
        if columns is None:
            rows.append(RawRow(where, index, problem="invalid UTF-8 in a text", kind="invalid UTF-8"))
        else:
            rows.append(RawRow(where, index, columns))
    return rows


def _one_row(batch: Any, index: int) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return None
    return row


READERS: dict[str, Callable[[Path], list[RawRow]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
"""How a file is read, by the ending of its name."""
