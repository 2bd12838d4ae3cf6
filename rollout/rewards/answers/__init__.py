r"""Compares a response's final answer with the gold answer: right or wrong, by value, in stages.

1. the same text in one spelling (`notation`), 2. exact numbers and functions evaluated to 60 digits, part by part
(`readings`, `matching`, `scalars`, `forms`, `expression`, `identity`): fast, bounded, in any thread. What those stages
cannot read goes to 3. math-verify (`symbolic`), in training inside a process that can be killed.

The model's text is never evaluated as code. Policies: decimals stand for values that are no decimals from 10
significant digits (0.333333 is not 1/3); a unit only one side writes is ignored, two different units are two different
answers; 50% is 0.5, and also 50; a length-cut response is not graded here, it has no answer.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from rollout.rewards.answers import scalars
from rollout.rewards.answers.extract import AnswerMode, final_answer, gold_answer
from rollout.rewards.answers.matching import compare
from rollout.rewards.answers.notation import LONGEST, canonical, key
from rollout.rewards.answers.symbolic import ask_within, refusal

Verdict = Literal["right", "wrong"]
Settled = Literal["right", "wrong", "refused", "needs math-verify"]

_INTEGER = re.compile(r"-?\d{1,18}")


@lru_cache(maxsize=65536)
def settle(answer: str | None, gold: str) -> Settled:
    """Stages 1 and 2 on an extracted answer: right, wrong, or that math-verify has to be asked. Pure, milliseconds.

    `refused`: what only math-verify could read asks for numbers too large to compute; it is wrong and never evaluated.
    """
    if not answer or not gold:
        return "wrong"
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return "right" if int(answer) == int(gold) else "wrong"
    if len(answer) > LONGEST or len(gold) > LONGEST:
        return "right" if "".join(answer.split()) == "".join(gold.split()) else "wrong"
    gold_text, answer_text = canonical(gold), canonical(answer)
    if not key(gold_text) or not key(answer_text):
        return "wrong"
    if key(gold_text) == key(answer_text):
        return "right"
    opinion = compare(gold_text, answer_text, scalars.compare)
    if opinion != "unsure":
        return opinion
    return "refused" if refusal(gold_text) or refusal(answer_text) else "needs math-verify"


def grade(
    answer_text: str, gold: str, mode: AnswerMode = "auto", thinking: bool = False, deadline: float = 5.0
) -> Verdict:
    r"""Whether one response text gives the gold answer; in process, in any thread.

    The answer is the last balanced `\boxed{}` after `</think>`, or without a box the text after it (`extract`).
    `deadline`: seconds math-verify may take when it has to be asked; then the answer is wrong.
    """
    gold = gold_answer(gold)
    answer = final_answer(answer_text, mode, thinking)
    verdict = settle(answer, gold)
    if verdict == "needs math-verify":
        return ask_within(answer or "", gold, deadline)
    return "right" if verdict == "right" else "wrong"


__all__ = ["AnswerMode", "Settled", "Verdict", "final_answer", "gold_answer", "grade", "settle"]
