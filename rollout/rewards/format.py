"""Is the reasoning where it belongs? 1 or 0, by token ids.

The first `<think>` must come before the first `</think>`, or `<think>` stands at the end of the prompt and the response
starts inside the block. Tags further back in the prompt do not count, nor do tags that are spelled out in ordinary
tokens. A response that the length limit cut is not finished and gets 0.
"""

from __future__ import annotations

import numpy as np

from rollout.config import RewardConfig
from rollout.scoring import Scoring
from rollout.types import DoubleArray, Group, IntArray

NAME = "format"


def weight(config: RewardConfig) -> float | None:
    """--reward.format-weight; the part is always measured, also where it is not paid."""
    return config.format_weight


def score(group: Group, right: DoubleArray, scoring: Scoring, config: RewardConfig) -> DoubleArray:
    """(G,) 1 where the thinking block is well formed."""
    del right
    values = np.zeros(len(group.lengths), dtype=np.float64)
    if scoring.think is None:
        return values
    thinking = scoring.starts_thinking(group.request.prompt)
    offsets = group.offsets
    for k in range(len(values)):
        ids = group.token_ids[offsets[k] : offsets[k + 1]]
        values[k] = bool(group.finished[k]) and _is_well_formed(ids, *scoring.think, thinking, config.one_think_pair)
    return values


def _is_well_formed(ids: IntArray, opening: int, closing: int, thinking: bool, exactly_one: bool) -> bool:
    opened, closed = np.flatnonzero(ids == opening), np.flatnonzero(ids == closing)
    if len(closed) == 0:
        return False
    if exactly_one and (len(closed) != 1 or len(opened) + thinking != 1):
        return False
    return thinking or (len(opened) > 0 and bool(opened[0] < closed[0]))
