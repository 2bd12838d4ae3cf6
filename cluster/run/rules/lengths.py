"""Response lengths: exploding, collapsing, all cut off."""

from __future__ import annotations

import numpy as np

from cluster.run.robust import rolling_mean
from cluster.run.rules import Sign, rule
from cluster.run.series import RunView, Series, levels, number, onset, went


def _accuracy_change(view: RunView, since: int) -> tuple[float, float, float]:
    """Accuracy before a round and lately, and the standard error of the difference; NaN where unknown."""
    last = int(view.rounds[-1])
    span = max(2, (last - since + 1) // 2)
    before, error_before = view.mean_near(view.accuracy, int(view.rounds[0]), max(int(view.rounds[0]), since - 1))
    after, error_after = view.mean_near(view.accuracy, last - span + 1, last)
    return before, after, float(np.hypot(error_before, error_after))


@rule(
    "length-explosion",
    needs=(("response/length",),),
    cause="Responses grow without getting better: a response-level mean makes long wrong answers cheap, or the policy "
    "no longer ends its responses, so they run into the length limit and earn nothing.",
    cure="(1) --learner.aggregate token_mean or constant instead of sequence_mean. (2) --filter.overlong, or a soft "
    "penalty near the limit (the overlong reward). (3) If entropy rises too, treat entropy-explosion first. (4) If "
    "accuracy still rises and only the limit is short, raise --rollout.max-new-tokens.",
)
def length_explosion(view: RunView) -> Sign | None:
    """Lengths multiply while more responses are cut off, or without a gain in accuracy."""
    lengths = view.series("response/length")
    before, medians, width = levels(view, lengths)
    high = np.flatnonzero(medians >= 1.5 * before)
    if not len(high) or before <= 0:
        return None
    since = onset(lengths, int(high[0]), width, 1.5 * before)
    top = float(medians.max())
    evidence = {lengths.key: f"{went(before, top)} tokens"}
    cut_rise, cut = _truncation(view)
    if cut is not None:
        evidence["response/truncated"] = cut
    old, new, error = _accuracy_change(view, since)
    worse_off = np.isnan(new) or new <= old + max(0.03, error)
    if not ((cut_rise >= 0.25) or (top >= (3.0 if view.single else 2.5) * before and worse_off)):
        return None
    fell = bool(old - new >= max(0.3 * old, 0.05, 4 * error))
    if not np.isnan(new):
        evidence[view.accuracy.key] = went(old, new)
    return Sign("critical" if fell else "warning", since, evidence)


def _truncation(view: RunView) -> tuple[float, str | None]:
    """How much the truncated share rose above its start, and the words for it."""
    truncated = view.series("response/truncated")
    before, medians, _ = levels(view, truncated)
    if not len(medians):
        return 0.0, None
    top = float(medians.max())
    return top - before, went(before, top)


@rule(
    "length-collapse",
    needs=(("response/length",),),
    cause="Responses shrink to almost nothing without getting better: short answers are the cheap way to some reward "
    "(format, a guess), or the policy ends at once because everything longer was punished.",
    cure="(1) Read a few responses in launch.py report. (2) --reward.conditional-format, so that form alone pays "
    "nothing. (3) Lower --learner.lr and resume from before this round. (4) --learner.aggregate token_mean; soften an "
    "overlong penalty.",
)
def length_collapse(view: RunView) -> Sign | None:
    """Lengths fall to about a third or less while accuracy does not rise."""
    lengths = view.series("response/length")
    before, medians, width = levels(view, lengths)
    low = np.flatnonzero(medians <= 0.35 * before)
    if not len(low):
        return None
    since = onset(lengths, int(low[0]), width, 0.35 * before)
    old, new, error = _accuracy_change(view, since)
    if new > old + max(0.03, error):
        return None
    evidence = {lengths.key: f"{went(before, float(medians.min()))} tokens"}
    if not np.isnan(new):
        evidence[view.accuracy.key] = went(old, new)
    fell = bool(old - new >= max(0.3 * old, 0.05, 4 * error))
    return Sign("critical" if fell else "warning", since, evidence)


@rule(
    "all-truncated",
    needs=(("response/truncated", "response/length"),),
    cause="Nearly every response is cut off at the length limit, so no answer is ever reached: the limit is too short "
    "for this model, or the model never ends (no end token in its template, or it has turned into noise).",
    cure="(1) Raise --rollout.max-new-tokens. (2) Check that the prompt uses the model's chat template and that its "
    "end token is the one the engine stops at. (3) If it began in the middle of the run, treat what came first "
    "(entropy-explosion, kl-takeover) and resume from before it.",
)
def all_truncated(view: RunView) -> Sign | None:
    """The truncated share stays at about 1 (or lengths stay at one highest value while nothing is earned)."""
    truncated = view.series("response/truncated")
    if not len(truncated):
        return _stuck_at_longest(view)
    least = 8 if view.single else 2
    if len(truncated) < least:
        return None
    shares = rolling_mean(truncated.values, least)
    full = np.flatnonzero(shares >= 0.95)
    if not len(full):
        return None
    since = int(truncated.rounds[int(full[0])])
    return Sign("critical", since, {truncated.key: f"{number(float(shares[full[0]]))} from round {since} on"})


def _stuck_at_longest(view: RunView) -> Sign | None:
    """Without a truncated share: mean lengths at exactly their highest value for ten rounds, with no reward."""
    lengths: Series = view.series("response/length")
    limit = view.limits.max_length or (float(lengths.values.max()) if len(lengths) else 0.0)
    if len(lengths) < 20 or not len(view.accuracy):
        return None
    full = np.flatnonzero(rolling_mean((lengths.values >= 0.995 * limit).astype(float), 10) >= 0.8)
    if not len(full):
        return None
    since = int(lengths.rounds[int(full[0])])
    earned, _ = view.mean_near(view.accuracy, since, int(lengths.rounds[int(full[0]) + 9]))
    if not earned <= 0.02:
        return None
    return Sign("critical", since, {lengths.key: f"{number(limit)} tokens, the longest seen, from round {since} on"})
