"""The KL term that destroys what it should protect: a summed k1 beside samples that are sharper than what is scored."""

from __future__ import annotations

import math

from cluster.run.lessons import Evidence, Figure, Lesson, Outcome, Twin, figure, level, start_and_end

NEAR_UNIFORM = 0.9
"""Share of ln V above which the policy counts as noise."""
NOTHING_LEFT = 0.02
"""Held-out accuracy below which nothing is left."""
NEAR_START = 1.0
"""Nats by which entropy may differ from its start in the healthy twin."""


def collapsed(evidence: Evidence) -> Outcome:
    """Entropy above 0.9 ln V at the end, and held-out accuracy below 2 %."""
    rows, top = evidence.rows, math.log(evidence.vocabulary)
    entropy = level(rows, "policy/entropy", last=True)
    before, after = start_and_end(rows, "eval/correctness")
    shown = entropy > NEAR_UNIFORM * top and after < NOTHING_LEFT
    silent = _silent_since(evidence)
    gone = f" No response has been right since round {silent}: from there on KL is the only gradient." if silent else ""
    return Outcome(
        shown,
        f"Entropy ended at {entropy:.2f} nats per token; a policy that draws every token with equal probability has "
        f"ln {evidence.vocabulary} = {top:.2f}. Held-out accuracy went from {before:.1%} to {after:.1%}.{gone}",
        _figures(evidence),
    )


def stays(evidence: Evidence) -> Outcome:
    """Entropy within 1 nat of its start."""
    entropy = figure(evidence.rows, "policy/entropy", "entropy")
    before, after = start_and_end(evidence.rows, "eval/correctness")
    shown = abs(entropy.after - entropy.before) <= NEAR_START
    return Outcome(
        shown,
        f"Entropy was {entropy.before:.2f} nats per token in the first rounds and {entropy.after:.2f} in the last. "
        f"Held-out accuracy went from {before:.1%} to {after:.1%}.",
        _figures(evidence),
    )


def _silent_since(evidence: Evidence) -> int:
    """First round from which on no response was right; 0 when the last rounds had some."""
    since = 0
    for row in evidence.rows:
        if row.get("reward/correctness") is None:
            continue
        right = float(row["reward/correctness"]) > 0
        since = 0 if right else since or int(row["round"])
    return since


def _figures(evidence: Evidence) -> tuple[Figure, ...]:
    rows = evidence.rows
    return (
        Figure("held-out accuracy", *start_and_end(rows, "eval/correctness")),
        figure(rows, "reward/correctness", "training accuracy", 10),
        figure(rows, "policy/entropy", "entropy, nats per token"),
        figure(rows, "policy/kl", "KL term before its coefficient"),
        figure(rows, "group/zero_signal", "share of groups without signal", 10),
        figure(rows, "response/length", "response length, tokens", 10),
    )


LESSON = Lesson(
    name="kl-collapse",
    title="a KL term that flattens the policy into noise once rewards are gone",
    settings={
        "preset": "book-kl",
        "rollouts": 32,
        "group_size": 16,
        "minibatches": 1,
        "rounds": 130,
        "learner.lr": 2e-4,
        # The term is summed over a response: over 20 tokens here, over hundreds in the runs this is about.
        "kl.coef": 1.0,
        "rollout.engines": 1,
        "learner.ranks": 1,
        "eval.every": 65,
        "eval.size": 256,
    },
    failing=Twin(
        title="the preset book-kl: the summed k1 term, sampled at temperature 0.8 and top-p 0.9, scored at 1",
        settings={"kl.kind": "k1_book"},
        judge=collapsed,
        why="The gradient of k1, log policy - log reference, does not know the reference: it pushes the log-prob of "
        "every sampled token down, all by the same amount. Over samples of the policy itself that averages out to "
        "nothing. These samples come from a sharper policy (temperature 0.8, top-p 0.9), so likely tokens are pushed "
        "more often than they should be, and the policy is flattened. While rewards differ within groups they hold "
        "against it. Once a stretch of rounds has no right answer, every advantage is 0, KL is the only gradient, and "
        "Adam scales it up to full steps however small the coefficient is.",
        findings=("kl-takeover", "kl-runaway", "entropy-explosion"),
    ),
    healthy=Twin(
        title="the same with k3, whose gradient vanishes at the reference and points back to it",
        settings={"kl.kind": "k3"},
        judge=stays,
        why="The gradient of k3 is 1 - reference/policy: 0 where the two agree, and back towards the reference where "
        "they do not. Sampling is as unsound as before, but a round without rewards now pulls the policy back instead "
        "of flattening it.",
    ),
    look_at=(
        "policy/entropy: does it rise towards ln V?",
        "group/zero_signal and reward/correctness: from which round on is there no reward that differs in a group?",
        "policy/kl: it grows although the term is there to keep it small",
    ),
)
