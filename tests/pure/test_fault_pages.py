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


def rows_of(page: str) -> list[list[str]]:
    """The cells of every row of a page's table, without its head."""
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_the_faults_are_those_that_were_promised_and_each_has_a_test() -> None:
    rows = rows_of("faults.md")
    promised = {1, 2, 3, 4, 6, 7, 9, 11, 12, 13, 14, 16, 18, 19, 20, 21, 22, 23, 26, 27, 28, 29, 30}
    assert promised <= {int(number) for number, *_ in rows}
    assert [number for number, *_, tests in rows if not NAMED.search(tests)] == []


def test_every_kind_of_bug_that_was_promised_is_kept_out_by_a_test() -> None:
    promised = {
        "weight-sync-hang", "weight-sync-stale", "weight-sync-corrupt", "weight-sync-abort", "prefix-cache", "nan",
        "advantage", "mask", "loss-denominator", "logprob-mismatch", "resume-data", "resume-state", "resume-curves",
        "checkpoint-atomic", "checkpoint-format", "disk-full", "orphan", "port", "actor-death", "placement", "oom",
        "batch-arithmetic", "zero-variance", "metrics", "config-typo",
    }  # fmt: skip
    rows = rows_of("known-bugs.md")
    assert promised <= {kind for kind, report, kept in rows if "#" in report and NAMED.search(kept)}
    assert [report for _, report, kept in rows if len(kept) < 20] == [], "a test, or a sentence why there is none"
