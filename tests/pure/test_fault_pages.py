"""The pages about faults and known bugs name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", ["faults.md", "known-bugs.md"])
def test_every_test_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 50
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or (name and f"def {name}(" not in (ROOT / file).read_text())
    ]
    assert missing == []


def test_the_faults_are_those_that_were_promised() -> None:
    numbers = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    promised = {1, 2, 3, 4, 6, 7, 9, 11, 12, 13, 14, 16, 18, 19, 20, 21, 22, 23, 26, 27, 28, 29, 30}
    assert promised <= {int(number) for number in numbers}
