"""REINFORCE: log-probs weighed by advantages, no ratio and so no clip (the book's first loss)."""

from __future__ import annotations

from learner.losses import LossInputs, LossTerms

LEVELS = ()
SETTINGS = ()


def policy_loss(given: LossInputs) -> LossTerms:
    """-A * log-prob."""
    return LossTerms(-given.advantages * given.logprobs)
