"""Metrics of one optimizer step, as sums and maxima that can be merged over microbatches and ranks in any order.

A partial is a flat dict of float64 numbers under the names below; a name that is missing is a sum of 0 or a maximum of
nothing. So a rank without a microbatch contributes an empty partial, and every rank packs the same two vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from learner.aggregate import Denominators

Partial = dict[str, float]

_TOTALS = {
    "loss": "policy/loss",
    "kl": "policy/kl",
    "kl_loss": "policy/kl_loss",
    "clamped": "policy/clamped",
    "kl_clamped": "policy/kl_clamped",
    "correction_clamped": "correction/clamped",
    "effective_tokens": "policy/effective_tokens",
}
"""Sums that are metrics as they are, by name in the partial."""

_MEANS = {
    "ratio": ("policy/ratio_mean", "ratios"),
    "clip_low": ("policy/clip_fraction_low", "clip_low_units"),
    "clip_high": ("policy/clip_fraction_high", "clip_high_units"),
    "clip_dual": ("policy/clip_fraction_dual", "clip_dual_units"),
    "weight": ("correction/weight_mean", "weights"),
    "capped": ("correction/capped", "capped_units"),
    "masked": ("correction/masked", "masked_units"),
    "off_policy": ("correction/off_policy", "off_policy_units"),
    "mismatch": ("mismatch/mean", "mismatch_tokens"),
    "entropy": ("policy/entropy", "entropy_tokens"),
}
"""Sums that are divided by another sum: what was really looked at, which may leave out groups without signal."""

_MAXIMA = {"ratio_max": "policy/ratio_max", "weight_max": "correction/weight_max", "mismatch_max": "mismatch/max"}

_NEEDS = {"kl": "kl_units", "kl_loss": "kl_units", "kl_clamped": "kl_units", "correction_clamped": "weights"}
"""Totals that do not apply, and are absent, where this count is 0."""

SUMS = tuple(sorted({*_TOTALS, *_MEANS, *(count for _, count in _MEANS.values()), *_NEEDS.values()}))
"""Order of the sums in the packed vector."""
MAXIMA = tuple(sorted(_MAXIMA))
"""Order of the maxima in the packed vector."""


def merge_partials(partials: Iterable[Partial]) -> Partial:
    """One partial for all; associative, and a NaN stays visible."""
    merged: Partial = {}
    for partial in partials:
        for name, value in partial.items():
            if name in _MAXIMA:
                merged[name] = _larger(merged.get(name, -math.inf), value)
            elif name in SUMS:
                merged[name] = merged.get(name, 0.0) + value
            else:
                raise ValueError(f"{name!r} is no part of a partial; known are: {', '.join(SUMS + MAXIMA)}.")
    return merged


def pack_partial(partial: Partial) -> tuple[Tensor, Tensor]:
    """Two float64 vectors for the ranks to add up (sums) and to take the largest of (maxima)."""
    whole = merge_partials([partial])
    sums = torch.tensor([whole.get(name, 0.0) for name in SUMS], dtype=torch.float64)
    maxima = torch.tensor([whole.get(name, -math.inf) for name in MAXIMA], dtype=torch.float64)
    return sums, maxima


def unpack_partial(sums: Tensor, maxima: Tensor) -> Partial:
    """The partial behind two packed vectors."""
    return dict(zip(SUMS, sums.tolist(), strict=True)) | dict(zip(MAXIMA, maxima.tolist(), strict=True))


def finish_metrics(partial: Partial, denominators: Denominators) -> dict[str, float]:
    """Metrics of the step by their names in metrics.jsonl; a key that does not apply is absent."""
    whole = merge_partials([partial])
    metrics = {"policy/tokens": float(denominators.tokens)}
    for name, metric in _TOTALS.items():
        if name not in _NEEDS or whole.get(_NEEDS[name], 0.0) > 0:
            metrics[metric] = whole.get(name, 0.0)
    for name, (metric, count) in _MEANS.items():
        units = whole.get(count, 0.0)
        if units > 0:
            metrics[metric] = whole.get(name, 0.0) / units
    for name, metric in _MAXIMA.items():
        value = whole.get(name, -math.inf)
        if value != -math.inf:
            metrics[metric] = value
    return metrics


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
