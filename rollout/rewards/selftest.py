r"""Tries a reward out before anything is trained with it: what would it pay for a right answer, for a wrong one, for
none, for format without an answer, for a huge one?

Pure: it makes the probes and judges what was paid. cluster/reward_check.py has them scored, by `launch.py check-reward`
and at the start of every run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from rollout.config import RewardConfig
from rollout.rewards.answers import final_answer, gold_answer, grade, settle
from rollout.scoring import Scoring
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup

Severity = Literal["info", "warning", "critical"]

HUGE_CHARACTERS = 200_000
HARD_ANSWER = r"\sum_{k=1}^{9999} k!"
"""An answer that math-verify does not come to an end with."""
NEXT_TO_NOTHING = 0.05
"""Share of what a right answer gets that may be paid for nothing without stopping the run (some scorers give 0.01)."""
_PLAIN = re.compile(r"[ -]?[0-9A-Za-z][0-9A-Za-z .,:+*/()=<>-]*")
"""Answers that stay what they are through every stage, however they are spelled: most of a large data set."""
_RENDERINGS = (r"\boxed{%s}", "%s", "<answer>%s</answer>", "#### %s", "The answer is %s.")
_OTHER_ANSWERS = ("7919", r"x^{17}+3", "none of these")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_LOST = {"\x07": "a", "\x08": "b", "\t": "t", "\x0b": "v", "\x0c": "f", "\r": "r"}


@dataclass(frozen=True, slots=True)
class RewardFinding:
    """One thing that is wrong with a reward."""

    id: str
    """reward-failed, gold-not-paid, empty-paid, wrong-paid, hedge-paid, huge-paid, format-wins, format-rivals, slow."""
    severity: Severity
    """critical: training with it would teach the wrong thing."""
    text: str
    """What was paid for what, and what to do."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One response whose worth is known."""

    kind: Literal["right", "right, no format", "hedged", "wrong", "empty", "format only", "huge", "hard"]
    """What it stands for."""
    text: str
    """The response."""
    token_ids: tuple[int, ...]
    """Ids that have the think tags where the text has them."""


def gold_problem(gold: str) -> str | None:
    """Why a gold answer does not verify against itself, or None when it does."""
    if match := _CONTROL.search(gold):
        sign = match[0]
        hint = f"; in an unraw string \\{_LOST[sign]} became one character: write \\\\" if sign in _LOST else ""
        return f"it contains the control character U+{ord(sign):04X}{hint}"
    answer = gold_answer(gold)
    if not answer:
        return "it is empty, or its box is empty or never closed"
    given = final_answer(_boxed(answer))
    if given is None or settle(given, answer) != "right":
        return "it is not graded right when it is given as the answer (its braces do not balance?)"
    return None


@lru_cache(maxsize=2**20)
def verify_gold(gold: str) -> bool:
    """Whether a gold answer is graded right when it is given as the answer; remembered, as a run asks twice."""
    return _PLAIN.fullmatch(gold) is not None or gold_problem(gold) is None


def probes(prompt: Prompt, scoring: Scoring, right_response: str | None = None, hard: bool = False) -> list[Probe]:
    """The responses to try on one row; `right_response`: how a right one looks, if the user's module says so."""
    gold = gold_answer(prompt.answer)
    made: list[Probe] = []

    def add(kind: str, text: str, formatted: bool = True) -> None:
        made.append(_probe(kind, text, formatted, prompt, scoring))

    if right_response is not None:
        add("right", right_response, formatted="</think>" not in right_response)
    elif gold:
        for rendering in _RENDERINGS:
            add("right", rendering % gold)
        for rendering in _RENDERINGS:
            add("right, no format", rendering % gold, formatted=False)
        add("hedged", f"It could be {_another(gold)}, or 0, or {gold}, or something else.")
    for rendering in _RENDERINGS:
        add("wrong", rendering % _another(gold))
    add("empty", "", formatted=False)
    add("format only", "")
    add("huge", _boxed("9" * HUGE_CHARACTERS))
    if hard:
        add("hard", _boxed(HARD_ANSWER))
    return made


def _another(gold: str) -> str:
    if re.fullmatch(r"-?\d{1,15}", gold):
        return str(int(gold) + 1)
    return next(other for other in _OTHER_ANSWERS if grade(_boxed(other), gold) == "wrong")


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _probe(kind: str, text: str, formatted: bool, prompt: Prompt, scoring: Scoring) -> Probe:
    opening, closing = scoring.think or (0, 1)
    other = max(opening, closing) + 1
    ids = [other]
    if formatted and scoring.think is not None:
        inside = scoring.starts_thinking(prompt)
        text = ("" if inside else "<think>") + "I check the answer.</think>" + text
        ids = [*([] if inside else [opening]), other, closing, other]
    return Probe(kind, text, tuple(ids))  # type: ignore[arg-type]


def probe_group(prompt: Prompt, made: Sequence[Probe]) -> Group:
    """The probes as the responses of one group."""
    ids = [token for probe in made for token in probe.token_ids]
    return Group(
        request=GroupRequest(prompt, round=-2, occurrence=0, minibatch=0, group_size=len(made), seed=0),
        weights_version=0,
        token_ids=np.array(ids, dtype=np.int32),
        sampler_logprobs=np.zeros(len(ids), dtype=np.float32),
        lengths=np.array([len(probe.token_ids) for probe in made], dtype=np.int32),
        finished=np.ones(len(made), dtype=np.bool_),
        texts=tuple(probe.text for probe in made),
    )


