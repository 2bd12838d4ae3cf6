"""Modelled ranks: how long the steps of some minibatches take, from the tokens in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearnerModel:
    """What all ranks together can do. A backward pass counts as two forward passes."""

    ranks: int
    """Ranks a minibatch is shared out over."""
    token: float
    """Seconds one rank takes for one forward pass over one padded token."""
    padding: float
    """Padded over real tokens."""
    microbatch: float
    """Seconds of one forward pass over a microbatch beside its tokens."""
    budget: int
    """Padded tokens of a microbatch."""
    passes: float
    """Forward passes of training: 3, one more each for recomputed activations and for a reference."""
    forward_sends: float
    """Seconds of communication of one forward pass over a microbatch; it goes on beside the computation."""
    training_sends: float
    """The same for all passes of training."""
    step: float
    """Seconds of an optimizer step."""
    old_logprobs: bool
    """Log-probs are recomputed before the first step of a round, for all minibatches but the first."""
    slowest: float = 1.0
    """How much longer the slowest rank takes than the others: all wait for it."""

    def train(self, tokens: Sequence[float]) -> float:
        """One step for each minibatch of so many tokens (prompts included)."""
        return sum(self._passes(count, self.passes, self.training_sends) + self.step for count in tokens)

    def old(self, tokens: Sequence[float]) -> float:
        """Old log-probs of a round whose minibatches have so many tokens."""
        return sum(self._passes(count, 1.0, self.forward_sends) for count in tokens[1:]) if self.old_logprobs else 0.0

    def _passes(self, tokens: float, passes: float, sends: float) -> float:
        share = tokens * self.padding / self.ranks
        microbatches = max(1, math.ceil(share / self.budget))
        compute = self.slowest * passes * self.token * share / microbatches
        return microbatches * (max(compute, sends) + passes * self.microbatch)
