"""Metrics out of what a training script has printed: dictionaries of TRL, `step:3 - name:value - ...` lines of verl."""

from __future__ import annotations

import re
from typing import Any

_DICTIONARY = re.compile(r"\{'[^{}]*\}")
_PAIR = re.compile(r"'([^']+)': ?(['\"]?)([-+]?(?:\d[\d_.]*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))\2(?=[,}])")
_STEP = re.compile(r"\bstep:(\d+) - (\S.*)$")
_VALUE = re.compile(r"^(?P<name>.+?):(?:np\.\w+\()?(?P<value>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))\)?$")


def printed_rows(text: str) -> list[dict[str, Any]]:
    """One row per printed step, whatever stands around it: progress bars, prefixes of processes, other lines."""
    rows: list[dict[str, Any]] = []
    for line in re.split(r"[\r\n]", text):
        step = _STEP.search(line)
        if step:
            pairs = (_VALUE.match(piece.strip()) for piece in step[2].split(" - "))
            rows.append({"step": int(step[1])} | {pair["name"]: float(pair["value"]) for pair in pairs if pair})
            continue
        for found in _DICTIONARY.findall(line):
            row: dict[str, Any] = {name: float(value) for name, _, value in _PAIR.findall(found)}
            if len(row) > 1:
                rows.append(row)
    return rows
