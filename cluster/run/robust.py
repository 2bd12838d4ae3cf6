"""Robust statistics on noisy series: rolling levels, noise, stretches, and lasting shifts of level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shift:
    """A lasting change of level between two windows of a series."""

    before: float
    after: float
    z: float
    """Size of the change in standard errors of the difference of the two window means."""
    start: int
    """Index at which the level changed."""
    late: slice
    """The later window."""
    early: slice
    """The earlier window."""


def rolling_median(values: Array, width: int) -> Array:
    """(n - width + 1,) medians; entry i covers values[i : i + width]."""
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    middle = width // 2
    if width % 2:
        return np.partition(windows, middle, axis=1)[:, middle]
    parted = np.partition(windows, (middle - 1, middle), axis=1)
    return (parted[:, middle - 1] + parted[:, middle]) / 2


def rolling_mean(values: Array, width: int) -> Array:
    """(n - width + 1,) means; entry i covers values[i : i + width]."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray((sums[width:] - sums[:-width]) / width, dtype=np.float64)


def noise(values: Array) -> float:
    """Round-to-round standard deviation that ignores trends and single jumps.

    From successive differences without the largest tenth of them; 1.25 makes up for what trimming takes off.
    """
    if len(values) < 3:
        return 0.0
    steps = np.sort(np.abs(np.diff(values)))
    kept = steps[: max(1, len(steps) - max(1, len(steps) // 10))]
    return 1.25 * math.sqrt(float(np.mean(kept**2)) / 2)


def longest_runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """All maximal stretches of True as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def change_point(values: Array) -> int:
    """Index at which splitting into two levels explains the values best (least squares)."""
    count = len(values)
    if count < 2:
        return 0
    head = np.cumsum(values)[:-1]
    sizes = np.arange(1, count)
    gain = head**2 / sizes + (values.sum() - head) ** 2 / (count - sizes)
    return int(np.argmax(gain)) + 1


def find_shift(
    values: Array, widths: Sequence[int], floor: float, *, relative: float, absolute: float, z: float, down: bool = True
) -> Shift | None:
    """The clearest lasting fall (or rise) from the best window so far to a later one, None if there is none.

    A change counts when it is at least `relative` of the earlier level, `absolute`, and `z` standard errors. The
    later window may be quieter than the run (a reward that is 0 has no noise left), the earlier one may not.
    """
    signed = values if down else -values
    sigma = max(noise(values), floor)
    best: Shift | None = None
    for width in widths:
        if 2 * width > len(values):
            break
        means = rolling_mean(signed, width)
        peak_at = np.maximum.accumulate(np.where(means >= np.maximum.accumulate(means), np.arange(len(means)), 0))
        before, after = means[peak_at[:-width]], means[width:]
        change = before - after
        scores = change / np.sqrt((sigma**2 + _late_variance(signed, width, sigma)) / width)
        enough = (change >= absolute) & (change >= relative * np.abs(before)) & (scores >= z)
        if not enough.any():
            continue
        at = int(np.argmax(np.where(enough, scores, -np.inf)))
        if best is None or scores[at] > best.z:
            early, late = int(peak_at[at]), at + width
            start = early + change_point(signed[early : late + width])
            sign = 1.0 if down else -1.0
            best = Shift(
                sign * float(before[at]),
                sign * float(after[at]),
                float(scores[at]),
                start,
                slice(late, late + width),
                slice(early, early + width),
            )
    return best


def _late_variance(values: Array, width: int, sigma: float) -> Array:
    """(n - 2 width + 1,) noise of every possible later window; narrow windows are not trusted to be quiet."""
    count = len(values) - 2 * width + 1
    if width < 25:
        return np.full(count, sigma**2)
    means = rolling_mean(values, width)[width:]
    squares = rolling_mean(values**2, width)[width:]
    return np.asarray(np.clip(squares - means**2, 0.1 * sigma**2, sigma**2), dtype=np.float64)
