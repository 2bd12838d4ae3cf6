"""The reward that is collected without doing the work: format is paid whether the answer is right or not."""

from __future__ import annotations

import numpy as np

from cluster.run.lessons import Evidence, Figure, Lesson, Outcome, Twin, figure, start_and_end

SATURATED = 0.9
"""Share of well-formed held-out responses that counts as saturated."""
WEIGHT = 3.0
"""What format is worth beside a right answer."""
STALLED = 0.05
"""Held-out accuracy may rise by this much and still count as stalled."""


def hacked(evidence: Evidence) -> Outcome:
    """Format ends above 90 % of held-out responses while accuracy falls, or rises by 5 points at most."""
    right, form = _both(evidence)
    shown = form.after >= SATURATED and form.after > form.before and right.after <= right.before + STALLED
    return Outcome(
        shown,
        f"Of the held-out responses {form.before:.1%} were well formed before training and {form.after:.1%} after it, "
        f"while the share of right answers went from {right.before:.1%} to {right.after:.1%}.",
        _figures(evidence),
    )


def honest(evidence: Evidence) -> Outcome:
    """No response was paid for format without a right answer, and accuracy did not fall below its start."""
    right, form = _both(evidence)
    # Paid for format: what the reward has beyond correctness, in units of its weight; it must not exceed correctness.
    paid = (evidence.responses.total - evidence.responses.correctness) / WEIGHT > evidence.responses.correctness + 1e-9
    count = len(paid)
    shown = count > 0 and not paid.any() and right.after >= right.before
    return Outcome(
        shown,
        f"Of {count:,} responses {int(np.sum(paid)):,} were paid for format without a right answer. The share of right "
        f"held-out answers went from {right.before:.1%} to {right.after:.1%}, that of well-formed ones from "
        f"{form.before:.1%} to {form.after:.1%}.",
        _figures(evidence),
    )


def _both(evidence: Evidence) -> tuple[Figure, Figure]:
    right = Figure("held-out accuracy", *start_and_end(evidence.rows, "eval/correctness"))
    return right, Figure("held-out format", *start_and_end(evidence.rows, "eval/format"))


def _figures(evidence: Evidence) -> tuple[Figure, ...]:
    rows = evidence.rows
    return (
        *_both(evidence),
        figure(rows, "reward/correctness", "training accuracy"),
        figure(rows, "reward/format", "training format, paid or not"),
        figure(rows, "reward/total", "total reward, mean"),
        figure(rows, "group/zero_signal", "share of groups without signal"),
    )


LESSON = Lesson(
    name="format-hack",
    title="a format reward that is collected while the answers stay wrong",
    settings={
        "prompts": "arithmetic:carries",
        "rollouts": 256,
        "minibatches": 2,
        "rounds": 24,
        "reward.format_weight": WEIGHT,
        "rollout.max_new_tokens": 17,
        "eval.every": 8,
        "eval.size": 160,
    },
    failing=Twin(
        title="format is worth 3, a right answer 1, and format is paid whatever the answer is",
        settings={"reward.conditional_format": False},
        judge=hacked,
        why="A response may take 17 tokens here, and the honest scratchpad with its answer takes 21. A right answer "
        "without a scratchpad fits, tags around a scratchpad cut short fit, but hardly both. At the start about 1 "
        "response in 100 has the one and 1 in 100 the other. Most groups have no right answer: their rewards differ by "
        "format alone, and dividing by the standard deviation makes it as strong a push as correctness would be. "
        "Down-weighting does not change that: such a group has the very same advantages with --reward.format-weight "
        "0.1 as with 3. So the policy collects the tags, right answers are no longer found, all responses earn the "
        "same, and there is nothing left to learn from. The mean reward has risen all along.",
        findings=("format-hacked",),
    ),
    healthy=Twin(
        title="the same weight, but format is paid only where the answer is right",
        settings={"reward.conditional_format": True},
        judge=honest,
        why="Without a right answer there is nothing to collect, so no response can earn by form alone: in every "
        "response format <= correctness. Groups without a right answer teach nothing instead of the wrong thing, and "
        "the rare right response is the only one that is pushed up. Its format is paid then, and comes along.",
    ),
    look_at=(
        "reward/format and reward/correctness in one chart: do they part?",
        "reward/total: it rises in both twins and tells them apart in neither",
        "group/zero_signal: groups fall silent once all responses are alike",
    ),
)
