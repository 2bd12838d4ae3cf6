"""Is the final answer the gold answer? 1 or 0.

The verdict comes from `answers` (or from the user's own function); here it only becomes a number. A response that the
length limit cut is not finished, and an unfinished answer is no answer: it was never graded, and is wrong.
"""

from __future__ import annotations

from rollout.config import RewardConfig
from rollout.scoring import Scoring
from rollout.types import DoubleArray, Group

NAME = "correctness"


def weight(config: RewardConfig) -> float | None:
    """The unit in which the other weights are measured."""
    del config
    return 1.0


def score(group: Group, right: DoubleArray, scoring: Scoring, config: RewardConfig) -> DoubleArray:
    """(G,) 1 where the answer is right."""
    del group, scoring, config
    return right
