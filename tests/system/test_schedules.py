"""Async on the real engines and ranks (streamed, beside phased: tests/faults/test_schedule_resume.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.run.metrics import read_metrics
from tests.faults.runs import launch

pytestmark = pytest.mark.system
SMALL = ("--rollouts", "64", "--rounds", "2", "--eval.size", "16", "--quiet")


def run(folder: Path, *words: str) -> Path:
    ended = launch(*SMALL, "--run", str(folder), *words)
    assert ended.code == 0, ended.text
    return folder


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder) if row["round"] > 0]


def test_async_is_one_version_behind_corrects_for_it_and_compares_engines_with_the_learner(tmp_path: Path) -> None:
    first, second = rounds_of(run(tmp_path / "async", "--cluster.schedule", "async"))
    assert (first["weights_version"], first["staleness/max"]) == (0, 0)
    assert (second["weights_version"], second["staleness/mean"], second["staleness/max"]) == (0, 1.0, 1)
    assert second["correction/weight_max"] > 1.001
    assert second["staleness/drift_max"] > 1e-3
    # Of the same weights the two agree all the same.
    assert first["mismatch/max"] < 1e-4
    assert second["mismatch/max"] < 1e-4
