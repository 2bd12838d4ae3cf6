from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.evaluate import (
    Verdict,
    evaluate,
    evaluate_groups,
    independent_trials,
    majority,
    pass_at_k,
    wilson,
)
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup


def verdict(right, *, domain="d", formatted=None, lengths=None, finished=None, answers=()):
    right = np.array(right, dtype=bool)
    return Verdict(
        domain,
        right,
        np.array(formatted if formatted is not None else right, dtype=bool),
        np.array(lengths if lengths is not None else [5] * len(right), dtype=np.int32),
        np.array(finished if finished is not None else [True] * len(right), dtype=bool),
        answers,
    )


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(samples, data):
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    choices = list(itertools.combinations([i < right for i in range(samples)], k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at_k(10_000, 0, 5_000) == 0.0


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_what_has_no_meaning(samples, right, k):
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize(
    ("right", "answers", "expected"),
    [
        ([1, 1, 0], ["7", "7", "8"], 1.0),
        ([1, 0, 0], ["7", "8", "8"], 0.0),
        ([1, 0], ["7", "8"], 0.5),
        ([1, 0, 0, 0], ["7", "8", None, None], 0.5),
        ([0, 0], [None, None], 0.0),
        ([1, 1, 0, 0, 0], ["7", "7", "8", "8", "9"], 0.5),
        ([1, 1, 0, 0, 0], ["1/2", "0.5", "8", "9", "7"], 1.0),
    ],
)
def test_the_majority_votes_and_ties_are_drawn(right, answers, expected):
    assert majority(np.array(right, dtype=bool), answers) == expected


def test_wilsons_interval_has_its_published_values():
    """Of 10 trials none, half and all succeed: 95 % intervals as tabulated for Wilson's score method."""
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


@given(st.integers(0, 60), st.integers(1, 60))
def test_an_interval_holds_its_share_and_stays_within_0_and_1(right, n):
    share = min(right, n) / n
    low, high = wilson(share, n)
    assert 0.0 <= low <= share <= high <= 1.0


def test_samples_of_one_prompt_are_not_counted_as_independent():
    alike = np.array([0.0, 1.0] * 50)
    assert independent_trials(alike, 8) == pytest.approx(100)
    rng = np.random.default_rng(0)
    unlike = rng.binomial(8, 0.5, 400) / 8
    assert independent_trials(unlike, 8) == pytest.approx(3200, rel=0.15)
    assert independent_trials(np.zeros(7), 8) == 7


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        easy = rng.beta(2, 3, 60)
        means = rng.binomial(4, easy) / 4
        low, high = wilson(float(means.mean()), independent_trials(means, 4))
        hits += low <= 0.4 <= high
    assert 0.91 <= hits / 400 <= 0.99


def test_numbers_are_means_over_prompts():
    result = evaluate([verdict([1, 1, 1, 0], formatted=[1, 1, 0, 0]), verdict([0, 0, 0, 0])])
    assert (result.prompts, result.samples) == (2, 4)
    assert result.correctness == pytest.approx(3 / 8)
    assert result.format == pytest.approx(1 / 4)
    assert dict(result.pass_at) == pytest.approx({1: 3 / 8, 2: 1 / 2, 4: 1 / 2})
    assert result.maj_at is None
    assert result.low < 3 / 8 < result.high


def test_truncated_responses_count_with_their_full_length():
    """huggingface/trl#3476: lengths were taken from a mask that had been emptied."""
    result = evaluate([verdict([1, 1, 1, 0], lengths=[10, 20, 30, 64], finished=[1, 1, 1, 0])])
    assert (result.longest, result.truncated, result.length) == (64, 0.25, 31.0)
    assert result.metrics()["eval/truncated"] == 0.25


def test_metrics_have_the_contracts_names_and_leave_out_what_does_not_apply():
    one = evaluate([verdict([1]), verdict([0])]).metrics()
    assert one["eval/correctness"] == 0.5
    assert not [key for key in one if "pass@" in key or "maj@" in key]
    several = evaluate([verdict([1, 0, 0], answers=("7", "8", None)), verdict([0, 0, 0], answers=("1", "1", "2"))])
    row = several.metrics()
    assert row["eval/pass@k"] == row["eval/pass@3"] == 0.5
    assert row["eval/pass@1"] == pytest.approx(1 / 6)
    assert row["eval/maj@3"] == 0.25
    assert all(math.isfinite(value) for value in row.values())


def test_domains_have_their_own_numbers():
    result = evaluate([verdict([1], domain="sums"), verdict([0], domain="algebra"), verdict([1], domain="sums")])
    assert {name: part.correctness for name, part in result.domains.items()} == {"algebra": 0.0, "sums": 1.0}
    assert result.metrics()["eval/correctness/algebra"] == 0.0
    table = result.table().splitlines()
    assert [line.split()[0] for line in table] == ["domain", "algebra", "sums", "all"]
    assert "66.7%" in table[-1]
    assert evaluate([verdict([1])]).domains == {}


def scored(outcomes, texts, finished=None):
    g = len(outcomes)
    request = GroupRequest(Prompt("r", "q", np.zeros(1, np.int32), "7", "sums"), -1, 0, 0, g, 0)
    lengths, logprobs = np.full(g, 2, np.int32), np.zeros(2 * g, np.float32)
    group = Group(
        request, 0, np.zeros(2 * g, np.int32), logprobs, lengths, np.array(finished or [True] * g), tuple(texts)
    )
    right = np.array([outcome == "right" for outcome in outcomes], dtype=np.float64)
    parts = {"correctness": right, "format": np.array([1.0] + [0.0] * (g - 1))}
    return ScoredGroup(group, parts, right, tuple(outcomes))


def test_groups_with_a_grader_error_are_left_out_and_counted():
    groups = [scored(["right", "wrong"], ["a 7", "a 8"]), scored(["right", "error"], ["a 7", "?"])]
    result = evaluate_groups(groups, lambda text: text.split()[-1])
    assert (result.prompts, result.dropped) == (1, 1)
    assert (result.correctness, result.format, result.maj_at) == (0.5, 0.5, 0.5)
    assert result.metrics()["eval/dropped"] == 1
    assert result.table().endswith("1 prompts are left out: their grader failed.")


def test_a_response_that_was_cut_has_no_vote():
    groups = [scored(["right", "wrong", "wrong"], ["7", "8", "8"], finished=[True, True, False])]
    assert evaluate_groups(groups, str).maj_at == 0.5


def test_nothing_graded_is_no_evaluation():
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate_groups([scored(["error"], ["?"])])
