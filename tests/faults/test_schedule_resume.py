"""A streamed or async run that was killed while several things went on, and resumed, is the same run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cluster.run.journal import read_round, round_files
from tests.faults.runs import differences, launch, rows_of, salvaged_groups, state_of

SMALL = (
    # One group at a time, so that groups of a round come in several lots.
    "--rollouts", "256", "--minibatches", "8", "--rollout.max-num-seqs", "16",
    "--rounds", "3", "--rollout.engines", "1", "--learner.ranks", "1", "--eval.every", "0", "--quiet",
)  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "fault", "least", "behind"),
    [
        # Some minibatches of round 2 are trained, the next is about to be.
        ("streamed", "pack@2:0:2:kill9", 2, 0),
        # Round 2 is being trained, round 3 in flight: of both, what there was is used.
        pytest.param("async", "score@3:0:3:kill9", 6, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_in_the_middle_and_resumed_is_the_same_run(
    schedule: str, fault: str, least: int, behind: int, tmp_path: Path
) -> None:
    words = (*SMALL, "--cluster.schedule", schedule)
    whole, run = tmp_path / "whole", tmp_path / "run"
    ended = launch(*words, "--run", str(whole))
    assert ended.code == 0, ended.text
    ended = launch(*words, "--run", str(run), fault=fault)
    assert ended.code == -signal.SIGKILL, ended.text
    assert state_of(run)[0] == 1
    ended = launch("resume", str(run))
    assert ended.code == 0, ended.text
    assert salvaged_groups(run)[0] >= least
    assert differences(rows_of(whole), rows_of(run)) == []
    assert state_of(run) == state_of(whole)
    versions = {n: set(read_round(file)["weights_version"].to_pylist()) for n, file in round_files(run).items()}
    assert versions == {1: {0}, 2: {1 - behind}, 3: {2 - behind}}
