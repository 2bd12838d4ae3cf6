"""Updates: clipping, ratios, gradients."""

from __future__ import annotations

import numpy as np

from cluster.run.robust import Array, rolling_median
from cluster.run.rules import Sign, rule
from cluster.run.series import RunView, Series, levels, number, onset, went

CLIP_KEYS = ("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/clip_fraction_dual")


@rule(
    "clip-saturation",
    needs=(CLIP_KEYS,),
    cause="A large share of the update is cut off by the clip range, so the gradient comes from the few tokens that "
    "have not moved yet: the policy changes too much within a round.",
    cure="(1) Lower --learner.lr. (2) Fewer steps per round: smaller --minibatches or --learner.inner-updates 1. "
    "(3) Widen --learner.clip-high a little if accuracy rises steadily. (4) Check mismatch/mean: a wrong anchor of the "
    "ratio looks the same (--learner.old-logprobs recompute).",
)
def clip_saturation(view: RunView) -> Sign | None:
    """The clipped share stays above a quarter."""
    columns = [view.column(key) for key in CLIP_KEYS if view.has(key)]
    total = np.nansum(columns, axis=0)
    known = ~np.isnan(np.stack(columns)).all(axis=0)
    clipped = Series("clipped", view.rounds[known], total[known])
    width = 10 if view.single else 3
    if len(clipped) < width:
        return None
    medians = rolling_median(clipped.values, width)
    high = np.flatnonzero(medians >= 0.25)
    if not len(high):
        return None
    since = onset(clipped, int(high[0]), width, 0.25)
    late = clipped.rounds[int(high[0])]
    evidence = {}
    for key in CLIP_KEYS:
        share = view.series(key)
        lately = share.values[share.rounds >= late]
        if len(lately):
            evidence[key] = f"{number(float(np.median(lately)))} since then"
    return Sign("warning", since, evidence)


@rule(
    "ratio-explosion",
    needs=(("policy/ratio_mean", "policy/ratio_max"),),
    cause="The policy after an update gives responses many times the probability they were sampled with: steps are too "
    "large, or old log-probs are not those of the policy that sampled (another temperature, other weights). Unbounded "
    "ratios of bad responses can destroy the policy in one step.",
    cure="(1) --learner.loss ppo with --learner.dual-clip 3, or the book loss, which bound both signs. (2) Lower "
    "--learner.lr or --minibatches. (3) --learner.ratio-level token or sequence_mean: a product over a long response "
    "explodes by itself. (4) Check mismatch/mean and sample as you score.",
)
def ratio_explosion(view: RunView) -> Sign | None:
    """Mean or largest ratio lasts far from 1."""
    critical: Sign | None = None
    warning: Sign | None = None
    for key, warn, stop in (("policy/ratio_mean", 3.0, 8.0), ("policy/ratio_max", 100.0, 1e4)):
        ratios = view.series(key)
        before, medians, width = levels(view, ratios)
        if not len(medians):
            continue
        for limit in (stop, warn):
            high = np.flatnonzero(medians >= max(limit, 1.5 * before if key.endswith("max") else limit))
            if not len(high):
                continue
            since = onset(ratios, int(high[0]), width, limit)
            evidence = {key: went(before, float(medians.max()))}
            if limit == stop:
                critical = critical or Sign("critical", since, evidence)
            else:
                warning = warning or Sign("warning", since, evidence)
            break
    return critical or warning


def _live_norms(view: RunView) -> Series:
    """Gradient norms of rounds that had a gradient: rounds without signal have norm 0 and are no baseline."""
    norms = view.series("policy/grad_norm")
    live = norms.values > 1e-12
    return Series(norms.key, norms.rounds[live], norms.values[live])


