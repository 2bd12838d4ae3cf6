"""The book's clip: bounded from above for both signs of the advantage, and not at all from below."""

from __future__ import annotations

from learner.losses import LossInputs, LossTerms

LEVELS = ("token", "sequence_sum", "sequence_mean")
SETTINGS = ("clip_high",)


def policy_loss(given: LossInputs) -> LossTerms:
    """-A * min(ratio, 1 + clip_high).

    The book writes where(A >= 0, min(ratio * A, clipped * A), max(ratio * A, clipped * A)), which comes to this: the
    lower bound never acts, and PPO's clip differs by not bounding A < 0 from above. Equal to PPO with a dual clip of
    1 + clip_high and a clip_low of at least 1.
    """
    high = 1.0 + given.clip_high
    over = (given.advantages != 0) & (given.ratio > high)
    return LossTerms(-given.advantages * given.ratio.clamp(max=high), {"high": over})
