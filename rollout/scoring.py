"""From a group and what the graders found out to a scored group. Pure: no process, no clock, no file.

What takes time or can fail (math-verify, a user's function) has happened before, in cluster/scorer_pool.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from rollout.config import RewardConfig
from rollout.rewards import built_in, part_weights
from rollout.rewards.answers import AnswerMode, Settled, final_answer, gold_answer, settle
from rollout.row_checks import SCORED_BY
from rollout.tasks import source
from rollout.types import DoubleArray, Group, Prompt, ScoredGroup, UserError

ANSWER_MODE = "answer_mode"
"""Column of a row that says where its answer is looked for: auto, boxed or plain (default: auto)."""
RIGHT_FROM = 0.5
"""A user's own correctness from here on counts as right where a verdict is needed (eval, pass@k, format)."""
_MODES: tuple[AnswerMode, ...] = ("auto", "boxed", "plain")
_TOKENS_AFTER_THINK = 3  # a newline or two may follow <think> at the end of a prompt


@dataclass(frozen=True, slots=True)
class Scoring:
    """What the scorer must know about the tokenizer and the reward."""

    think: tuple[int, int] | None
    """Ids of <think> and </think>; None where the tokenizer has no such tokens (then no format is ever paid)."""
    max_new_tokens: int
    """The length limit of a response."""
    reward_function: str = ""
    """The user's own reward (--reward), if any."""

    def starts_thinking(self, prompt: Prompt) -> bool:
        """Whether the prompt ends in an opened thinking block, so that the response starts inside it."""
        if self.think is None:
            return False
        tail = prompt.token_ids[-_TOKENS_AFTER_THINK:].tolist()
        opened, closed = ([i for i, token in enumerate(tail) if token == tag] for tag in self.think)
        return bool(opened) and (not closed or closed[-1] < opened[-1])


@dataclass(frozen=True, slots=True)
class Graded:
    """What the graders found out about one group."""

    outcomes: tuple[str, ...]
    """G verdicts: right, wrong or error."""
    timeouts: int = 0
    """Responses that ran into, or would have run into, the deadline or the memory limit (each is wrong)."""
    parts: Mapping[str, DoubleArray] = field(default_factory=dict)
    """Parts that the user's own function gave, each (G,); a part called `correctness` replaces the built-in one."""


def answer_of(group: Group, k: int, scoring: Scoring) -> str | None:
    """The final answer of response k; None when it gives none, or was cut by the length limit."""
    if not group.finished[k]:
        return None
    prompt = group.request.prompt
    return final_answer(group.texts[k], answer_mode(prompt), scoring.starts_thinking(prompt))


def answer_mode(prompt: Prompt) -> AnswerMode:
    """Where this row's answer is looked for."""
    mode = prompt.columns.get(ANSWER_MODE, "auto")
    for known in _MODES:
        if mode == known:
            return known
    raise UserError(
        f"row {prompt.row_id}: the column {ANSWER_MODE!r} says {mode!r}.\n  Write one of: auto, boxed, plain."
    )


def own_scorer(prompt: Prompt) -> str:
    """`module:function` of a source that scores its rows itself (its rows say so in SCORED_BY); empty for others."""
    name = prompt.columns.get(SCORED_BY)
    return _score_function(name) if isinstance(name, str) else ""


@cache
def _score_function(name: str) -> str:
    return f"{source(name).rows.__module__}:score"


def settle_group(group: Group, scoring: Scoring) -> list[tuple[str | None, Settled]]:
    """(final answer, verdict) per response, as far as the fast stages decide."""
    gold = gold_answer(group.request.prompt.answer)
    answers = [answer_of(group, k, scoring) for k in range(len(group.texts))]
    return [(answer, settle(answer, gold)) for answer in answers]


def score_group(group: Group, graded: Graded, scoring: Scoring, config: RewardConfig) -> ScoredGroup:
    """All parts, their weights and conditions, and the total.

    Where the grader failed (`error`), correctness and total are NaN: the caller drops the group, and a caller that
    forgets to does not train on a zero.
    """
    outcomes = np.array(graded.outcomes)
    failed = outcomes == "error"
    right = np.where(failed, np.nan, (outcomes == "right").astype(np.float64))
    parts = dict(graded.parts)
    for name, reward in built_in().items():
        if name not in parts and reward.weight(config) is not None:
            parts[name] = reward.score(group, right, scoring, config)
    parts = {name: parts[name] for name in sorted(parts, key=_order)}
    weights = part_weights(config, parts)
    weighted = {name: weights[name] * value for name, value in parts.items()}
    if config.conditional_format:
        weighted["format"] = weighted["format"] * (right == 1.0)
    total = np.sum(list(weighted.values()), axis=0)
    total[failed] = np.nan
    return ScoredGroup(group, parts, total, graded.outcomes, graded.timeouts, weighted)


def _order(name: str) -> tuple[int, str]:
    known = ("correctness", "format", "overlong")
    return (known.index(name), "") if name in known else (len(known), name)
