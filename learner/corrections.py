"""Importance weights for what the sampler did differently, and V3.2's mask of far-off responses. All constant.

They multiply the policy term only, never the KL term, and leave every denominator as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import CorrectionKind, RatioLevel
from learner.ratios import ratios


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight old/sampler of each token or response."""

    raw: Tensor
    """(B, T) or (B,): before truncation or masking; 1 where not valid."""
    applied: Tensor
    """Same shape: what multiplies the loss."""
    valid: Tensor
    """Same shape, bool."""
    clamped: Tensor
    """0-d: valid weights whose logarithm was beyond +-20."""


def importance_weights(
    kind: CorrectionKind,
    old: Tensor,
    sampler: Tensor,
    valid: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
    geometric_mean: bool = False,
) -> Weights:
    """Truncated (tis) or masked weights from log-probs and mask (B, T).

    A response's weight is the product over its tokens, or their geometric mean when asked for. Masked kinds keep a
    weight within [floor, cap] as it is and set others to 0.
    """
    by_response: RatioLevel = "sequence_mean" if geometric_mean else "sequence_sum"
    with torch.no_grad():
        weights = ratios(old, sampler, valid, "token" if kind.endswith("_token") else by_response)
        raw = weights.values
        within = (raw >= floor) & (raw <= cap)
        applied = raw.clamp(max=cap) if kind.startswith("tis") else torch.where(within, raw, 0.0)
    return Weights(raw, applied, weights.valid, weights.clamped)


def off_policy_mask(new: Tensor, anchor: Tensor, valid: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """(B,) True where a response is left out: negative advantage, and mean log(anchor/new) beyond delta.

    Negative responses that the policy has already moved away from push with nothing to bound them (DeepSeek-V3.2).
    """
    with torch.no_grad():
        drift = torch.where(valid, anchor - new, 0.0).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
        return (advantages < 0) & (drift > delta)
