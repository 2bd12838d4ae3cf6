"""How a batch is laid out and cut, for any number of ranks and any budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.batching import build_batch, pad_rows, plan_microbatches, rows_with_signal
from learner.types import Batch
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup


def scored(row: int, lengths: list[int], *, minibatch: int = 0, prompt: int = 3, version: int = 0) -> ScoredGroup:
    request = GroupRequest(
        Prompt(str(row), "?", np.arange(prompt, dtype=np.int32) + 100 * row, "1"), 1, 0, minibatch, len(lengths), 7
    )
    total = sum(lengths)
    group = Group(
        request,
        version,
        np.arange(total, dtype=np.int32) + 1000 * row,
        -np.arange(total, dtype=np.float32),
        np.asarray(lengths, dtype=np.int32),
        np.ones(len(lengths), dtype=bool),
        ("",) * len(lengths),
    )
    rewards = np.arange(len(lengths), dtype=np.float64)
    return ScoredGroup(group, {"correctness": rewards, "format": rewards}, rewards, ("right",) * len(lengths))


def batch_of(*groups: ScoredGroup) -> Batch:
    return build_batch(groups, np.concatenate([group.total for group in groups]))


def test_rows_hold_prompt_then_response_and_their_own_logprobs() -> None:
    batch = batch_of(scored(1, [2, 1]), scored(2, [3], prompt=1, minibatch=1))
    assert batch.token_ids.tolist() == [100, 101, 102, 1000, 1001, 100, 101, 102, 1002, 200, 2000, 2001, 2002]
    assert batch.response_lengths.tolist() == [2, 1, 3]
    assert batch.groups.tolist() == [0, 0, 1]
    assert batch.minibatches.tolist() == [0, 0, 1]


def test_groups_of_other_weights_than_the_round_is_trained_on_are_refused() -> None:
    assert batch_of(scored(1, [1], version=0)).current
    for version in (1, -1):
        with pytest.raises(ValueError, match=f"weights version {version} .*trained on version 0"):
            batch_of(scored(1, [1], version=0), scored(2, [1], version=version))


def test_groups_may_be_behind_by_as_much_as_was_allowed_and_each_keeps_its_version() -> None:
    groups = [scored(1, [1], version=0), scored(2, [1, 2], version=-1), scored(3, [1], version=-2)]
    batch = build_batch(groups, np.zeros(4), max_lag=2)
    assert batch.weights_versions.tolist() == [0, -1, -1, -2]
    assert not batch.current
    with pytest.raises(ValueError, match="at most 1 behind"):
        build_batch(groups, np.zeros(4), max_lag=1)


def test_padding_points_at_the_positions_that_predict_the_response() -> None:
    batch = batch_of(scored(1, [2, 1]), scored(2, [3], prompt=1))
    padded = pad_rows(batch, np.array([2, 0]))
    assert padded.input_ids.tolist() == [[200, 2000, 2001, 2002, 0], [100, 101, 102, 1000, 1001]]
    assert padded.positions.tolist() == [0, 1, 2, 7, 8]
    assert padded.targets.tolist() == [2000, 2001, 2002, 1000, 1001]
    assert padded.response_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.sampler_logprobs[padded.flat].tolist() == [0, -1, -2, 0, -1]


def test_a_group_without_spread_has_no_signal_unless_kl_is_on() -> None:
    groups = [scored(1, [1, 1]), scored(2, [1, 1])]
    quiet = build_batch(groups, np.array([0.0, 0.0, 1.0, -1.0]))
    assert rows_with_signal(quiet).tolist() == [False, False, True, True]
    assert rows_with_signal(build_batch(groups, np.zeros(4), kl_coef=0.1)).all()


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), ranks=st.integers(1, 5), budget=st.integers(1, 200)
)
def test_every_row_is_trained_by_one_rank_in_one_microbatch(lengths: list[int], ranks: int, budget: int) -> None:
    sizes = np.array(lengths)
    rows = np.arange(len(lengths))
    plans = [plan_microbatches(rows, sizes, rank, ranks, budget) for rank in range(ranks)]
    assert sorted(np.concatenate([row for plan in plans for row in plan]).tolist()) == rows.tolist()
    assert len({len(plan) for plan in plans}) == 1, "ranks with fewer microbatches would leave the others waiting"
    for plan in plans:
        for micro in plan:
            assert len(micro) <= 1 or len(micro) * sizes[micro].max() <= budget
