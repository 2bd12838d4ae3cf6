"""Whole runs on one GPU: engine and rank colocated, weights through shared device memory, the engine asleep between."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMON = [
    "--rollouts", "1024", "--minibatches", "4", "--rounds", "3", "--cluster.placement", "colocated", "--eval.every",
    "3", "--quiet",
]  # fmt: skip
Figure = Callable[[str, float, str], None]


def train(folder: Path, *words: str) -> list[dict[str, Any]]:
    """A run in bfloat16; its rows."""
    command = [sys.executable, "launch.py", *COMMON, "--run", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    plan = (folder / "plan.txt").read_text()
    assert "placement colocated" in plan
    assert "weights by cuda_ipc" in plan
    assert "bfloat16" in plan
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("all weights", []),
        ("adapter", ["--learner.lora-rank", "16", "--learner.lr", "2e-3", "--kl.kind", "k3_weighted"]),
        (
            "ZeRO 3, recomputed activations, optimizer in host memory",
            ["--learner.zero-stage", "3", "--learner.gradient-checkpointing", "--learner.offload"],
        ),
    ],
)
def test_a_colocated_run_learns_and_every_sync_is_proved(
    tmp_path: Path, figure: Figure, name: str, words: list[str]
) -> None:
    rows = train(tmp_path / "run", *words)
    rounds = rows[1:]
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert all(row["sync/receipt_ok"] == 1.0 for row in rounds)
    assert all(row["mismatch/mean"] < 0.05 for row in rounds)
    assert rounds[-1]["reward/total"] > rounds[0]["reward/total"]
    assert rows[-1]["eval/correctness"] > rows[0]["eval/correctness"]
    for key, what in (
        ("time/round", "round"),
        ("time/generate", "generate"),
        ("time/learn", "learn"),
        ("sync/seconds", "sync"),
    ):
        figure(f"{name}: {what} of 1024 responses", rounds[-1][key], "s")
    figure(f"{name}: engine and learner differ by at most", max(row["mismatch/max"] for row in rounds), "")
