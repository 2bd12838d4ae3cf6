"""Token and response losses -> one number. The only place that divides by a count.

The counts are those of the whole optimizer minibatch, over all ranks and microbatches and after all masks. They are
passed in: a mean taken per microbatch would weigh responses by how they happened to be packed. So the losses of all
microbatches of all ranks *add up* to the loss of the minibatch; who averages gradients over ranks multiplies by their
number. Letters: B responses of the microbatch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.config import Aggregate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the losses of one optimizer minibatch are divided by."""

    responses: int
    """b: every response of the minibatch, those without a valid token too."""
    tokens: int
    """Valid tokens: response tokens, less those of responses that the overlong filter took out."""


def count_denominators(response_mask: Tensor, counted: Tensor | None = None) -> Denominators:
    """Counts of one share: mask (B, T), `counted` (B,) False where the overlong filter took a response out."""
    valid = valid_tokens(response_mask, counted)
    return Denominators(responses=int(valid.shape[0]), tokens=int(valid.sum()))


def add_denominators(shares: Iterable[Denominators]) -> Denominators:
    """Counts of all microbatches and ranks together."""
    responses = tokens = 0
    for share in shares:
        responses, tokens = responses + share.responses, tokens + share.tokens
    return Denominators(responses, tokens)


def valid_tokens(response_mask: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, T) bool: response tokens of the responses that count."""
    valid = response_mask != 0
    return valid if counted is None else valid & (counted != 0)[:, None]


def reduce_tokens(
    values: Tensor, valid: Tensor, how: Aggregate, denominators: Denominators, constant_length: float | None = None
) -> Tensor:
    """Share of the minibatch's loss that these token values (B, T) make up; invalid tokens must hold 0."""
    if how == "token_mean":
        # Without a single valid token the sum is 0, and so is its mean.
        return values.sum() / denominators.tokens if denominators.tokens else values.sum()
    if how == "sequence_mean":
        return reduce_responses(values.sum(dim=1) / valid.sum(dim=1).clamp(min=1), denominators)
    if how == "sequence_sum":
        return reduce_responses(values.sum(dim=1), denominators)
    if constant_length is None:
        raise ValueError("the constant aggregate divides by constant_length, which is not set.")
    return reduce_responses(values.sum(dim=1) / constant_length, denominators)


def reduce_responses(values: Tensor, denominators: Denominators) -> Tensor:
    """Share of the mean over the b responses of the minibatch; responses without a valid token must hold 0."""
    return values.sum() / denominators.responses
