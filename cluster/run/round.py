"""What is gathered about one round on its way through the stages of the loop."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rollout.types import DoubleArray, ScoredGroup


@dataclass
class Round:
    """One turn of the loop."""

    number: int
    """1, 2, ..."""
    row: dict[str, Any] = field(default_factory=dict)
    """Its row of metrics so far."""
    dropped: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    """Groups planned and not trained: key -> (reason, responses)."""
    occurrences: Counter[str] = field(default_factory=Counter)
    """How often each row was asked for in this round."""
    advantages: DoubleArray | None = None
    """(B,) of the batch."""
    started: float = field(default_factory=time.monotonic)
    """When it began."""

    def drop(self, scored: ScoredGroup, reason: str) -> None:
        """Leave a whole group out of training."""
        self.dropped[scored.group.request.key] = (reason, len(scored.total))

    def dropped_by_reason(self) -> Counter[str]:
        """Responses by reason."""
        counts: Counter[str] = Counter()
        for reason, responses in self.dropped.values():
            counts[reason] += responses
        return counts
