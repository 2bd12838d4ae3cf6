"""How long responses are: a distribution with a given mean, cut off at the longest response allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["lognormal", "uniform", "fixed"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """What lengths are drawn from."""

    kind: Kind
    """lognormal, uniform (1 to twice the mean, at most the longest) or fixed."""
    mean: float
    """Tokens of a response on average, those that are cut off included."""
    longest: int
    """Where a response is cut off."""
    spread: float = 0.8
    """Standard deviation of the logarithm."""
    shared: float = 0.5
    """Share of that variance that lies between prompts: the responses of a group resemble each other."""

    def draw(self, groups: int, size: int, seed: int) -> npt.NDArray[np.int64]:
        """(groups, size) lengths in tokens, the same for the same seed."""
        random = np.random.Generator(np.random.PCG64(seed))
        if self.kind == "fixed":
            return np.full((groups, size), round(self.mean), dtype=np.int64)
        if self.kind == "uniform":
            most = min(self.longest, round(2 * self.mean))
            return random.integers(1, most, size=(groups, size), endpoint=True, dtype=np.int64)
        between = random.standard_normal((groups, 1)) * math.sqrt(self.shared)
        within = random.standard_normal((groups, size)) * math.sqrt(1 - self.shared)
        drawn = np.exp(self._location() + self.spread * (between + within))
        cut: npt.NDArray[np.int64] = np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)
        return cut

    def _location(self) -> float:
        """Mean of the logarithm for which the mean after cutting off is `mean`."""
        low, high = math.log(max(self.mean, 1.0)) - 10, math.log(self.longest) + 10
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return (low + high) / 2

    def _cut_mean(self, location: float) -> float:
        """E[min(X, longest)] of a lognormal X."""
        edge = (math.log(self.longest) - location) / self.spread
        body = math.exp(location + self.spread**2 / 2) * _normal(edge - self.spread)
        return body + self.longest * (1 - _normal(edge))


def _normal(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
