"""From scored groups to a batch: which reward carries the advantage, and whether a group has any signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cluster.errors import BrokenPromise
from cluster.plan import Plan
from cluster.run.config import Config
from learner.advantages import compute_advantages, zero_signal
from learner.batching import build_batch
from learner.types import Batch
from rollout.rewards import part_weights
from rollout.types import DoubleArray, Group, ScoredGroup


def advantages_of(config: Config, groups: Sequence[ScoredGroup]) -> DoubleArray:
    """(B,) advantages of whole groups, in their order, before any split into minibatches."""
    ids = np.repeat(np.arange(len(groups)), [len(scored.total) for scored in groups])
    rewards, weights = _rewards(config, groups)
    return compute_advantages(config.learner.advantage, rewards, ids, weights)


def without_signal(config: Config, scored: ScoredGroup) -> bool:
    """True where no response of the group gets an advantage: the reward does not vary."""
    rewards, weights = _rewards(config, [scored])
    ids = np.zeros(len(scored.total), dtype=np.int64)
    return bool(zero_signal(config.learner.advantage, rewards, ids, weights).all())


def batch_of(config: Config, plan: Plan, groups: Sequence[ScoredGroup], advantages: DoubleArray) -> Batch:
    """The groups as the learner takes them; BrokenPromise when one is further behind than the schedule allows."""
    try:
        return build_batch(
            groups,
            advantages,
            kl_coef=plan.kl_coef,
            domain_coefs=plan.kl_domains,
            drop_unfinished=config.filter.overlong,
            max_lag=plan.max_lag,
        )
    except ValueError as error:
        raise BrokenPromise(f"{error}") from None


def probe_batch(groups: Sequence[Group], version: int) -> Batch:
    """Groups that were answered only to be compared, as a batch of the round that follows on `version`."""
    scored = [
        ScoredGroup(replace(g, request=replace(g.request, round=version + 1)), {}, np.zeros(len(g.lengths)), ())
        for g in groups
    ]
    return build_batch(scored, np.zeros(sum(len(g.lengths) for g in groups)))


def _rewards(config: Config, groups: Sequence[ScoredGroup]) -> tuple[DoubleArray, DoubleArray | None]:
    """The reward that carries the advantage: totals, or (B, K) parts with their weights for GDPO."""
    if not config.learner.advantage.startswith("gdpo"):
        return np.concatenate([scored.total for scored in groups]), None
    weights = part_weights(config.reward, list(groups[0].parts))
    parts = np.stack([np.concatenate([g.parts[name] for g in groups]) for name in weights], axis=1)
    return parts, np.array(list(weights.values()))
