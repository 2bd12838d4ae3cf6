"""Partial metrics: merging, packing for the ranks, and what is absent."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.aggregate import Denominators
from learner.partials import MAXIMA, SUMS, finish_metrics, merge_partials, pack_partial, unpack_partial

# Whole numbers, so that adding them in another order gives the same sum.
partials = st.dictionaries(st.sampled_from(SUMS + MAXIMA), st.integers(-1000, 1000).map(float), max_size=8)


@given(st.lists(partials, max_size=5))
def test_merging_does_not_depend_on_order_or_grouping(several):
    flat = merge_partials(several)
    assert merge_partials(reversed(several)) == flat
    assert merge_partials([merge_partials(several[:2]), merge_partials(several[2:])]) == flat


@given(partials)
def test_packing_keeps_everything_and_fills_up_with_neutral_numbers(partial):
    restored = unpack_partial(*pack_partial(partial))
    assert set(restored) == set(SUMS + MAXIMA)
    for name, value in restored.items():
        assert value == partial.get(name, -math.inf if name in MAXIMA else 0.0)


def test_a_rank_without_work_changes_nothing():
    partial = {"loss": 1.5, "ratio": 3.0, "ratios": 2.0, "ratio_max": 2.5}
    empty = unpack_partial(*pack_partial({}))
    denominators = Denominators(responses=2, tokens=2)
    assert finish_metrics(merge_partials([partial, empty, {}]), denominators) == finish_metrics(partial, denominators)


def test_what_does_not_apply_is_absent():
    metrics = finish_metrics({"loss": 0.5}, Denominators(responses=1, tokens=3))
    assert metrics == {
        "policy/loss": 0.5,
        "policy/tokens": 3.0,
        "policy/clamped": 0.0,
        "policy/effective_tokens": 0.0,
    }


def test_means_are_over_what_was_looked_at():
    one, two = {"entropy": 3.0, "entropy_tokens": 2.0}, {"entropy": 1.0, "entropy_tokens": 6.0}
    metrics = finish_metrics(merge_partials([one, two]), Denominators(responses=1, tokens=100))
    assert metrics["policy/entropy"] == 0.5


def test_a_number_that_is_not_finite_stays_visible_in_either_order():
    for several in ([{"ratio_max": math.nan}, {"ratio_max": 1.0}], [{"ratio_max": 1.0}, {"ratio_max": math.nan}]):
        assert math.isnan(merge_partials(several)["ratio_max"])


def test_an_unknown_name_is_refused_instead_of_lost_between_ranks():
    with pytest.raises(ValueError, match="'surprise' is no part"):
        merge_partials([{"surprise": 1.0}])