@rule(
    "grad-spike",
    needs=(("policy/grad_norm", "policy/skipped_steps"),),
    cause="Single steps have a gradient many times the usual: one odd response (very long, very unlikely tokens) or a "
    "ratio that blew up. One such step can undo many; a non-finite one was skipped.",
    cure="(1) Keep --learner.grad-clip 1. (2) Bound the ratio: --learner.dual-clip 3. (3) Lower --learner.lr, or raise "
    "--learner.warmup-steps if it happens early. (4) See that round's groups in launch.py report.",
)
def grad_spike(view: RunView) -> Sign | None:
    """Non-finite or skipped steps, or norms far above those just before that do not stay there."""
    broken = ~np.isfinite(view.raw("policy/grad_norm")) & ~np.isnan(view.raw("policy/grad_norm"))
    for key in ("policy/grad_norm", "policy/loss"):  # JSON's NaN is a value, an absent key is not
        broken |= np.array([isinstance(row.get(key), float) and row[key] != row[key] for row in view.rows], dtype=bool)
    skipped = np.nan_to_num(view.column("policy/skipped_steps")) > 0
    if broken.any() or skipped.any():
        at = int(np.flatnonzero(broken | skipped)[0])
        evidence = {}
        if broken.any():
            evidence["policy/grad_norm"] = f"not finite in {int(broken.sum())} rounds"
        if skipped.any():
            evidence["policy/skipped_steps"] = f"{np.nansum(view.column('policy/skipped_steps')):.0f} in all"
        return Sign("critical" if broken.sum() + skipped.sum() >= 3 else "warning", int(view.rounds[at]), evidence)
    return _spikes(_live_norms(view))


def _spikes(norms: Series) -> Sign | None:
    before = 20
    count = len(norms)
    if count < 8:
        return None
    logs = np.log(norms.values)
    usable = np.arange(count) >= 6
    base = np.full(count, np.nan)  # the usual norm of the 20 rounds before, of at least 6
    for at in range(6, min(before, count)):
        base[at] = np.median(logs[:at])
    if count > before:
        base[before:] = rolling_median(logs, before)[:-1]
    spread = max(0.15, 1.4826 * float(np.median(np.abs(np.diff(logs)))) / np.sqrt(2))
    height = logs - base
    high = usable & (height >= np.log(10)) & (height >= 5 * spread)
    peaks = [at for at in np.flatnonzero(high) if _comes_back(logs, base, int(at))]
    if not peaks:
        return None
    worst = max(peaks, key=lambda at: height[at])
    times = "once" if len(peaks) == 1 else f"{len(peaks)} times"
    seen = f"{went(float(np.exp(base[worst])), float(norms.values[worst]))} in round {norms.rounds[worst]}; {times}"
    return Sign("warning", int(norms.rounds[peaks[0]]), {norms.key: seen})


def _comes_back(logs: Array, base: Array, at: int) -> bool:
    after = logs[at + 1 : at + 6]
    return not len(after) or float(np.median(after)) <= base[at] + np.log(4)


@rule(
    "grad-growth",
    needs=(("policy/grad_norm", "policy/loss"),),
    cause="The gradient (or the loss) has grown to many times its starting size and stays there: something other than "
    "the reward drives the update, most often a KL term far from the reference, unbounded ratios, or a policy that is "
    "turning into noise.",
    cure="(1) See which of kl-takeover, kl-runaway, ratio-explosion or entropy-explosion is named too, and treat that. "
    "(2) Lower --learner.lr and resume from before this round. (3) Keep --learner.grad-clip 1 and set "
    "--learner.dual-clip 3.",
)
def grad_growth(view: RunView) -> Sign | None:
    """The usual gradient norm is five times what it was, or the usual loss twenty times."""
    norms = _live_norms(view)
    found = _growth(view, norms, 5.0, 0.0)
    if found is None and not len(norms):
        loss = np.abs(view.column("policy/loss") + np.nan_to_num(view.column("policy/kl_loss")))
        live = loss > 0
        norms = Series("policy/loss", view.rounds[live], loss[live])
        found = _growth(view, norms, 20.0, 2.0)
    if found is None:
        return None
    before, after, since = found
    seen = went(before, after) + (" (size, KL term included)" if norms.key == "policy/loss" else "")
    return Sign("critical" if after >= 30 * before else "warning", since, {norms.key: seen})


def _growth(view: RunView, sizes: Series, factor: float, least: float) -> tuple[float, float, int] | None:
    before, medians, width = levels(view, sizes)
    if not len(medians):
        return None
    wide = min(len(medians), 5)  # sustained: the rolling median itself must stay up
    lasting = np.array([medians[at : at + wide].min() for at in range(len(medians) - wide + 1)])
    limit = max(factor * before, least)
    high = np.flatnonzero(lasting >= limit)
    if not len(high):
        return None
    return before, float(lasting.max()), onset(sizes, int(high[0]), width, limit)
