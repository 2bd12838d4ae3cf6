from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.rewards.answers import final_answer, gold_answer, grade, settle
from rollout.rewards.answers.notation import canonical, key
from rollout.rewards.answers.symbolic import refusal

DATA = Path(__file__).parents[1] / "data" / "grading"
PAIRS = [json.loads(line) for line in (DATA / "pairs.jsonl").read_text().splitlines()]
MORE = [json.loads(line) for line in (DATA / "more_pairs.jsonl").read_text().splitlines()]
HANGING = r"\int_0^{\infty} \frac{\sin(x^3)\ln(x+1)^2}{x^7+\sqrt{x}+1} dx"
TOWER = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)}-4\right)}-5}{16}"
# Code that would leave a file behind if anything ever evaluated it.
CANARIES = (
    "__import__('os').system('touch {path}')",
    "open('{path}','w').close()",
    r"\text{{__import__('os').system('touch {path}')}}",
    "eval(\"open('{path}','w')\")",
    "exec(\"import os; os.mknod('{path}')\")",
    "5; import os; os.system('touch {path}')",
    "(lambda: open('{path}','w'))()",
    r"\operatorname{{open('{path}','w')}}(5)",
    "S.__class__.__mro__[1].__subclasses__()",
)


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['source']}:{pair['input']['gold'][:30]}")
def test_reported_pairs_get_the_verdict_that_is_right(pair):
    verdict = grade(pair["input"]["answer"], pair["input"]["gold"])
    assert (verdict == "right") == pair["expected"], pair["symptom"]


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in MORE}))
def test_pairs_of_every_kind_get_the_verdict_that_is_right(kind):
    pairs = [pair for pair in MORE if pair["kind"] == kind]
    assert pairs
    wrong = [pair for pair in pairs if (grade(boxed(pair["answer"]), pair["gold"]) == "right") != pair["right"]]
    assert not wrong


def test_every_gold_answer_is_right_for_itself():
    golds = {pair["gold"] for pair in MORE} | {pair["input"]["gold"] for pair in PAIRS}
    assert [gold for gold in golds if grade(boxed(gold), gold) != "right"] == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>\boxed{1}</think>so \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{1} then \boxed{}", None),
        (r"\boxed{42", None),
        (r"\boxed{}", None),
        (r"\boxed{\frac{1}{2}}<|im_end|>", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x = \boxed{5}}", r"x = \boxed{5}"),
        (r"\boxed {5}", "5"),
        ("<think>7+5=12</think>132<eos>", "132"),
        ("132<eos><pad><pad>", "132"),
        ("<think>7+5=12", None),
        (r"<think>it is \boxed{132}", None),
        ("<think>a</think>", None),
        ("<think>a</think> \n <eos>", None),
        ("<think>a</think>b</think>132", "132"),
        (r"<think>a</think>or not <think>\boxed{5}", None),
        (r"\boxed5", None),
        (r"<think>\boxed{6}</think>no idea, \boxed", None),
        ("r</think><answer>4</answer>", "4"),
        ("r</think><answer></answer>", None),
        ("6 + 7 apples\n#### 13", "13"),
        ("", None),
    ],
)
def test_the_final_answer_is_taken_from_one_slot(text, answer):
    assert final_answer(text) == answer


def test_a_prompt_that_opened_the_thinking_block_leaves_no_answer_before_it_is_closed():
    assert final_answer("it is 132", thinking=True) is None
    assert final_answer("it is</think>132", thinking=True) == "132"


def test_plain_and_boxed_tasks_take_only_their_own_slot():
    assert final_answer("the answer is 5", "boxed") is None
    assert final_answer(r"see \boxed{5} above: 6", "plain") == r"see \boxed{5} above: 6"
    assert grade("132", "132", mode="plain") == "right"


@pytest.mark.parametrize("text", ["the sum is 132?", "132?", "132 132", "=132", "132!", "<think>1</think>is 132"])
def test_malformed_answers_of_the_demo_are_wrong(text):
    assert grade(f"{text}<eos>", "132") == "wrong"


def test_gold_columns_may_hold_a_box_or_a_whole_solution():
    assert gold_answer(r"so it is \boxed{72}") == "72"
    assert gold_answer("48/2 = 24\n#### 72") == "72"
    assert gold_answer(r"and so there are \boxed 72.") == "72"


@pytest.mark.parametrize("canary", CANARIES)
@pytest.mark.parametrize("gold", ["5", r"\sum_{k=1}^3 k", r"\gcd(4,6)"])
def test_code_in_an_answer_does_nothing(canary, gold, tmp_path):
    path = tmp_path / "canary"
    code = canary.format(path=path)
    assert grade(boxed(code), gold) == "wrong"
    assert grade(code, gold, mode="plain") == "wrong"
    assert grade(boxed("5"), code) == "wrong"
    assert not path.exists()


