from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import RewardConfig
from rollout.rewards.custom import TIMED_OUT, Completion, RewardInput
from rollout.rewards.loading import load, read_signature, right_response_of, split_spec
from rollout.rewards.selftest import gold_problem, judge, payments, probe_group, probes, verify_gold
from rollout.scoring import Graded, score_group, settle_group
from rollout.types import UserError
from tests.pure.graded_responses import SCORING, make_prompt

GROUP = RewardInput(
    prompt="How much is it?",
    answer="132",
    row_id="row-7",
    domain="sums",
    columns={"answer": "132", "level": 3},
    responses=["<think>a</think>132", "<think>b</think>133", ""],
    token_ids=[[1, 2], [3], []],
    finished=[True, True, False],
)


def call(function, group: RewardInput = GROUP):
    return read_signature("mine.py:reward", function).score(group, deadline=1.0)


def test_a_function_of_one_response_is_called_for_each():
    def reward(response, answer):
        return float(response.endswith(answer))

    assert call(reward) == [{"correctness": 1.0}, {"correctness": 0.0}, {"correctness": 0.0}]


def test_a_function_gets_what_its_parameters_name():
    seen = []

    def reward(final_answer, prompt, row_id, domain, level, token_ids, finished, missing="default"):
        seen.append((final_answer, prompt, row_id, domain, level, token_ids, finished, missing))
        return 0

    call(reward)
    assert seen[0] == ("132", "How much is it?", "row-7", "sums", 3, [1, 2], True, "default")
    assert seen[2][0] is None


def test_a_function_of_a_group_returns_one_value_per_response():
    def reward(responses, answer, **row):
        assert row["level"] == 3
        return [float(answer in response) for response in responses]

    assert [parts["correctness"] for parts in call(reward)] == [1.0, 0.0, 0.0]


def test_named_parts_come_per_response_or_as_columns():
    assert call(lambda response: {"a": len(response), "b": True})[0] == {"a": 19.0, "b": 1.0}
    columns = call(lambda responses: {"a": [1, 2, 3], "b": np.zeros(3)})
    assert columns == [{"a": 1.0, "b": 0.0}, {"a": 2.0, "b": 0.0}, {"a": 3.0, "b": 0.0}]


def test_trls_signature_is_taken_unchanged():
    def reward(completions, answer, prompts, completion_ids, **columns):
        assert columns["level"] == [3, 3, 3]
        assert answer == ["132"] * 3
        assert prompts[0] == "How much is it?"
        assert completion_ids == [[1, 2], [3], []]
        return [1.0 if answer in completion else 0.0 for completion, answer in zip(completions, answer, strict=True)]

    assert [parts["correctness"] for parts in call(reward)] == [1.0, 0.0, 0.0]


def test_trl_functions_for_chats_find_their_message():
    def reward(completions, **columns):
        contents = [completion[0]["content"] for completion in completions]
        return [float(content.endswith("132")) for content in contents]

    assert [parts["correctness"] for parts in call(reward)] == [1.0, 0.0, 0.0]
    assert Completion("abc")[1] == "b"
    assert Completion("abc")[0:2] == "ab"
    assert Completion("")[-1]["content"] == ""
    assert Completion("abc")[0]["role"] == "assistant"


def test_async_functions_of_one_response_wait_together():
    running = []

    async def reward(response):
        running.append(response)
        await asyncio.sleep(0.05)
        assert len(running) == 3
        return 1.0

    assert call(reward) == [{"correctness": 1.0}] * 3


def test_an_async_call_that_hangs_costs_only_its_own_response():
    async def reward(response):
        await asyncio.sleep(60 if response == "" else 0)
        return 1.0

    results = read_signature("mine.py:reward", reward).score(GROUP, deadline=0.1)
    assert results == [{"correctness": 1.0}, {"correctness": 1.0}, TIMED_OUT]


def test_async_functions_of_a_group_work_as_well():
    async def reward(completions, **columns):
        return [0.5] * len(completions)

    assert call(reward) == [{"correctness": 0.5}] * 3


def test_scalars_of_numpy_count_as_numbers():
    assert call(lambda response: np.float32(0.5)) == [{"correctness": 0.5}] * 3
    assert call(lambda responses: np.ones(3)) == [{"correctness": 1.0}] * 3


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1.0", [1.0]])
def test_a_value_that_is_no_number_is_an_error_that_names_function_row_and_response(value):
    """RELIABILITY: None and NaN are errors, not zeros."""
    results = call(lambda response: value)
    assert all(isinstance(result, str) for result in results)
    assert "--reward mine.py:reward, row row-7, response 1: returned" in results[1]


def test_an_exception_is_the_error_of_its_response_only():
    """NVIDIA-NeMo/RL#431 and hkust-nlp/simpleRL-reason#95."""

    def reward(response):
        return 1 / len(response)

    results = call(reward)
    assert results[0] == {"correctness": 1 / 19}
    assert results[2].startswith("--reward mine.py:reward, row row-7, response 2: ZeroDivisionError: division by zero")
    assert "test_rewards.py:" in results[2]


