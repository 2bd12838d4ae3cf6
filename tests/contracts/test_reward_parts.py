"""What holds for every part of the reward in rollout/rewards/, those that are added later included."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from rollout.config import RewardConfig
from rollout.rewards import built_in, part_weights
from rollout.types import Group
from tests.pure.graded_responses import SCORING, make_group

CONFIG = RewardConfig(overlong_buffer=16)  # every part that has to be asked for is in use
TEXTS = (
    "<think>it is 132</think>\\boxed{132}<eos>",
    "<think>it is 131</think>\\boxed{131}<eos>",
    "</think><think>132<eos>",
    "132<eos>",
    "<think>" + "and so on, " * 8,
    "<eos>",
)
FINISHED = (True, True, True, True, False, True)
RIGHT = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
ORDER = [3, 0, 5, 1, 4, 2]


def group_of(order: list[int]) -> Group:
    return make_group([TEXTS[k] for k in order], finished=[FINISHED[k] for k in order])


def values_of(name: str, order: list[int]) -> np.ndarray:
    return built_in()[name].score(group_of(order), RIGHT[order].copy(), SCORING, CONFIG)


@pytest.fixture(params=sorted(built_in()))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_there_are_parts() -> None:
    assert {"correctness", "format", "overlong"} <= built_in().keys()


def test_a_part_has_a_name_for_metrics_and_a_weight(name: str) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    weight = built_in()[name].weight(CONFIG)
    assert weight is not None, "not in use with CONFIG: switch it on there, so that it is tested here"
    assert np.isfinite(weight)
    assert part_weights(CONFIG, [name]) == {name: weight}


def test_every_response_gets_one_finite_number(name: str) -> None:
    values = values_of(name, sorted(ORDER))
    assert values.dtype == np.float64
    assert values.shape == (len(TEXTS),)
    assert np.isfinite(values).all()


def test_the_order_of_responses_changes_no_value(name: str) -> None:
    np.testing.assert_array_equal(values_of(name, ORDER), values_of(name, sorted(ORDER))[ORDER])


def test_the_same_group_gets_the_same_values_and_is_left_as_it_was(name: str) -> None:
    group, right = group_of(ORDER), RIGHT[ORDER].copy()
    before = replace(group, token_ids=group.token_ids.copy(), lengths=group.lengths.copy())
    first = built_in()[name].score(group, right, SCORING, CONFIG)
    np.testing.assert_array_equal(first, built_in()[name].score(group, right, SCORING, CONFIG))
    np.testing.assert_array_equal(right, RIGHT[ORDER])
    np.testing.assert_array_equal(group.token_ids, before.token_ids)
    np.testing.assert_array_equal(group.lengths, before.lengths)


def test_responses_are_told_apart(name: str) -> None:
    """A part that pays everybody the same teaches nothing; among these responses every part has its say."""
    assert np.ptp(values_of(name, ORDER)) > 0
