"""KL terms of the loss, per token or per response, with d = new - ref.

What the gradients mean (exact expectations over one categorical distribution):

* k1, k1_book: on-policy 0 in expectation, and without the reference in it. Off the sampling distribution (a temperature
  or top-p that is not scored) it is not 0 and flattens or sharpens the policy, wherever the reference stands.
* k2: on-policy the gradient of KL(policy || ref).
* k3: on-policy the gradient of KL(ref || policy).
* k3_weighted: ratio * k3 with a live ratio, the gradient of KL(policy || ref) off-policy too (DeepSeek-V3.2).
* book_weighted: the response's ratio times its summed d, both live: another object, kept to reproduce the book.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import KLKind
from learner.ratios import clamp_counted, ratios

PER_RESPONSE: tuple[KLKind, ...] = ("k1_book", "book_weighted")
"""Kinds that are one number per response and always averaged over responses, whatever the aggregate."""


@dataclass(frozen=True, slots=True)
class KLTerm:
    """The estimate before any coefficient."""

    values: Tensor
    """(B, T), or (B,) for the kinds in PER_RESPONSE; 0 where there is no valid token."""
    clamped: Tensor
    """0-d: tokens whose d was beyond +-20, and weights whose log-ratio was."""


def kl_term(
    kind: KLKind, new: Tensor, ref: Tensor, old: Tensor, valid: Tensor, *, length_normalise: bool = False
) -> KLTerm:
    """Estimate from log-probs and mask (B, T); `old` matters for the weighted kinds only.

    `length_normalise` divides a response's summed differences by its length, in the term and in its weight.
    """
    difference, clamped = clamp_counted(torch.where(valid, new - ref, 0.0), valid)
    if kind == "k1":
        return KLTerm(difference, clamped)
    if kind == "k2":
        return KLTerm(difference.square() / 2, clamped)
    if kind in ("k3", "k3_weighted"):
        # expm1 keeps the digits that exp(-d) - 1 loses near d = 0.
        values = torch.expm1(-difference) + difference
        if kind == "k3":
            return KLTerm(values, clamped)
        weight = ratios(new, old, valid, "token")
        return KLTerm(weight.values * values, clamped + weight.clamped)
    if kind not in PER_RESPONSE:
        raise ValueError(f"kl {kind!r} is no estimator.")
    total = difference.sum(dim=1)
    if length_normalise:
        total = total / valid.sum(dim=1).clamp(min=1)
    if kind == "k1_book":
        return KLTerm(total, clamped)
    weight = ratios(new, old, valid, "sequence_mean" if length_normalise else "sequence_sum")
    return KLTerm(weight.values * total, clamped + weight.clamped)
