"""CISPO: REINFORCE whose weight is the capped ratio, held constant, so that no token ever loses its gradient."""

from __future__ import annotations

from learner.losses import LossInputs, LossTerms

LEVELS = ("token",)
SETTINGS = ("cispo_cap",)


def policy_loss(given: LossInputs) -> LossTerms:
    """-min(ratio, cap) * A * log-prob, gradient through the log-prob only; there is no lower bound.

    The value contains the log-prob and cannot be compared with other losses.
    """
    weight = given.ratio.detach().clamp(max=given.cispo_cap)
    over = (given.advantages != 0) & (given.ratio > given.cispo_cap)
    return LossTerms(-weight * given.advantages * given.logprobs, {"high": over})