@pytest.mark.parametrize(
    "answer",
    [
        TOWER,
        "9^{9^{9^{9}}}",
        "9**9**9",
        "((9^{999})^{999})^{999}",
        r"(10^7)!",
        "1000000!",
        "3!!!!",
        r"\binom{10^9}{10^8}",
        r"2^{10^{100}}",
        r"\gcd(2^{99999}, 3)",
        r"\sum_{k=1}^{10^{9}} k^{10^{9}}",
        "9" * 100_000,
        "{" * 5000 + "1" + "}" * 5000,
        "(" * 5000,
        r"\frac{1}{" * 300 + "1" + "}" * 300,
        "\\sqrt" * 400 + "2",
        "-" * 900 + "1",
        "1+" * 450 + "1",
        "a" * 200_000,
        "x^" * 300,
    ],
)
def test_answers_that_ask_for_too_much_are_wrong_at_once(answer):
    began = time.monotonic()
    assert grade(boxed(answer), "7") == "wrong"
    assert time.monotonic() - began < 2.0


def test_towers_are_refused_before_math_verify_sees_them():
    assert refusal(canonical(TOWER))
    assert settle(TOWER, "7") == "refused"
    assert settle(r"\gcd(4, 6)", "7") == "needs math-verify"


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 30_000, "}" * 200_000, " " * 200_000 + "5", "<" * 200_000, "</think>" * 30_000, "\n####" * 40_000],
    ids=["boxes", "braces", "spaces", "tags", "thoughts", "marks"],
)
def test_long_responses_are_searched_in_linear_time(text):
    began = time.monotonic()
    grade(text, "7")
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("unit", ["1", "12", "½", "'", "`", "]1,2[", "$1", r"{1\choose 2}", "1 million "])
def test_repetitive_answers_up_to_the_longest_that_is_read_take_no_time(unit):
    began = time.monotonic()
    for tail in ("", r"\ldots", "x", "'"):
        settle("0." + (unit * 1000)[:980] + tail, "x^2")
    assert time.monotonic() - began < 2.0


def test_math_verify_is_stopped_at_the_deadline_in_this_thread():
    began = time.monotonic()
    assert grade(boxed(HANGING), "7", deadline=0.3) == "wrong"
    assert time.monotonic() - began < 4.0


def test_a_thread_that_is_not_the_main_one_grades_as_well():
    verdicts = []

    def work():
        verdicts.append(grade(boxed(r"\gcd(4, 6)"), "2"))
        verdicts.append(grade(boxed(r"\gcd(4, 6)"), "3"))
        verdicts.append(grade(boxed(HANGING), "7", deadline=0.2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert verdicts == ["right", "wrong", "wrong"]


NUMBERS = st.fractions(max_denominator=10**6)


@given(NUMBERS, NUMBERS)
def test_fractions_are_equal_exactly_when_their_values_are(a, b):
    text = f"\\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert (grade(boxed(text), f"{b.numerator}/{b.denominator}") == "right") == (a == b)


@given(st.integers(min_value=-(10**40), max_value=10**40), st.sampled_from([-1, 1, 10**20]))
def test_integers_of_any_size_are_compared_digit_by_digit(n, difference):
    assert grade(boxed(f"{n:,}"), str(n)) == "right"
    assert grade(boxed(str(n + difference)), str(n)) == "wrong"


@given(st.lists(st.integers(-99, 99), min_size=1, max_size=8, unique=True), st.randoms())
def test_sets_do_not_depend_on_their_order_and_tuples_do(items, random):
    mixed = items[:]
    random.shuffle(mixed)
    as_text = [", ".join(map(str, each)) for each in (items, mixed)]
    assert grade(boxed(f"\\{{{as_text[1]}\\}}"), f"\\{{{as_text[0]}\\}}") == "right"
    assert (grade(boxed(f"({as_text[1]})"), f"({as_text[0]})") == "right") == (items == mixed)


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet=st.sampled_from(list(r"\{}()[]^_+-*/=<>|,.;:!%$&~ 0123456789abxyeiπ√½²° ")), max_size=120))
def test_any_text_gets_a_verdict_from_the_fast_stages(text):
    for gold in ("5", r"\frac{1}{2}", "x^2+1", r"\{1,2\}", "(1,2)", "[0,1)", "x>3", "y=2x+1", text):
        assert settle(text, gold) in ("right", "wrong", "refused", "needs math-verify")


@given(st.text(max_size=60))
def test_spelling_an_answer_canonically_twice_changes_nothing_more(text):
    once = canonical(text)
    assert key(canonical(once)) == key(once) or "\\" in text


def test_reward_doctor_finds_no_exploit_that_is_paid():
    doctor = pytest.importorskip("reward_doctor", reason="reward-doctor is a test dependency (pip install '.[test]')")

    def reward(completion: str, reference: str) -> float:
        return float(grade(completion, reference) == "right")

    audit = doctor.audit(reward)
    assert len(audit.outcomes) > 80
    assert [outcome.case.id for outcome in audit.exploits_accepted] == []
    assert [outcome.case.id for outcome in audit.false_positives] == []
    assert audit.errors == []
    in_a_box = doctor.audit(lambda completion, reference: reward(boxed(completion), reference))
    assert [outcome.case.id for outcome in in_a_box.false_positives] == []