@dataclass(frozen=True, slots=True)
class Payment:
    """What one probe got."""

    probe: Probe
    total: float
    """With format."""
    answer: float
    """Without the format part."""
    outcome: str


def payments(made: Sequence[Probe], scored: ScoredGroup) -> list[Payment]:
    """What each probe got."""
    answer = scored.total - scored.weighted["format"]
    return [
        Payment(probe, float(scored.total[k]), float(answer[k]), scored.outcomes[k]) for k, probe in enumerate(made)
    ]


def judge(
    made: Sequence[Probe], scored: ScoredGroup, config: RewardConfig, last_error: str = ""
) -> list[RewardFinding]:
    """What is wrong with a reward that paid this."""
    row = scored.group.request.prompt.row_id
    paid = payments(made, scored)
    failed = [payment for payment in paid if payment.outcome == "error"]
    if failed:
        text = f"row {row}: the reward failed on {len(failed)} of {len(paid)} responses. {last_error}"
        return [RewardFinding("reward-failed", "critical", text)]
    best = max((p for p in paid if p.probe.kind == "right"), key=lambda p: p.answer, default=None)
    found = [*_about_nothing(paid, best, row), *_about_format(paid, best, row, config)]
    if best is not None:
        found += _about_answers(paid, best, row)
    if scored.timeouts > sum(p.probe.kind in ("huge", "hard") for p in paid):
        text = f"row {row}: {scored.timeouts} of the probes ran into --reward.deadline {config.deadline:g} s."
        found.append(RewardFinding("slow", "warning", text))
    return found


def _most(paid: Sequence[Payment], kind: str) -> Payment:
    return max((payment for payment in paid if payment.probe.kind == kind), key=lambda payment: payment.answer)


def _about_nothing(paid: Sequence[Payment], best: Payment | None, row: str) -> list[RewardFinding]:
    empty = max(_most(paid, "empty").answer, _most(paid, "format only").answer)
    if empty <= 0:
        return []
    against = f"; a right one gets {best.answer:g}" if best is not None else ""
    small = best is not None and empty <= NEXT_TO_NOTHING * best.answer
    text = f"row {row}: an empty answer is paid {empty:g}{against}. A policy finds that: pay nothing for no answer."
    return [RewardFinding("empty-paid", "warning" if small else "critical", text)]


def _about_answers(paid: Sequence[Payment], best: Payment, row: str) -> list[RewardFinding]:
    found = []
    wrong, huge = _most(paid, "wrong"), _most(paid, "huge")
    nothing = max(_most(paid, "empty").answer, _most(paid, "format only").answer)
    if best.answer <= max(nothing, wrong.answer):
        text = (
            f"row {row}: the gold answer {_short(best.probe.text)} is paid {best.answer:g}, a wrong one "
            f"{wrong.answer:g}, none {nothing:g}. Nothing can be learned from that. If right answers look different "
            f"for your reward, define right_response(**row) -> str beside it."
        )
        found.append(RewardFinding("gold-not-paid", "critical", text))
    elif wrong.answer > 0:
        text = f"row {row}: a wrong answer is paid {wrong.answer:g} of {best.answer:g}; is partial credit meant?"
        found.append(RewardFinding("wrong-paid", "warning", text))
    hedged = max((p.answer for p in paid if p.probe.kind == "hedged"), default=0.0)
    if hedged > max(nothing, wrong.answer):
        text = (
            f"row {row}: naming the right answer among others is paid {hedged:g} of {best.answer:g}. Grade one "
            f"explicit final answer (the parameter `final_answer`), not the whole text."
        )
        found.append(RewardFinding("hedge-paid", "warning", text))
    if huge.answer >= best.answer and huge.answer > max(nothing, wrong.answer):
        text = f"row {row}: an answer of {HUGE_CHARACTERS:,} digits is paid {huge.answer:g}, as much as the right one."
        found.append(RewardFinding("huge-paid", "critical", text))
    return found


def _about_format(paid: Sequence[Payment], best: Payment | None, row: str, config: RewardConfig) -> list[RewardFinding]:
    only = _most(paid, "format only")
    if best is None or only.total - only.answer <= 0:
        return []
    bare = max((p.total for p in paid if p.probe.kind == "right, no format"), default=None)
    cure = "--reward.conditional-format pays format only where the answer is right."
    if only.total >= best.total:
        text = f"row {row}: format without an answer is paid {only.total:g}, a right answer {best.total:g}. {cure}"
        return [RewardFinding("format-wins", "critical", text)]
    if bare is not None and only.total >= bare:
        text = (
            f"row {row}: format alone is paid {only.total:g}, a right answer without it {bare:g} "
            f"(--reward.format-weight {config.format_weight:g}): where answers are hard, it is what is learned. {cure}"
        )
        return [RewardFinding("format-rivals", "warning", text)]
    return []


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def table(made: Sequence[Probe], scored: ScoredGroup) -> str:
    """What would be paid, one line per kind of answer (the best paid of its kind)."""
    lines = []
    for kind in dict.fromkeys(probe.kind for probe in made):
        k = max((k for k, probe in enumerate(made) if probe.kind == kind), key=lambda k: np.nan_to_num(scored.total[k]))
        parts = ", ".join(f"{name} {values[k]:g}" for name, values in scored.weighted.items())
        lines.append(f"{kind:<17} {scored.total[k]:8.4g}   {parts}   {_short(made[k].text)}")
    return "\n".join(lines)
