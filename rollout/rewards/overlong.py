"""DAPO's soft punishment of long responses: 0, and over the last tokens before the limit a straight line down to -1."""

from __future__ import annotations

import numpy as np

from rollout.config import RewardConfig
from rollout.scoring import Scoring
from rollout.types import DoubleArray, Group

NAME = "overlong"


def weight(config: RewardConfig) -> float | None:
    """In use with --reward.overlong-buffer above 0."""
    return 1.0 if config.overlong_buffer > 0 else None


def score(group: Group, right: DoubleArray, scoring: Scoring, config: RewardConfig) -> DoubleArray:
    """(G,) between -1 and 0: (limit - buffer - length) / buffer where that is negative, -1 beyond the limit."""
    del right
    free = scoring.max_new_tokens - config.overlong_buffer
    lengths = group.lengths.astype(np.float64)
    return np.clip((free - lengths) / config.overlong_buffer, -1.0, 0.0)
