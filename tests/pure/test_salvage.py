"""Which groups of an interrupted run count when it is resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import BrokenPromise
from cluster.run.journal import Journal
from cluster.run.resume import salvage
from rollout.types import ScoredGroup
from tests.pure.scored_groups import scored_group


def group(round_: int, version: int, row: str = "row0") -> ScoredGroup:
    made: ScoredGroup = scored_group(row, round_=round_)
    return replace(made, group=replace(made.group, weights_version=version))


def found(tmp_path: Path, *groups: ScoredGroup, committed: int, max_lag: int) -> dict[int, list[int]]:
    """Round -> versions of what is salvaged."""
    with Journal(tmp_path) as journal:
        for each in groups:
            journal.append(each)
        kept = salvage(journal, committed, max_lag)
        return {number: [each.group.weights_version for each in some.values()] for number, some in kept.items()}


def test_without_lag_only_the_next_round_counts_and_only_of_the_weights_that_were_committed(tmp_path: Path) -> None:
    assert found(tmp_path, group(4, 3), group(5, 4), committed=3, max_lag=0) == {4: [3]}
    with pytest.raises(BrokenPromise, match=r"versions \[2, 3\].*trained on version 3\.\n.*round-00004.journal"):
        found(tmp_path, group(4, 2, "other"), committed=3, max_lag=0)


def test_rounds_in_flight_count_when_they_come_from_committed_weights(tmp_path: Path) -> None:
    # Round 4 was complete and being trained, round 5 in flight on the weights after round 3.
    assert found(tmp_path, group(4, 2), group(5, 3), committed=3, max_lag=1) == {4: [2], 5: [3]}


def test_a_round_of_weights_that_are_made_again_is_generated_again(tmp_path: Path) -> None:
    assert found(tmp_path, group(4, 2), group(5, 4), group(6, 4), committed=3, max_lag=2) == {4: [2]}
    # Also one of which only a part had been salvaged before.
    assert found(tmp_path, group(5, 3, "other"), committed=3, max_lag=2) == {4: [2]}


def test_a_group_further_behind_than_allowed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenPromise, match=r"versions \[1\].*at most 1 behind"):
        found(tmp_path, group(4, 1), committed=3, max_lag=1)
