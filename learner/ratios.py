"""Ratios between two policies, from log-probs, by token or by response.

A log-ratio is masked before it is exponentiated (padding may hold anything) and clamped to +-20: the summed log-ratio
of a long response overflows otherwise. Beyond the clamp the gradient is 0; how often that happens is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import RatioLevel

LOG_LIMIT = 20.0
"""Largest |log-ratio| that is exponentiated, and largest |difference| in a KL term."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """exp(log-ratio) of each unit: a token or a response."""

    values: Tensor
    """(B, T) for tokens, (B,) for responses; 1 where `valid` is False."""
    valid: Tensor
    """Same shape, bool: which units exist (a response without a valid token is none)."""
    clamped: Tensor
    """0-d: valid units whose log-ratio was beyond +-20."""


def ratios(new: Tensor, old: Tensor, valid: Tensor, level: RatioLevel) -> Ratios:
    """Ratio new/old from log-probs and mask (B, T): per token, or of the sum or the mean over the response."""
    difference = torch.where(valid, new - old, 0.0)
    if level == "token":
        return _exponentiated(difference, valid)
    exists = valid.any(dim=1)
    total = difference.sum(dim=1)
    if level == "sequence_mean":
        total = total / valid.sum(dim=1).clamp(min=1)
    return _exponentiated(total, exists)


def clamp_counted(difference: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Difference within +-20, and how many valid entries (0-d) were beyond."""
    return difference.clamp(-LOG_LIMIT, LOG_LIMIT), ((difference.abs() > LOG_LIMIT) & valid).sum()


def _exponentiated(log_ratio: Tensor, valid: Tensor) -> Ratios:
    clamped, count = clamp_counted(log_ratio, valid)
    return Ratios(clamped.exp(), valid, count)
