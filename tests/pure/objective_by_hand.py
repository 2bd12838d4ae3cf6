"""The formulas of one objective and their gradients, one number at a time, no autograd: what tests compare with.

Written from the formulas alone and sharing nothing with learner/ but the names of the settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.objective import Objective

Rows = Sequence[Sequence[float]]


@dataclass
class Case:
    """A minibatch as plain lists: rows of log-probs without padding."""

    new: Rows
    old: Rows
    advantages: Sequence[float]
    ref: Rows
    sampler: Rows
    counted: Sequence[bool]
    kl_coefs: Sequence[float] | None = None


def loss_and_gradient(objective: Objective, case: Case) -> tuple[float, list[list[float]]]:
    """Loss and its derivative by every log-prob."""
    rows = range(len(case.new))
    gradient = [[0.0] * len(row) for row in case.new]
    live = [i for i in rows if case.counted[i] and len(case.new[i])]
    tokens = sum(len(case.new[i]) for i in live)
    total = 0.0
    for i in live:
        share = _shares(objective, len(case.new), tokens, len(case.new[i]))
        value, slopes = _policy(objective, case, i, share)
        kl_value, kl_slopes = _kl(objective, case, i, share)
        total += value + kl_value
        gradient[i] = [a + b for a, b in zip(slopes, kl_slopes, strict=True)]
    return total, gradient


def _shares(objective: Objective, responses: int, tokens: int, length: int) -> float:
    """What a token of this response is multiplied by."""
    how = objective.aggregate
    if how is None:
        sequence = objective.ratio_level != "token" and objective.loss != "reinforce"
        how = "sequence_mean" if sequence else "token_mean"
    if how == "sequence_sum":
        return 1 / responses
    if how == "sequence_mean":
        return 1 / responses / length
    if how == "token_mean":
        return 1 / tokens
    assert objective.constant_length is not None
    return 1 / responses / objective.constant_length


def _policy(objective: Objective, case: Case, i: int, share: float) -> tuple[float, list[float]]:
    new, old, sampler, advantage = case.new[i], case.old[i], case.sampler[i], case.advantages[i]
    length = len(new)
    if objective.off_policy_delta is not None and advantage < 0:
        anchor = sampler if objective.off_policy_anchor == "sampler" else old
        if sum(a - n for a, n in zip(anchor, new, strict=True)) / length > objective.off_policy_delta:
            return 0.0, [0.0] * length
    weights = _weights(objective, old, sampler)
    if objective.loss == "reinforce":
        parts = [-advantage * n for n in new]
        slopes = [-advantage] * length
    elif objective.loss == "cispo":
        caps = [min(_ratio(n - o)[0], objective.cispo_cap) for n, o in zip(new, old, strict=True)]
        parts = [-cap * advantage * n for cap, n in zip(caps, new, strict=True)]
        slopes = [-cap * advantage for cap in caps]
    elif objective.ratio_level == "token":
        pairs = [(_ratio(n - o)) for n, o in zip(new, old, strict=True)]
        clips = [_clip(objective, ratio, advantage) for ratio, _ in pairs]
        parts = [value for value, _ in clips]
        slopes = [slope * d_ratio for (_, slope), (_, d_ratio) in zip(clips, pairs, strict=True)]
    else:
        scale = 1 / length if objective.ratio_level == "sequence_mean" else 1.0
        ratio, d_ratio = _ratio(scale * sum(n - o for n, o in zip(new, old, strict=True)))
        value, slope = _clip(objective, ratio, advantage)
        weight = weights[0] / len(case.new)
        return weight * value, [weight * slope * d_ratio * scale] * length
    return (
        share * sum(w * part for w, part in zip(weights, parts, strict=True)),
        [share * w * slope for w, slope in zip(weights, slopes, strict=True)],
    )


def _ratio(log_ratio: float) -> tuple[float, float]:
    """exp within +-20, and its derivative, which is 0 beyond."""
    value = math.exp(max(-20.0, min(20.0, log_ratio)))
    return value, value if abs(log_ratio) <= 20 else 0.0


def _clip(objective: Objective, ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one unit, and its derivative by the ratio."""
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "book":
        clipped = min(max(ratio, low), high)
        if advantage >= 0:
            chosen = min(ratio * advantage, clipped * advantage)
        else:
            chosen = max(ratio * advantage, clipped * advantage)
        return -chosen, -advantage if ratio <= high else 0.0
    value = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    moves = ratio <= high if advantage >= 0 else ratio >= low
    if objective.dual_clip is not None and advantage < 0 and ratio > objective.dual_clip:
        return -objective.dual_clip * advantage, 0.0
    return value, -advantage if moves else 0.0


def _weights(objective: Objective, old: Sequence[float], sampler: Sequence[float]) -> list[float]:
    kind, length = objective.correction, len(old)
    if kind == "none":
        return [1.0] * length
    gaps = [o - s for o, s in zip(old, sampler, strict=True)]
    if kind.endswith("token"):
        raw = [_ratio(gap)[0] for gap in gaps]
    else:
        mean = objective.correction_geometric_mean
        raw = [_ratio(sum(gaps) / length if mean else sum(gaps))[0]] * length
    if kind.startswith("tis"):
        return [min(w, objective.correction_cap) for w in raw]
    return [w if objective.correction_floor <= w <= objective.correction_cap else 0.0 for w in raw]


def _kl(objective: Objective, case: Case, i: int, share: float) -> tuple[float, list[float]]:
    new, old, ref = case.new[i], case.old[i], case.ref[i]
    length, kind = len(new), objective.kl
    if kind == "none":
        return 0.0, [0.0] * length
    coef = objective.kl_coef if case.kl_coefs is None else case.kl_coefs[i]
    gaps = [max(-20.0, min(20.0, n - f)) for n, f in zip(new, ref, strict=True)]
    inside = [1.0 if abs(n - f) <= 20 else 0.0 for n, f in zip(new, ref, strict=True)]
    if kind in ("k1_book", "book_weighted"):
        scale = 1 / length if objective.kl_length_normalise else 1.0
        total, coef = scale * sum(gaps), coef / len(case.new)
        if kind == "k1_book":
            return coef * total, [coef * scale * inner for inner in inside]
        ratio, d_ratio = _ratio(scale * sum(n - o for n, o in zip(new, old, strict=True)))
        return coef * ratio * total, [coef * scale * (d_ratio * total + ratio * inner) for inner in inside]
    value, slopes = 0.0, []
    for gap, inner, n, o in zip(gaps, inside, new, old, strict=True):
        if kind == "k1":
            term, slope = gap, inner
        elif kind == "k2":
            term, slope = gap * gap / 2, gap * inner
        else:
            term, slope = math.exp(-gap) + gap - 1, (1 - math.exp(-gap)) * inner
        if kind == "k3_weighted":
            ratio, d_ratio = _ratio(n - o)
            term, slope = ratio * term, d_ratio * term + ratio * slope
        value += coef * share * term
        slopes.append(coef * share * slope)
    return value, slopes