def test_an_exception_of_a_group_function_is_the_error_of_all():
    results = call(lambda responses: [1 / 0])
    assert len(results) == 3
    assert all("ZeroDivisionError" in result for result in results)


@pytest.mark.parametrize("values", [[1.0], [1.0] * 8, []])
def test_a_list_of_the_wrong_length_is_never_repeated_or_cut(values):
    """huggingface/trl#6533: one value was broadcast to all completions."""
    for function in (lambda completions, **_: values, lambda responses: values, lambda responses: {"a": values}):
        with pytest.raises(UserError, match=f"mine.py:reward returned {len(values)} values for row row-7, expected 3"):
            call(function)


def test_a_group_function_that_returns_one_number_is_told_so():
    with pytest.raises(UserError, match="returned float for row row-7"):
        call(lambda responses: 1.0)


@pytest.mark.parametrize("name", ["format", "overlong", "", 3])
def test_part_names_that_are_taken_are_refused(name):
    with pytest.raises(UserError, match="named a part"):
        call(lambda response: {name: 1.0})


def test_a_parameter_nobody_can_fill_is_named_with_what_is_known():
    with pytest.raises(UserError, match=r"asks for solution, .*\n  Known for row row-7: answer, domain, .*level"):
        call(lambda response, solution: 1.0)


def test_a_function_whose_wish_cannot_be_told_is_refused_with_the_three_ways():
    with pytest.raises(UserError, match=r"def reward\(response, answer\)"):
        read_signature("mine.py:reward", lambda text, gold: 1.0)


def test_objects_with_a_call_are_functions_too():
    class Judge:
        async def __call__(self, response):
            return 0.25

    assert call(Judge()) == [{"correctness": 0.25}] * 3


def test_a_file_or_a_module_can_be_named(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 0.5\n")
    path = tmp_path / "mine.py"
    path.write_text("from beside import VALUE\n\ndef reward(response):\n    return VALUE\n")
    assert load(f"{path}:reward").score(GROUP) == [{"correctness": 0.5}] * 3
    assert split_spec("package.module:reward") == ("package.module", "reward")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py", "a function is missing"),
        ("mine.py:", "a function is missing"),
        ("nowhere/mine.py:reward", "there is no file"),
        ("no_such_module_of_ours:reward", "importing it failed: ModuleNotFoundError"),
    ],
)
def test_a_spec_that_names_nothing_is_a_message(spec, message):
    with pytest.raises(UserError, match=message):
        load(spec)


