"""Streamed is phased, bit for bit; and a streamed or async run that was killed while several things went on, and
resumed, is the run that was not.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from cluster.run.journal import read_round, round_files
from tests.faults.runs import differences, launch, rows_of, salvaged_groups, state_of

SMALL = (
    # Each engine one group at a time, so that groups of a round come in several lots.
    "--rollouts", "256", "--minibatches", "8", "--rollout.max-num-seqs", "16", "--rounds", "3", "--eval.size", "16",
    "--quiet",
)  # fmt: skip
Row = dict[str, Any]


def whole(run: Path, *words: str) -> Path:
    """A run that nothing disturbs."""
    ended = launch(*SMALL, *words, "--run", str(run))
    assert ended.code == 0, ended.text
    return run


def killed_and_resumed(run: Path, fault: str, *words: str) -> Path:
    """A run that is killed in the round after its first commit, and taken to its end."""
    ended = launch(*SMALL, *words, "--run", str(run), fault=fault)
    assert ended.code == -signal.SIGKILL, ended.text
    assert state_of(run)[0] == 1
    ended = launch("resume", str(run))
    assert ended.code == 0, ended.text
    return run


def versions_of(run: Path) -> dict[int, set[int]]:
    """Round -> weights versions its responses were sampled with."""
    return {n: set(read_round(file)["weights_version"].to_pylist()) for n, file in round_files(run).items()}


def without_mismatch(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if not key.startswith("mismatch/")} for row in rows]


def test_a_streamed_run_killed_between_two_minibatches_and_resumed_is_the_phased_run(tmp_path: Path) -> None:
    """Rounds 1 and 3 are streamed undisturbed; of round 2 some minibatches are trained, the next is about to be."""
    phased = whole(tmp_path / "phased", "--learner.old-logprobs", "sampler")
    run = killed_and_resumed(tmp_path / "run", "pack@2:0:2:kill9", "--cluster.schedule", "streamed")
    assert salvaged_groups(run)[0] >= 2
    assert state_of(run) == state_of(phased)
    # Streamed compares engine and learner on the first minibatch, phased on all of the round.
    assert differences(without_mismatch(rows_of(phased)), without_mismatch(rows_of(run))) == []
    assert all(row["mismatch/max"] < 1e-4 for row in [*rows_of(phased), *rows_of(run)] if row["round"] > 0)
    assert versions_of(run) == versions_of(phased) == {1: {0}, 2: {1}, 3: {2}}


@pytest.mark.slow
def test_an_async_run_killed_with_two_rounds_in_flight_and_resumed_is_the_same_run(tmp_path: Path) -> None:
    """Round 2 is being trained, round 3 in flight: of both, what there was is used."""
    words = ("--cluster.schedule", "async", "--rollout.engines", "1", "--learner.ranks", "1")
    undisturbed = whole(tmp_path / "whole", *words)
    run = killed_and_resumed(tmp_path / "run", "score@3:0:3:kill9", *words)
    assert salvaged_groups(run)[0] >= 6
    assert state_of(run) == state_of(undisturbed)
    assert differences(rows_of(undisturbed), rows_of(run)) == []
    assert versions_of(run) == {1: {0}, 2: {0}, 3: {1}}
