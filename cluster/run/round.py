"""What is gathered about one round on its way through the stages of the loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from learner.types import UpdateReport
from rollout.types import DoubleArray, GroupRequest, ScoredGroup


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
    requests: list[GroupRequest] = field(default_factory=list)
    """The groups it was planned with."""
    kept: dict[int, ScoredGroup] = field(default_factory=dict)
    """Place in `requests` -> the group that is trained there."""
    prompts: Mapping[str, Any] = field(default_factory=dict)
    """Place in the prompts after all of its own were drawn; later rounds may have drawn more."""
    trained: list[ScoredGroup] = field(default_factory=list)
    """Groups that were handed to the learner, in that order."""
    advantages: list[DoubleArray] = field(default_factory=list)
    """One array per batch: the advantages of `trained`."""
    reports: list[UpdateReport] = field(default_factory=list)
    """What the learner did, one per batch."""
    started: float = field(default_factory=time.monotonic)
    """When it began."""

    def groups(self, minibatches: Collection[int]) -> list[ScoredGroup]:
        """The groups of some minibatches, in the order of the requests."""
        found = (self.kept[slot] for slot in sorted(self.kept))
        return [scored for scored in found if scored.group.request.minibatch in minibatches]

    def drop(self, scored: ScoredGroup, reason: str) -> None:
        """Leave a whole group out of training."""
        self.dropped[scored.group.request.key] = (reason, len(scored.total))

    def dropped_by_reason(self) -> Counter[str]:
        """Responses by reason."""
        counts: Counter[str] = Counter()
        for reason, responses in self.dropped.values():
            counts[reason] += responses
        return counts