def test_a_file_that_does_not_import_and_a_missing_function_are_messages(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def other(response): return 1\n")
    with pytest.raises(UserError, match=r"has no function 'reward'.\n  It has: other"):
        load(f"{path}:reward")
    path.write_text("def (:")
    with pytest.raises(UserError, match="importing it failed: SyntaxError"):
        load(f"{path}:reward")


def test_a_module_may_say_what_a_right_response_looks_like(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def reward(response):\n    return 1.0\n")
    assert right_response_of(f"{path}:reward") is None
    path.write_text(path.read_text() + "\ndef right_response(answer, **row):\n    return f'= {answer}'\n")
    make = right_response_of(f"{path}:reward")
    assert make is not None
    assert make(answer="5", prompt="") == "= 5"


@pytest.mark.parametrize(
    "gold", ["42", r"\frac12", "(1, 2)", r"\{1,2\}", "yes", r"so \boxed{7}", "1 + 1\n#### 2", "x > 3", "9" * 5000]
)
def test_gold_answers_verify_against_themselves(gold):
    assert verify_gold(gold)


@given(st.text(alphabet=" 019axyZ.,:+*/()=<>-", max_size=12))
def test_golds_that_are_waved_through_as_plain_would_verify_the_long_way_too(gold):
    assert verify_gold(gold) == (gold_problem(gold) is None)


@pytest.mark.parametrize(
    ("gold", "problem"),
    [
        ("", "it is empty"),
        (r"\boxed{}", "it is empty"),
        (r"\boxed{5", "it is empty"),
        (r"\frac{1}{2", "not graded right"),
        ("1}{2", "not graded right"),
        ("\frac12", r"U\+000C; in an unraw string \\f"),
        ("\boxed{5}", r"U\+0008"),
        ("\text{no}", r"U\+0009; in an unraw string \\t"),
        ("#### ", "it is empty"),
        ("$$", "not graded right"),
    ],
)
def test_gold_answers_that_cannot_be_right_are_named_with_the_reason(gold, problem):
    """EleutherAI/lm-evaluation-harness#2212, huggingface/Math-Verify#35, huggingface/trl#2737."""
    with pytest.raises(AssertionError, match=problem):
        assert gold_problem(gold) is None, gold_problem(gold)


def paid(values, config=None, answer="132"):
    """The findings on a reward that pays `values(text)` for the text after the reasoning."""
    config = config or RewardConfig()
    made = probes(make_prompt(answer), SCORING)
    group = probe_group(make_prompt(answer), made)
    amounts = np.array([values(probe.text.rpartition("</think>")[2]) for probe in made], dtype=float)
    outcomes = tuple("error" if math.isnan(a) else "right" if a >= 0.5 else "wrong" for a in amounts)
    scored = score_group(group, Graded(outcomes, parts={"correctness": amounts}), SCORING, config)
    return {finding.id: finding for finding in judge(made, scored, config, "why it failed")}


def last_word(text: str) -> str:
    return text.rstrip(".}").rpartition("{")[2].rpartition(" ")[2].rpartition(">")[2]


def test_the_built_in_reward_stands_its_self_test():
    for answer in ("132", r"\frac{1}{2}", "yes", "(1, 2)", r"\{1, 2\}", "x > 3"):
        made = probes(make_prompt(answer), SCORING)
        group = probe_group(make_prompt(answer), made)
        outcomes = tuple("right" if verdict == "right" else "wrong" for _, verdict in settle_group(group, SCORING))
        scored = score_group(group, Graded(outcomes), SCORING, RewardConfig())
        assert judge(made, scored, RewardConfig()) == []
        kinds = {payment.probe.kind for payment in payments(made, scored) if payment.outcome == "right"}
        assert kinds == {"right", "right, no format"}


def test_a_reward_that_pays_empty_answers_is_found():
    found = paid(lambda text: 1.0 if text == "" or last_word(text) == "132" else 0.0)
    assert found["empty-paid"].severity == "critical"
    assert "row row-1" in found["empty-paid"].text


def test_a_little_for_nothing_is_a_warning_and_more_is_not():
    right = lambda text, other: 1.0 if last_word(text) == "132" else other  # noqa: E731
    assert paid(lambda text: right(text, 0.01))["empty-paid"].severity == "warning"
    assert paid(lambda text: right(text, 0.2))["empty-paid"].severity == "critical"


def test_a_reward_that_knows_no_right_answer_is_found():
    assert paid(lambda text: 0.0)["gold-not-paid"].severity == "critical"
    assert paid(lambda text: 1.0)["gold-not-paid"].severity == "critical"


def test_a_substring_match_is_found_by_the_answer_that_hedges():
    found = paid(lambda text: float("132" in text))
    assert found["hedge-paid"].severity == "warning"


def test_a_reward_for_length_is_found_by_the_huge_answer():
    assert paid(lambda text: len(text) / 1e6)["huge-paid"].severity == "critical"


def test_partial_credit_for_wrong_answers_is_said():
    found = paid(lambda text: 1.0 if last_word(text) == "132" else 0.3 if text else 0.0)
    assert found["wrong-paid"].severity == "warning"


def test_format_that_wins_over_a_right_answer_is_found():
    right_without_format_only = lambda text: 0.0  # noqa: E731
    assert paid(right_without_format_only, RewardConfig(format_weight=1.0))["format-wins"].severity == "critical"
    rival = paid(lambda text: float(last_word(text) == "132"), RewardConfig(format_weight=1.0))
    assert rival["format-rivals"].severity == "warning"
    strict = RewardConfig(format_weight=1.0, conditional_format=True)
    assert paid(lambda text: float(last_word(text) == "132"), strict) == {}


def test_a_reward_that_fails_says_why():
    found = paid(lambda text: math.nan)
    assert found["reward-failed"].severity == "critical"
    assert "why it failed" in found["reward-failed"].text


def test_rows_without_a_gold_answer_are_tried_with_the_rest():
    made = probes(make_prompt(""), SCORING)
    assert {probe.kind for probe in made} == {"wrong", "empty", "format only", "huge"}
    assert paid(lambda text: 1.0, answer="")["empty-paid"].severity == "critical"
    assert paid(lambda text: float(bool(text)), answer="") == {}


def test_probes_carry_the_think_ids_where_the_tokenizer_has_them():
    with_tags = probe_group(make_prompt(), probes(make_prompt(), SCORING))
    scored = score_group(with_tags, Graded(("wrong",) * len(with_tags.texts)), SCORING, RewardConfig())
    assert scored.parts["format"][0] == 1
    without = dataclasses.replace(SCORING, think=None)
    assert not any("<think>" in probe.text for probe in probes(make_prompt(), without))


def python_blocks() -> list[str]:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_the_examples_of_the_page_on_rewards_run(number, tmp_path):
    path = tmp_path / f"example_{number}.py"
    path.write_text(python_blocks()[number])
    results = load(f"{path}:reward").score(GROUP, deadline=5.0)
    assert len(results) == 3
    assert all(isinstance(parts, dict) and "correctness" in parts for parts in results)


def test_the_page_on_rewards_has_an_example_of_every_style():
    assert len(python_blocks()) == 5
