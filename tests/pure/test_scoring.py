from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import RewardConfig
from rollout.rewards import built_in, part_weights
from rollout.rewards.format import score as format_score
from rollout.rewards.overlong import score as overlong_score
from rollout.scoring import Graded, answer_mode, own_scorer, score_group, settle_group
from rollout.types import UserError
from tests.pure.graded_responses import CLOSE, OPEN, SCORING, make_group, make_prompt

RIGHT, WRONG = "<think>a</think>132<eos>", "<think>a</think>133<eos>"


def formats(*texts: str, exactly_one: bool = False, prompt_ids=(20, 21), finished=None) -> list[float]:
    group = make_group(texts, prompt=make_prompt(ids=prompt_ids), finished=finished)
    config = RewardConfig(one_think_pair=exactly_one)
    return list(format_score(group, np.zeros(len(texts)), SCORING, config))


def scored(texts, outcomes, config=None, **graded):
    return score_group(make_group(texts), Graded(tuple(outcomes), **graded), SCORING, config or RewardConfig())


def test_format_asks_for_the_first_opening_before_the_first_closing():
    texts = ["<think>a</think>b", "</think><think></think>", "<think>a", "a</think>b", "ab", ""]
    assert formats(*texts) == [1, 0, 0, 0, 0, 0]
    assert formats("<think>a</think><think>b</think>c", "<think><think>a</think>") == [1, 1]


def test_exactly_one_pair_is_an_option():
    texts = [
        "<think>a</think>b",
        "<think>a</think><think>b</think>c",
        "<think><think>a</think>",
        "<think>a</think></think>",
    ]
    assert formats(*texts, exactly_one=True) == [1, 0, 0, 0]


def test_a_prompt_that_ends_in_an_opened_block_counts_as_its_opening():
    """huggingface/trl#6966 and huggingface/open-r1#560: the template puts <think> into the prompt."""
    texts = ["r</think><answer>4</answer>", "r", "r<think>s</think>"]
    assert formats(*texts, prompt_ids=(20, OPEN)) == [1, 0, 1]
    assert formats(*texts, prompt_ids=(20, OPEN, 30), exactly_one=True) == [1, 0, 0]


def test_tags_further_back_in_the_prompt_do_not_count():
    assert formats("r</think>4", prompt_ids=(OPEN, 30, 31, 32, 33)) == [0]
    assert formats("r</think>4", prompt_ids=(20, OPEN, CLOSE)) == [0]


def test_a_cut_response_has_no_format_and_no_answer():
    group = make_group([RIGHT, RIGHT], finished=[True, False])
    assert formats(RIGHT, RIGHT, finished=[True, False]) == [1, 0]
    assert settle_group(group, SCORING) == [("132", "right"), (None, "wrong")]


def test_tags_spelled_in_ordinary_tokens_are_no_format():
    group = make_group(["<think>a</think>132"], ids=[[40, 41, 42, 43]])
    assert format_score(group, np.zeros(1), SCORING, RewardConfig()).tolist() == [0]


def test_a_tokenizer_without_the_tags_never_pays_format():
    without = dataclasses.replace(SCORING, think=None)
    assert format_score(make_group([RIGHT]), np.zeros(1), without, RewardConfig()).tolist() == [0]


@pytest.mark.parametrize(
    ("length", "punishment"), [(1, 0.0), (48, 0.0), (49, -1 / 16), (56, -0.5), (64, -1.0), (70, -1.0)]
)
def test_soft_overlong_punishment_is_dapos(length, punishment):
    group = make_group(["x"], ids=[[9] * length])
    values = overlong_score(group, np.zeros(1), SCORING, RewardConfig(overlong_buffer=16))
    assert values.tolist() == pytest.approx([punishment])


def test_the_total_is_correctness_and_weighted_format():
    result = scored([RIGHT, WRONG, "133<eos>"], ["right", "wrong", "wrong"])
    assert list(result.parts) == ["correctness", "format"]
    assert result.parts["format"].tolist() == [1, 1, 0]
    assert result.total.tolist() == pytest.approx([1.1, 0.1, 0.0])


def test_conditional_format_is_paid_only_where_the_answer_is_right():
    result = scored([RIGHT, WRONG], ["right", "wrong"], RewardConfig(format_weight=1.0, conditional_format=True))
    assert result.parts["format"].tolist() == [1, 1]
    assert result.weighted["format"].tolist() == [1, 0]
    assert result.total.tolist() == [2, 0]


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([RIGHT, "132", "<think>"])), min_size=1, max_size=6),
    st.floats(0, 2),
    st.booleans(),
    st.integers(0, 32),
)
def test_weighted_parts_sum_to_the_total_and_conditional_format_never_exceeds_correctness(rows, weight, strict, buffer):
    config = RewardConfig(format_weight=weight, conditional_format=strict, overlong_buffer=buffer)
    result = scored([text for _, text in rows], ["right" if right else "wrong" for right, _ in rows], config)
    assert np.allclose(sum(result.weighted.values()), result.total)
    assert list(result.weighted) == list(result.parts)
    assert ("overlong" in result.parts) == (buffer > 0)
    if strict:
        assert np.all(result.weighted["format"] <= weight * result.parts["correctness"])


def test_own_parts_have_the_custom_weight_and_own_correctness_replaces_the_built_in_one():
    config = RewardConfig(custom_weight=0.5)
    parts = {"correctness": np.array([0.7, 0.2]), "brevity": np.array([-1.0, 2.0])}
    result = scored([RIGHT, WRONG], ["right", "wrong"], config, parts=parts)
    assert list(result.parts) == ["correctness", "format", "brevity"]
    assert result.total.tolist() == pytest.approx([0.7 + 0.1 - 0.5, 0.2 + 0.1 + 1.0])
    assert part_weights(config, result.parts) == {"correctness": 1.0, "format": 0.1, "brevity": 0.5}


def test_a_failed_grader_leaves_nan_so_that_nothing_trains_on_a_zero():
    """NVIDIA-NeMo/RL#431: a fault of the verifier is no reward of 0."""
    result = scored([RIGHT, WRONG], ["right", "error"])
    assert result.errors == 1
    assert np.isnan(result.total[1])
    assert np.isnan(result.parts["correctness"][1])
    assert result.total[0] == pytest.approx(1.1)


def test_every_file_of_a_reward_is_found():
    assert list(built_in()) == ["correctness", "format", "overlong"]


def test_a_row_may_say_where_its_answer_stands():
    assert answer_mode(make_prompt(columns={"answer_mode": "plain"})) == "plain"
    assert answer_mode(make_prompt()) == "auto"
    with pytest.raises(UserError, match=r"row row-1: .* 'box'"):
        answer_mode(make_prompt(columns={"answer_mode": "box"}))


def test_rows_that_their_source_scores_are_sent_to_it():
    assert own_scorer(make_prompt()) == ""
    assert own_scorer(make_prompt(columns={"scored_by": "arithmetic"})) == "rollout.tasks.arithmetic:score"
    with pytest.raises(UserError):  # a data set cannot name code of its own
        own_scorer(make_prompt(columns={"scored_by": "os:system"}))


def test_lengths_and_the_cut_share_come_from_the_lengths_themselves():
    """huggingface/trl#3476: a cut response keeps its length."""
    group = make_group(["a" * 10, "b" * 20, "c" * 30, "d" * 64], finished=[True, True, True, False])
    assert int(group.lengths.max()) == 64
    assert 1 - group.finished.mean() == 0.25
