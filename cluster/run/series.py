"""Metric rows as arrays, as the doctor's rules read them.

Two kinds of runs look very different and need different windows. With hundreds of prompts per round a metric moves by
a few percent from round to round; with one prompt per round (the cheap scheme) the reward jumps between 0 and 1 and
two thirds of the rounds carry no signal at all. `RunView.single` tells them apart; windows and noise floors follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.run.robust import Array, change_point, noise, rolling_median

Row = Mapping[str, Any]

SPREAD_KEYS = ("group/zero_signal", "advantage/std", "reward/std")
ACCURACY_KEYS = ("reward/correctness", "reward/total")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the run promised, for the rules that judge against a bound; None where unknown."""

    max_lag: int = 1
    """Weights versions a response may be behind (--cluster.max-lag)."""
    max_length: int | None = None
    """Longest response allowed, in tokens (--rollout.max-new-tokens)."""
    vocabulary: int | None = None
    """V; the entropy of a uniform policy is ln V."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric where it is known: finite values and their rounds, in order."""

    key: str
    rounds: npt.NDArray[np.int64]
    values: Array

    def __len__(self) -> int:
        return len(self.values)


class RunView:
    """Metric rows of one run as columns; what rules read."""

    def __init__(self, rows: Sequence[Row], limits: Limits) -> None:
        """Order rows by round; the row of round 0 (evaluation before any update) is a row like any other."""
        numbered = [(int(row["round"]) if "round" in row else at + 1, row) for at, row in enumerate(rows)]
        numbered.sort(key=lambda pair: pair[0])
        self.rows = [row for _, row in numbered]
        self.rounds = np.asarray([number for number, _ in numbered], dtype=np.int64)
        self.limits = limits
        self._raw: dict[str, Array] = {}
        self._columns: dict[str, Array] = {}
        self._series: dict[str, Series] = {}
        self._noise: dict[str, float] = {}
        self.known_levels: dict[str, tuple[Series, tuple[float, Array, int]]] = {}
        """What `levels` has found, by metric."""

    def raw(self, key: str) -> Array:
        """(rows,) the metric as logged, NaN where absent; infinities kept."""
        if key not in self._raw:
            cells = [row.get(key) for row in self.rows]
            try:
                column = np.array(cells, dtype=np.float64)
            except (TypeError, ValueError):
                numbers = [cell if isinstance(cell, int | float) else math.nan for cell in cells]
                column = np.array(numbers, dtype=np.float64)
            self._raw[key] = column
        return self._raw[key]

    def column(self, key: str) -> Array:
        """(rows,) the metric with NaN wherever it is absent or not finite."""
        if key not in self._columns:
            column = self.raw(key)
            self._columns[key] = np.where(np.isfinite(column), column, np.nan)
        return self._columns[key]

    def series(self, *keys: str) -> Series:
        """The first of the metrics that has any finite value."""
        for key in keys:
            if key not in self._series:
                column = self.column(key)
                known = ~np.isnan(column)
                self._series[key] = Series(key, self.rounds[known], column[known])
            if len(self._series[key]):
                return self._series[key]
        return self._series[keys[0]]

    def has(self, key: str) -> bool:
        """Whether any row has a finite value of the metric."""
        return len(self.series(key)) > 0

    @cached_property
    def single(self) -> bool:
        """One prompt (or very few) per round, so that rewards of single rounds are mostly noise."""
        sizes = self.series("responses").values
        if len(sizes):
            return float(np.median(sizes)) <= 64
        if self._few_responses():
            return True
        shares = self.series("group/zero_signal").values
        if len(shares) >= 3 and np.ptp(shares) > 0:
            return any(_whole(shares * prompts) for prompts in (1, 2, 3, 4))
        rewards = self.series("reward/std").values
        if len(rewards) >= 10 and not len(shares):
            # Of many prompts some always have spread; of one or two, rounds with and without any take turns.
            turns = int(np.sum(np.diff((rewards > 1e-9).astype(int)) > 0))
            if turns >= max(2, len(rewards) // 20):
                return True
        spread = self.series("advantage/std").values
        live = spread[spread > 1e-3]
        # With advantages divided by the group's own std, their std is the same in every round that has any signal.
        return len(spread) >= 3 and (len(live) == 0 or float(np.ptp(live)) <= 0.01 * float(live.max()))

    def _few_responses(self) -> bool:
        """Whether shares of responses come in so coarse steps that there can be 64 of them at most."""
        for key in ("reward/correctness", "reward/format", "response/truncated"):
            shares = self.series(key).values
            parts = np.unique(shares[np.abs(shares - np.round(shares)) > 2e-3])
            if len(parts) >= 3 and any(_whole(parts * count) for count in range(2, 65)):
                return True
        return False

    @cached_property
    def silent(self) -> Array:
        """(rows,) 1 where (nearly) no group had any reward spread, 0 where some had, NaN where unknown."""
        silent = np.full(len(self.rows), np.nan)
        reward_std = self.column("reward/std")
        usual = np.nanmedian(reward_std[reward_std > 1e-6]) if (reward_std > 1e-6).any() else 0.0
        tests = (
            (reward_std, reward_std <= max(1e-6, 0.05 * float(usual))),
            (self.column("advantage/std"), self.column("advantage/std") <= 1e-3),
            (self.column("group/zero_signal"), self.column("group/zero_signal") >= 0.95),
        )
        for column, test in tests:
            silent = np.where(np.isnan(column), silent, test.astype(np.float64))
        return silent

    @cached_property
    def accuracy(self) -> Series:
        """Training accuracy: the correctness part, or the whole reward where parts are not logged."""
        return self.series(*ACCURACY_KEYS)

    @cached_property
    def ceiling(self) -> float:
        """What a fully solved task would score on `accuracy`, as far as the log shows."""
        return max(1.0, float(self.accuracy.values.max())) if len(self.accuracy) else 1.0

    def reward_floor(self, scale: float = 1.0) -> float:
        """Smallest believable round-to-round deviation of a mean reward, from the number of responses behind it."""
        sizes = self.series("responses").values
        if len(sizes):
            return scale * max(0.02, 0.45 / math.sqrt(max(1.0, float(np.median(sizes)) / 16)))
        return scale * (0.3 if self.single else 0.03)

    def reward_widths(self, count: int) -> tuple[int, ...]:
        """Window widths for means of rewards in a series of `count` values.

        With one prompt per round, windows below 50 fall by half by chance. With many, a window is about a tenth of
        the run at least, so that a passing dip of a long run is not taken for a collapse.
        """
        if self.single:
            return (50, 100, 150)
        least = min(20, max(3 if count >= 16 else 2, count // 12))
        return (least, 2 * least, 4 * least)

    def width(self, count: int) -> int:
        """Width of the rolling median for a series of `count` values."""
        return min(25, max(8, count // 4)) if self.single else (2 if count < 6 else 3 if count < 40 else 5)

    def early(self, count: int) -> int:
        """How many of `count` first values make the starting level."""
        return min(50, max(10, count // 5)) if self.single else min(20, max(3 if count >= 6 else 2, count // 5))

    def mean_near(self, series: Series, first: int, last: int) -> tuple[float, float]:
        """Mean of a series over rounds first..last and its standard error; NaN when no value falls there."""
        inside = series.values[(series.rounds >= first) & (series.rounds <= last)]
        if not len(inside):
            return math.nan, math.nan
        if series.key not in self._noise:
            self._noise[series.key] = max(noise(series.values), self.reward_floor())
        return float(inside.mean()), self._noise[series.key] / math.sqrt(len(inside))


def _whole(values: Array) -> bool:
    return bool(np.all(np.abs(values - np.round(values)) <= 2e-3))


def levels(view: RunView, series: Series) -> tuple[float, Array, int]:
    """Starting level, rolling medians and their width; an empty array when the series is too short to judge."""
    known = view.known_levels.get(series.key)
    if known is not None and known[0] is series:
        return known[1]
    count = len(series)
    width = view.width(count)
    if count < (3 if view.single else 2) * width:
        found = math.nan, np.empty(0), width
    else:
        found = float(np.median(series.values[: view.early(count)])), rolling_median(series.values, width), width
    view.known_levels[series.key] = (series, found)
    return found


def onset(series: Series, window: int, width: int, limit: float) -> int:
    """Round in which the level moved across `limit`, where `window` is the first window whose median is beyond it.

    The change point around that window; values are cut at twice (or half) the limit so that one extreme value does
    not decide, and single noisy values long before do not either.
    """
    start, stop = max(0, window - width), min(len(series), window + 2 * width)
    values = np.clip(series.values[start:stop], 0.5 * limit, 2 * limit)
    at = start + change_point(values) if np.ptp(values) > 0 else window
    return int(series.rounds[min(at, len(series) - 1)])


def number(value: float) -> str:
    """A value as people read it: three significant digits, no exponent where it can be avoided."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e6):
        return f"{value:.2e}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def went(before: float, after: float) -> str:
    """`0.6 -> 0.02`."""
    return f"{number(before)} -> {number(after)}"
