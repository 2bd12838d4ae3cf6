"""Updates that are too large, with and without the clip that bounds what one round may change."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.run.lessons import Evidence, Figure, Lesson, Outcome, Row, Twin, figure, start_and_end

FELL_APART = 0.25
"""Share of the starting accuracy below which the policy has fallen apart."""
HELD = 0.75
"""Share of the starting accuracy that must be left for the policy to have held."""
UNBOUNDED = 1e6
"""Clip bounds that no ratio reaches."""


def falls_apart(evidence: Evidence) -> Outcome:
    """Held-out accuracy ends below a quarter of its start."""
    before, after = start_and_end(evidence.rows, "eval/correctness")
    return Outcome(
        after < FELL_APART * before,
        f"Held-out accuracy went from {before:.1%} to {after:.1%}: the policy has lost what it could do before "
        f"training. {_ratios(evidence.rows)}",
        _figures(evidence.rows),
    )


def holds(evidence: Evidence) -> Outcome:
    """At least three quarters of the starting accuracy are left at the end; usually it has grown."""
    before, after = start_and_end(evidence.rows, "eval/correctness")
    return Outcome(
        after >= HELD * before,
        f"Held-out accuracy went from {before:.1%} to {after:.1%}. {_ratios(evidence.rows)}",
        _figures(evidence.rows),
    )


def _ratios(rows: Sequence[Row]) -> str:
    largest = max((float(row["policy/ratio_max"]) for row in rows if "policy/ratio_max" in row), default=float("nan"))
    return f"The largest ratio of a token to its probability at the start of the round was {largest:,.0f}."


def _figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    return (
        Figure("held-out accuracy", *start_and_end(rows, "eval/correctness")),
        Figure("held-out format", *start_and_end(rows, "eval/format")),
        figure(rows, "reward/correctness", "training accuracy"),
        figure(rows, "policy/entropy", "entropy, nats per token"),
        figure(rows, "policy/ratio_max", "largest token ratio of a round"),
        figure(rows, "policy/clip_fraction_high", "share of tokens clipped from above"),
    )


LESSON = Lesson(
    name="clip",
    title="updates that are too large, without and with a clip",
    settings={
        "rollouts": 4096,
        "minibatches": 128,
        "rounds": 5,
        "learner.lr": 3.5e-4,
        "eval.every": 1,
        "eval.size": 512,
    },
    failing=Twin(
        title="the ratio is not clipped (bounds at a million), over 128 steps on the responses of one policy",
        settings={
            "learner.clip_low": UNBOUNDED,
            "learner.clip_high": UNBOUNDED,
            "learner.dual_clip": 2 * UNBOUNDED,
        },
        judge=falls_apart,
        why="The 128 steps of a round all learn from responses of one old policy. The loss is ratio x advantage: once "
        "a step has made a token likelier, the next step pushes it with a larger weight, and nothing ends that. So a "
        "round may carry the policy anywhere, far from where its responses say anything, and the next round samples "
        "from what is left.",
        findings=("ratio-explosion", "lr-too-high", "reward-collapse"),
    ),
    healthy=Twin(
        title="as many steps at the same learning rate, with the ratio clipped to 0.8 .. 1.28 and a dual clip of 3",
        settings={"learner.clip_low": 0.2, "learner.clip_high": 0.28, "learner.dual_clip": 3.0},
        judge=holds,
        why="A token that has moved out of 0.8 .. 1.28 in the direction of its advantage has no gradient for the rest "
        "of the round: further steps cannot push it further. There are as many steps as before at the same rate, "
        "but they add up to less: a round hardly leaves the neighbourhood in which its responses mean something. What "
        "moves against its advantage is not held by the clip: a token of a bad response that other tokens have made "
        "likelier weighs as much as its ratio. The dual clip bounds that at 3.",
    ),
    look_at=(
        "eval/correctness: the two runs part after a round or two",
        "policy/ratio_max: how far single tokens go within one round",
        "policy/clip_fraction_high and policy/clip_fraction_low: what share of tokens the clip holds back",
    ),
)
