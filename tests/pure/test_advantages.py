"""Advantages: published numbers, exact zeros, and what they do not depend on."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import KINDS, compute_advantages, zero_signal


@pytest.mark.parametrize(
    ("kind", "size"),
    [("group", 0.8658754), ("no_std", 0.5), ("batch_std", 0.8658754), ("population_std", 0.5 / (0.5 + 1e-4))],
)
def test_two_right_and_two_wrong_give_the_published_numbers(kind, size):
    advantages = compute_advantages(kind, [1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0])
    assert advantages == pytest.approx([size, size, -size, -size], abs=5e-8)


def test_batch_std_divides_by_the_spread_of_raw_rewards_over_the_whole_batch():
    rewards = [1.0, 0.0, 5.0, 4.0]
    advantages = compute_advantages("batch_std", rewards, ["a", "a", "b", "b"])
    scale = statistics.stdev(rewards) + 1e-4
    assert advantages == pytest.approx([0.5 / scale, -0.5 / scale, 0.5 / scale, -0.5 / scale], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0.1, 0.7, 1.0, 1.1])
def test_a_group_without_spread_gets_exactly_zero(kind, dtype, value):
    rewards = np.array([value] * 7 + [0.0, 1.0, 0.3], dtype=dtype)
    groups = [0] * 7 + [1] * 3
    advantages = compute_advantages(kind, rewards, groups)
    assert (advantages[:7] == 0).all()
    assert (advantages[7:] != 0).any()
    assert zero_signal(kind, rewards, groups).tolist() == [True] * 7 + [False] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_gets_zero(kind):
    assert compute_advantages(kind, [3.0], [0]).tolist() == [0.0]
    assert compute_advantages(kind, [1.0, 0.0, 9.0], [0, 0, 1])[2] == 0.0


def test_the_std_takes_the_weight_of_the_format_reward_away_where_no_answer_is_right():
    wrong_answers = [[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    for weight in (0.1, 1.0):
        advantages = compute_advantages("group", wrong_answers, [0, 0, 0], [1.0, weight])
        assert advantages == pytest.approx([0.577, -1.154, 0.577], abs=2e-3)


def test_gdpo_and_no_std_keep_the_weight_of_the_format_reward():
    rewards = [[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    groups = [0, 0, 0, 1, 1, 1]
    for kind in ("gdpo", "no_std"):
        small = np.abs(compute_advantages(kind, rewards, groups, [1.0, 0.1])[:3]).max()
        large = np.abs(compute_advantages(kind, rewards, groups, [1.0, 1.0])[:3]).max()
        assert small < 0.25 * large


def test_gdpo_is_the_formula_in_both_its_forms():
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    groups, weights = [0, 0, 0, 1, 1, 1], [1.0, 0.1]
    first = [0.0] * 6
    for part, weight in enumerate(weights):
        for rows in (range(3), range(3, 6)):
            column = [rewards[i][part] for i in rows]
            for i in rows:
                scale = statistics.stdev(column) + 1e-4
                first[i] += weight * (rewards[i][part] - statistics.mean(column)) / scale
    batch = [(a - statistics.mean(first)) / (statistics.stdev(first) + 1e-4) for a in first]
    assert compute_advantages("gdpo", rewards, groups, weights) == pytest.approx(batch, abs=1e-12)
    by_group = []
    for own in (first[:3], first[3:]):
        by_group += [(a - statistics.mean(own)) / (statistics.stdev(own) + 1e-4) for a in own]
    assert compute_advantages("gdpo_group", rewards, groups, weights) == pytest.approx(by_group, abs=1e-12)


def test_parts_are_weighted_and_summed_before_anything_else_but_gdpo():
    parts = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    for kind in ("group", "no_std", "batch_std", "population_std"):
        together = compute_advantages(kind, parts, [0, 0, 0], [2.0, 0.5])
        assert together == pytest.approx(compute_advantages(kind, [2.0, 0.5, 2.5], [0, 0, 0]), abs=1e-15)


def test_signal_is_judged_by_the_reward_that_carries_the_advantage():
    traded = [[1.0, 0.0], [0.0, 1.0]]
    assert zero_signal("group", traded, [0, 0], [1.0, 1.0]).all()
    assert not zero_signal("gdpo", traded, [0, 0], [1.0, 1.0]).any()
    assert not zero_signal("group", traded, [0, 0], [1.0, 0.1]).any()
    assert zero_signal("gdpo", [[1.0, 0.0], [1.0, 1.0]], [0, 0], [1.0, 0.0]).all()


def test_torch_goes_in_and_comes_out_and_numpy_likewise():
    from_torch = compute_advantages("group", torch.tensor([1.0, 0.0]), torch.tensor([4, 4]))
    assert isinstance(from_torch, torch.Tensor)
    assert from_torch.dtype == torch.float64
    from_numpy = compute_advantages("group", np.array([1.0, 0.0], dtype=np.float32), np.array([4, 4]))
    assert isinstance(from_numpy, np.ndarray)
    assert from_numpy.dtype == np.float64
    assert from_torch.tolist() == from_numpy.tolist()


@pytest.mark.parametrize(
    ("kind", "rewards", "groups", "weights", "says"),
    [
        ("grup", [1.0], [0], None, "unknown"),
        ("group", [1.0, float("nan")], [0, 0], None, r"not finite in rows \[1\]"),
        ("group", [1.0, 2.0], [0], None, "2 responses"),
        ("group", [[1.0, 2.0]], [0], [1.0], "2 finite numbers"),
        ("group", [], [], None, "at least one response"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(kind, rewards, groups, weights, says):
    with pytest.raises(ValueError, match=says):
        compute_advantages(kind, rewards, groups, weights)


batches = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=20)


@given(batch=batches, kind=st.sampled_from(KINDS), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_the_order_of_responses_changes_no_advantage(batch, kind, seed):
    groups, rewards = np.array([g for g, _ in batch]), np.array([r for _, r in batch])
    order = np.random.default_rng(seed).permutation(len(batch))
    straight = compute_advantages(kind, rewards, groups)
    shuffled = compute_advantages(kind, rewards[order], groups[order])
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-12)


@given(batch=batches, scale=st.floats(0.5, 50), shift=st.floats(-5, 5))
@settings(max_examples=100, deadline=None)
def test_scaling_and_shifting_rewards_changes_advantages_only_through_epsilon(batch, scale, shift):
    groups, rewards = np.array([g for g, _ in batch]), np.array([r for _, r in batch])
    before = compute_advantages("group", rewards, groups)
    after = compute_advantages("group", scale * rewards + shift, groups)
    flat = zero_signal("group", rewards, groups)
    np.testing.assert_allclose(after[~flat], before[~flat], rtol=0.02, atol=1e-9)
    without = compute_advantages("no_std", scale * rewards + shift, groups)
    np.testing.assert_allclose(without, scale * compute_advantages("no_std", rewards, groups), atol=1e-9)


@given(batch=batches)
@settings(max_examples=50, deadline=None)
def test_group_advantages_have_mean_zero_and_the_std_just_below_one(batch):
    groups, rewards = np.array([g for g, _ in batch]), np.array([r for _, r in batch])
    advantages = compute_advantages("group", rewards, groups)
    for group in np.unique(groups):
        own = advantages[groups == group]
        assert abs(own.mean()) < 1e-12
        if np.ptp(rewards[groups == group]) > 0:
            assert 0.99 < own.std(ddof=1) < 1.0
