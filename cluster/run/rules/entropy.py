"""Entropy: rising towards noise, or gone."""

from __future__ import annotations

import math

import numpy as np

from cluster.run.findings import Severity
from cluster.run.rules import Sign, rule
from cluster.run.series import RunView, levels, number, onset, went


@rule(
    "entropy-explosion",
    needs=(("policy/entropy",),),
    cause="The policy is turning into noise: pushing down the log-probability of bad responses spreads it over the "
    "whole vocabulary and nothing bounds that push. Sampling sharper than one scores (temperature below 1, top_p) and "
    "a k1 term both feed it.",
    cure="(1) Sample as you score: --rollout.temperature 1 --rollout.top-p 1. (2) Bound the update: --learner.loss ppo "
    "with --learner.clip-low 0.2 --learner.clip-high 0.28 and --learner.dual-clip 3. (3) Lower --learner.lr and resume "
    "from before this round. (4) --kl.kind k3 (not k1) with --kl.coef 0.001.",
)
def entropy_explosion(view: RunView) -> Sign | None:
    """Entropy lasts at several times the lowest level it had, and nats above it."""
    entropy = view.series("policy/entropy")
    _, medians, width = levels(view, entropy)
    if not len(medians):
        return None
    lowest = np.maximum(np.minimum.accumulate(medians), 0.02)
    steps: tuple[tuple[float, float, Severity], ...] = (
        (3.0, 1.5, "critical"),
        (2.5, 1.0 if view.single else 0.7, "warning"),
    )
    for factor, rise, severity in steps:
        limit = np.maximum(factor * lowest, lowest + rise)
        high = np.flatnonzero(medians >= limit)
        if not len(high):
            continue
        at = int(high[0])
        since = onset(entropy, at, width, limit[at])
        top = float(medians[at:].max())
        seen = f"{went(float(lowest[at]), top)} nats per token"
        if view.limits.vocabulary:
            seen += f" (ln V = {number(math.log(view.limits.vocabulary))})"
        return Sign(severity, since, {entropy.key: seen})
    return None


@rule(
    "entropy-collapse",
    needs=(("policy/entropy",),),
    cause="The policy has become certain before it was right: responses to a prompt are all alike, groups lose their "
    "spread and there is nothing left to learn from.",
    cure="(1) Raise --learner.clip-high (0.28 or more) so that unlikely tokens may grow. (2) --rollout.temperature 1, "
    "no lower. (3) Lower --learner.lr and resume from before this round. (4) More varied prompts, larger --group-size.",
)
def entropy_collapse(view: RunView) -> Sign | None:
    """Entropy lasts below a tenth of its start while the task is not solved."""
    entropy = view.series("policy/entropy")
    before, medians, width = levels(view, entropy)
    if not len(medians):
        return None
    limit = min(0.1 * before, 0.1)
    low = np.flatnonzero(medians <= limit)
    if not len(low):
        return None
    at = int(low[0])
    since = onset(entropy, at, width, limit)
    evidence = {entropy.key: f"{went(before, float(medians[at:].min()))} nats per token"}
    late = view.accuracy.values[-2 * width :]
    if len(late):
        accuracy = float(late.mean())
        first = int(view.rounds[0])
        old, _ = view.mean_near(view.accuracy, max(first, since - 2 * width), since)
        # Certain because it is right, or on the way there: that is what training is for.
        if accuracy >= 0.85 or accuracy - old >= 0.15:
            return None
        evidence[view.accuracy.key] = f"{number(accuracy)} in the last rounds"
        quiet = view.silent[-2 * width :]
        if accuracy < 0.5 and not np.isnan(quiet).all() and np.nanmean(quiet) >= 0.9:
            return Sign("critical", since, evidence)
    return Sign("warning", since, evidence)
