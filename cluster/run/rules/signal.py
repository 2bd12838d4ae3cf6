"""Learning signal: too few groups with any spread, or a loss that looks dead and is not."""

from __future__ import annotations

import math

import numpy as np

from cluster.run.findings import Severity
from cluster.run.robust import Array, rolling_mean, rolling_median
from cluster.run.rules import Sign, rule
from cluster.run.series import SPREAD_KEYS, RunView, Series, number


@rule(
    "no-signal",
    needs=(("group/zero_signal", "advantage/std"),),
    cause="In almost all groups every response has the same reward, so their advantages are 0 and the round teaches "
    "nothing: the prompts are far too hard (all wrong) or far too easy (all right).",
    cure="(1) If accuracy is low: easier prompts, or a larger --group-size so that some response succeeds. (2) If it "
    "is high: harder prompts. (3) --filter.dynamic-sampling refills a round with groups that have spread. (4) Check "
    "the reward with launch.py check-reward.",
)
def no_signal(view: RunView) -> Sign | None:
    """A share of groups without spread that stays too high for what the task explains."""
    shares = view.series("group/zero_signal")
    if not len(shares) and view.single:
        silent = view.silent
        known = ~np.isnan(silent)
        shares = Series("advantage/std", view.rounds[known], silent[known])
    if not len(shares):
        return None
    found = _often_silent(shares.values) if view.single else _mostly_silent(shares.values)
    if found is None:
        return None
    at, width, share = found
    first, last = int(shares.rounds[at]), int(shares.rounds[at + width - 1])
    evidence = {shares.key: f"{number(share)} of groups without spread in rounds {first}-{last}"}
    accuracy, _ = view.mean_near(view.accuracy, first, last)
    if not math.isnan(accuracy):
        evidence[view.accuracy.key] = number(accuracy)
        if accuracy >= 0.9 * view.ceiling:
            return Sign(
                "info",
                first,
                evidence,
                cause="Nearly all responses are right: the task is solved and there is little left to learn from it.",
                cure="(1) Stop here. (2) Harder prompts. (3) --filter.dynamic-sampling to train on what is left.",
            )
    severity: Severity = "critical" if not view.single and share >= 0.97 and not math.isnan(accuracy) else "warning"
    return Sign(severity, first, evidence)


def _mostly_silent(shares: Array) -> tuple[int, int, float] | None:
    """First three rounds in a row with a median share of at least 0.8."""
    width = 3
    if len(shares) < width:
        return None
    medians = rolling_median(shares, width)
    high = np.flatnonzero(medians >= 0.8)
    if not len(high):
        return None
    at = int(high[0])
    rest = medians[at:]
    return at, width, float(np.median(rest[rest >= 0.8]))


def _often_silent(flags: Array) -> tuple[int, int, float] | None:
    """With one prompt per round: a stretch whose share is surely (lower bound at 3 sigma) above three quarters."""
    count = len(flags)
    for width in (50, 30, 15):
        if count < width or (width == 15 and count >= 30):
            continue
        z = 3.0 if width >= 30 else 2.2
        shares = rolling_mean(flags, width)
        spread = z * np.sqrt(np.maximum(0, shares * (1 - shares)) / width + z * z / (4 * width * width))
        lower = (shares + z * z / (2 * width) - spread) / (1 + z * z / width)
        high = np.flatnonzero(lower >= 0.75)
        if len(high):
            return int(high[0]), width, float(shares[high[0]])
    return None


@rule(
    "loss-zero-by-construction",
    needs=(("policy/loss",), ("policy/grad_norm", *SPREAD_KEYS)),
    cause="The loss prints 0 although the policy learns: with ratio 1 (one step per round) it is minus the mean of "
    "advantages that sum to 0 in every group. Its gradient is not 0.",
    cure="(1) Nothing is wrong: watch accuracy, policy/grad_norm and policy/clip_fraction_high instead of the loss.",
)
def loss_zero(view: RunView) -> Sign | None:
    """Loss at 0 in nearly all rounds that do have reward spread or a gradient."""
    loss, norm = view.column("policy/loss"), view.column("policy/grad_norm")
    alive = ~np.isnan(loss) & ((view.silent == 0) | (norm > 1e-8)) & ~(view.silent == 1)
    if alive.sum() < 2 or float(np.mean(np.abs(loss[alive]) <= 1e-4)) < 0.8:
        return None
    evidence = {"policy/loss": f"at most {number(float(np.median(np.abs(loss[alive]))))} in size in most rounds"}
    if not np.isnan(norm[alive]).all():
        evidence["policy/grad_norm"] = f"{number(float(np.nanmedian(norm[alive])))} at the same time"
    return Sign("info", int(view.rounds[int(np.flatnonzero(alive)[0])]), evidence)
