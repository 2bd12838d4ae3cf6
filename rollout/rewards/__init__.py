"""Rewards: one file in this folder is one part of the reward, found by itself.

A reward is a module with `NAME`, `weight(config)`, which gives the part's weight or None where the part is not in use,
and `score(group, right, scoring, config)`, which gives its value per response before weights. `custom.py` is the
contract of rewards that users bring; `answers/` compares final answers; `selftest.py` tries a reward out.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from rollout.config import RewardConfig

if TYPE_CHECKING:
    from rollout.scoring import Scoring
    from rollout.types import DoubleArray, Group

    class Reward(Protocol):
        """What a module in this folder must have to be a part of the reward."""

        NAME: str

        def weight(self, config: RewardConfig) -> float | None:
            """Weight of the part in the total; None: the part is not in use."""

        def score(self, group: Group, right: DoubleArray, scoring: Scoring, config: RewardConfig) -> DoubleArray:
            """(G,) the part per response; `right` is 1.0 where the answer is."""


@cache
def built_in() -> dict[str, Reward]:
    """The rewards of this folder by name."""
    found: dict[str, Reward] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if all(hasattr(module, name) for name in ("NAME", "weight", "score")):
            if module.NAME in found:
                raise ValueError(f"two rewards are called {module.NAME!r}; {module.__name__} is the second")
            found[module.NAME] = cast("Reward", module)
    return found


def part_weights(config: RewardConfig, names: Iterable[str]) -> dict[str, float]:
    """The weight of each part of a scored group; parts that a user's own reward named have --reward.custom-weight."""
    weights: dict[str, float] = {}
    for name in names:
        reward = built_in().get(name)
        weights[name] = config.custom_weight if reward is None else reward.weight(config) or 0.0
    return weights
