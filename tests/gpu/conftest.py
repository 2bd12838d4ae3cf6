"""Figures that the checks on a GPU find on the way: one line of JSON each, for tests/gpu/run.py to print."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

FIGURES = "ROLLEARN_GPU_FIGURES"
"""Environment variable that names the file; without it figures are only printed (pytest -s)."""


@pytest.fixture
def figure() -> Callable[[str, float, str], None]:
    """`figure(what, value, unit)` writes one down."""

    def write(what: str, value: float, unit: str) -> None:
        line = json.dumps({"what": what, "value": value, "unit": unit})
        if FIGURES in os.environ:
            with Path(os.environ[FIGURES]).open("a") as file:
                file.write(line + "\n")
        else:
            print(line)  # noqa: T201

    return write
