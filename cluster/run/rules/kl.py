"""KL: the only gradient left, or running away from the reference."""

from __future__ import annotations

import numpy as np

from cluster.run.findings import Severity
from cluster.run.robust import Array, longest_runs
from cluster.run.rules import Sign, rule
from cluster.run.series import SPREAD_KEYS, RunView, Series, levels, onset, went

KL_KEYS = ("policy/kl", "policy/kl_loss")


def _kl_is_on(view: RunView) -> bool:
    return any(np.any(view.series(key).values != 0) for key in KL_KEYS)


def _before_and_after(column: Array, start: int, stop: int, least: int) -> tuple[float, float]:
    """Typical size of a metric before row `start` (or early in the stretch if it begins the run) and late in it."""
    inside = np.abs(column[start:stop])
    inside = inside[~np.isnan(inside)]
    outside = np.abs(column[:start])
    outside = outside[~np.isnan(outside)]
    if len(inside) < 2:
        return np.nan, np.nan
    before = outside if len(outside) >= least else inside[: max(1, len(inside) // 4)]
    return float(np.median(before)), float(np.median(inside[len(inside) // 2 :]))


@rule(
    "kl-takeover",
    needs=(KL_KEYS, SPREAD_KEYS),
    cause="No group has any reward spread, so every advantage is 0 and the KL term is the only gradient left; Adam "
    "rescales it to full steps however small its coefficient is. When the sampler is sharper than the scored policy "
    "(temperature below 1, top_p), a k1 term then flattens the policy towards uniform.",
    cure="(1) Go back to a checkpoint before this round. (2) --kl.kind none, or an estimator that pulls back: k3 or k2 "
    "instead of k1 or k1_book. (3) Sample as you score: --rollout.temperature 1 --rollout.top-p 1. (4) Keep signal in "
    "every round: more prompts per round (--rollouts), easier prompts, or --filter.dynamic-sampling.",
)
def kl_takeover(view: RunView) -> Sign | None:
    """A long stretch without reward spread while KL is on, and KL or entropy moving in it."""
    if not _kl_is_on(view):
        return None
    silent = view.silent == 1
    accuracy = view.column(view.accuracy.key)
    if len(view.accuracy):
        best = float(view.accuracy.values.max())
        # All responses right is no takeover: the task is solved (with one prompt per round, this prompt is).
        silent &= ~(accuracy > (max(0.02 * best, 0.01) if view.single else 0.9 * view.ceiling))
    least = 12 if view.single else 3
    if view.single and not len(view.accuracy):
        least = 20
    quiet: Sign | None = None
    for start, stop in longest_runs(silent):
        if stop - start < least:
            continue
        evidence, moving = _movement(view, start, stop)
        evidence |= _signal_evidence(view, start, stop)
        if moving:
            return Sign("critical", int(view.rounds[start]), evidence)
        if quiet is None and stop - start >= (25 if view.single else 5):
            quiet = Sign("warning", int(view.rounds[start]), evidence)
    return quiet


def _movement(view: RunView, start: int, stop: int) -> tuple[dict[str, str], bool]:
    """What KL and entropy did in a stretch without signal, and whether that is drift rather than noise."""
    factor, least = (3.0, 10) if view.single else (2.0, 2)
    evidence: dict[str, str] = {}
    moving = False
    for key in KL_KEYS:
        before, after = _before_and_after(view.column(key), start, stop, least)
        if not np.isnan(after):
            evidence[key] = f"{went(before, after)} (size)"
            moving |= after >= factor * max(before, 1e-6)
    before, after = _before_and_after(view.column("policy/entropy"), start, stop, least)
    if not np.isnan(after):
        evidence["policy/entropy"] = went(before, after)
        moving |= after >= (2.0 if view.single else 1.3) * before and after >= before + (0.5 if view.single else 0.1)
    return evidence, moving


def _signal_evidence(view: RunView, start: int, stop: int) -> dict[str, str]:
    evidence = {}
    for key in (*SPREAD_KEYS, view.accuracy.key):
        inside = view.column(key)[start:stop]
        if not np.isnan(inside).all():
            evidence[key] = (
                f"{np.nanmean(inside):.3g} on average in rounds {view.rounds[start]}-{view.rounds[stop - 1]}"
            )
    return evidence


@rule(
    "kl-runaway",
    needs=(KL_KEYS,),
    cause="The policy moves away from the reference faster than the KL term can hold it: the learning rate is high, or "
    "the estimator's gradient does not point back (k1 has none on average, a clamped one none when far away).",
    cure="(1) Lower --learner.lr. (2) --kl.kind k3_weighted (or k2 with one update per round) instead of k1. "
    "(3) Raise --kl.coef. (4) If the drift is wanted, --kl.ref-refresh-steps 400 or --kl.kind none.",
)
def kl_runaway(view: RunView) -> Sign | None:
    """KL many times its starting level and large in itself."""
    kl = view.series("policy/kl")
    if len(kl):
        found = _grown(view, Series(kl.key, kl.rounds, np.abs(kl.values)), factor=5.0, least=0.5)
        if found is not None:
            before, after, since = found
            severity: Severity = "critical" if after >= 2.0 and after >= 10 * before else "warning"
            return Sign(severity, since, {kl.key: f"{went(before, after)} nats per token"})
    term = view.series("policy/kl_loss")
    if len(term):  # its size depends on the coefficient: judged against its own start only
        found = _grown(view, Series(term.key, term.rounds, np.abs(term.values)), factor=20.0, least=0.05)
        if found is not None:
            before, after, since = found
            return Sign("critical" if after >= 1.0 else "warning", since, {term.key: f"{went(before, after)} (size)"})
    return None


def _grown(view: RunView, series: Series, factor: float, least: float) -> tuple[float, float, int] | None:
    before, medians, width = levels(view, series)
    limit = max(factor * before, least)
    high = np.flatnonzero(medians >= limit)
    if not len(high):
        return None
    since = onset(series, int(high[0]), width, limit)
    return before, float(medians.max()), since
