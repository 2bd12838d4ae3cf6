"""PPO's clip with separate bounds, by token (GRPO, DAPO), by summed response (R1) or by mean response (GSPO)."""

from __future__ import annotations

from learner.losses import LossInputs, LossTerms

LEVELS = ("token", "sequence_sum", "sequence_mean")
SETTINGS = ("clip_low", "clip_high", "dual_clip")


def policy_loss(given: LossInputs) -> LossTerms:
    """-min(ratio * A, clamp(ratio) * A); with a dual clip, at most -c * A where A < 0.

    Without the dual clip nothing bounds the loss where A < 0: the minimum takes the larger ratio there.
    """
    ratio, advantages = given.ratio, given.advantages
    low, high = 1.0 - given.clip_low, 1.0 + given.clip_high
    loss = -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    clipped = {"low": (advantages < 0) & (ratio < low), "high": (advantages > 0) & (ratio > high)}
    if given.dual_clip is not None:
        bounded = loss.minimum(-given.dual_clip * advantages)
        loss = bounded.where(advantages < 0, loss)
        clipped["dual"] = (advantages < 0) & (ratio > given.dual_clip)
    return LossTerms(loss, clipped)
