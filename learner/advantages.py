"""Rewards -> advantages, on whole groups and before any split into minibatches.

Everything is computed in float64: in float32 a group of equal rewards such as 0.1 does not cancel, and Adam, which
knows no scale, would learn from the rounding. Letters: B responses, K reward parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from rollout.types import BoolArray, DoubleArray, UserError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("group", "no_std", "batch_std", "population_std", "gdpo", "gdpo_group")
EPSILON = 1e-4
"""Added to every standard deviation before dividing."""

_Groups = npt.NDArray[np.intp]


@overload
def compute_advantages(kind: str, rewards: Tensor, group_ids: Any, weights: Any = None) -> Tensor: ...
@overload
def compute_advantages(kind: str, rewards: npt.ArrayLike, group_ids: Any, weights: Any = None) -> DoubleArray: ...
def compute_advantages(kind: str, rewards: Any, group_ids: Any, weights: Any = None) -> Any:
    """Advantage of each response, float64 (B,).

    `kind`: group (minus the group's mean, over its sample std), population_std (the same with ddof 0), no_std (mean
    only), batch_std (over the std of the raw rewards of the whole batch), gdpo (each part normalised in its group,
    weighted, summed, normalised over the batch), gdpo_group (the same, second stage over the group).
    `rewards`: (B,) or (B, K parts); parts are weighted and summed first, except by gdpo. `weights`: (K,), default 1.
    `group_ids`: (B,) anything that tells groups apart; order does not matter. Torch in, torch out; else numpy out.

    A group whose reward does not vary gets exactly 0, and so does a group of one.
    """
    _known(kind)
    parts, scale, groups = _checked(rewards, weights, group_ids)
    if kind in ("gdpo", "gdpo_group"):
        return _like(rewards, _gdpo(parts, scale, groups, over_batch=kind == "gdpo"))
    return _like(rewards, _one_reward(kind, _summed(parts, scale), groups))


def zero_signal(kind: str, rewards: Any, group_ids: Any, weights: Any = None) -> BoolArray:
    """(B,) True where the reward that carries the advantage does not vary in the response's group.

    For gdpo each part carries its own share, so a group is without signal only when no part with a weight varies.
    """
    _known(kind)
    parts, scale, groups = _checked(rewards, weights, group_ids)
    if kind in ("gdpo", "gdpo_group"):
        return _flat(parts, scale, groups)
    return _constant(_summed(parts, scale), groups)


def _one_reward(kind: str, total: DoubleArray, groups: _Groups) -> DoubleArray:
    centred = total - _group_mean(total, groups)
    if kind == "no_std":
        scaled = centred
    elif kind == "batch_std":
        # The spread of the raw rewards, not of what is left after subtracting each group's mean.
        scaled = centred / (_batch_std(total) + EPSILON)
    else:
        scaled = centred / (_group_std(centred, groups, ddof=0 if kind == "population_std" else 1) + EPSILON)
    return np.where(_constant(total, groups), 0.0, scaled)


def _gdpo(parts: DoubleArray, scale: DoubleArray, groups: _Groups, *, over_batch: bool) -> DoubleArray:
    """Each part is normalised by itself, so that no part's weight cancels where the other parts are constant."""
    first = np.zeros(len(groups))
    for weight, column in zip(scale, parts.T, strict=True):
        first += weight * _one_reward("group", column, groups)
    if not over_batch:
        return _one_reward("group", first, groups)
    second = (first - first.mean()) / (_batch_std(first) + EPSILON)
    # The batch mean is 0 up to rounding; what it leaves on groups without signal is noise, not an advantage.
    return np.where(_flat(parts, scale, groups), 0.0, second)


def _flat(parts: DoubleArray, scale: DoubleArray, groups: _Groups) -> BoolArray:
    flat = np.ones(len(groups), dtype=np.bool_)
    for weight, column in zip(scale, parts.T, strict=True):
        if weight != 0.0:
            flat &= _constant(column, groups)
    return flat


def _summed(parts: DoubleArray, scale: DoubleArray) -> DoubleArray:
    # Column by column: a matrix product may round equal rows differently, and a constant group would not be constant.
    total = np.zeros(len(parts))
    for weight, column in zip(scale, parts.T, strict=True):
        total += weight * column
    return total


def _group_mean(values: DoubleArray, groups: _Groups) -> DoubleArray:
    means = np.bincount(groups, weights=values) / np.bincount(groups)
    return np.asarray(means[groups])


def _group_std(centred: DoubleArray, groups: _Groups, *, ddof: int) -> DoubleArray:
    """Std of each response's group; 0 for a group of one, whose advantage is 0 whatever it is divided by."""
    sizes = np.bincount(groups)
    variances = np.bincount(groups, weights=centred**2) / np.maximum(sizes - ddof, 1)
    return np.asarray(np.sqrt(variances)[groups])


def _batch_std(values: DoubleArray) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _constant(values: DoubleArray, groups: _Groups) -> BoolArray:
    """(B,) True where the largest and the smallest value of the group are the same number."""
    count = int(groups.max()) + 1
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return np.asarray((low == high)[groups])


def _known(kind: str) -> None:
    if kind not in KINDS:
        raise UserError(f"advantage {kind!r} is unknown; choose one of: {', '.join(KINDS)}.")


def _checked(rewards: Any, weights: Any, group_ids: Any) -> tuple[DoubleArray, DoubleArray, _Groups]:
    """Parts (B, K), weights (K,) and groups numbered from 0 (B,)."""
    parts = _numpy(rewards).astype(np.float64)
    if parts.ndim not in (1, 2) or parts.size == 0:
        raise ValueError(f"rewards must be (B,) or (B, K parts) with at least one response, got shape {parts.shape}.")
    parts = parts.reshape(len(parts), -1)
    if not np.isfinite(parts).all():
        rows = np.flatnonzero(~np.isfinite(parts).all(axis=1))
        raise ValueError(f"rewards are not finite in rows {rows[:8].tolist()} ({len(rows)} in all).")
    scale = np.ones(parts.shape[1]) if weights is None else _numpy(weights).astype(np.float64)
    if scale.shape != (parts.shape[1],) or not np.isfinite(scale).all():
        raise ValueError(f"weights must be {parts.shape[1]} finite numbers, one per reward part, got {scale.tolist()}.")
    _, groups = np.unique(_numpy(group_ids), return_inverse=True)
    if groups.shape != (len(parts),):
        raise ValueError(f"{len(parts)} responses but group ids of shape {groups.shape}; each response needs one.")
    return parts, scale, groups


def _numpy(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)


def _like(given: Any, advantages: DoubleArray) -> Any:
    if not hasattr(given, "detach"):
        return advantages
    import torch

    return torch.from_numpy(advantages).to(given.device)
