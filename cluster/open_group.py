"""A group that is being scored: what has been found out about each of its responses so far."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from rollout.rewards.custom import RewardInput, clean
from rollout.scoring import Scoring, answer_mode
from rollout.types import DoubleArray, Group, UserError


@dataclass
class OpenGroup:
    """A group on its way through the scorer pool."""

    group: Group
    own: str
    """The function that scores it instead of the built-in comparison, if any."""
    outcomes: list[str | None]
    """G verdicts; None while one is not settled."""
    parts: list[dict[str, float] | None]
    """G named parts of the user's function; None where there are none (yet)."""
    pending: int = 0
    """Items that processes still have to answer."""
    timeouts: int = 0
    """Responses that ran into the deadline or the memory limit."""
    began: float = field(default_factory=time.monotonic)

    def input(self, ks: range, scoring: Scoring) -> RewardInput:
        """What a user's function may see of the responses `ks`."""
        prompt, offsets = self.group.request.prompt, self.group.offsets
        return RewardInput(
            prompt=prompt.text,
            answer=prompt.answer,
            row_id=prompt.row_id,
            domain=prompt.domain,
            columns=dict(prompt.columns),
            responses=clean([self.group.texts[k] for k in ks]),
            token_ids=[self.group.token_ids[offsets[k] : offsets[k + 1]].tolist() for k in ks],
            finished=[bool(self.group.finished[k]) for k in ks],
            answer_mode=answer_mode(prompt),
            thinking=scoring.starts_thinking(prompt),
            first=ks.start,
        )

    def names(self, known: frozenset[str] | None) -> frozenset[str]:
        """Names of the parts, which must be those `known` from earlier groups; UserError where they are not."""
        for k, parts in enumerate(self.parts):
            if parts is None:
                continue
            known = frozenset(parts) if known is None else known
            if known != frozenset(parts):
                raise UserError(
                    f"--reward {self.own}, row {self.group.request.prompt.row_id}, response {k}: gave the parts "
                    f"{', '.join(sorted(parts))}; earlier ones were {', '.join(sorted(known))}.\n"
                    f"  Give every part for every response, 0.0 where it does not apply."
                )
        return known or frozenset()

    def arrays(self, names: Collection[str]) -> dict[str, DoubleArray]:
        """The user's parts as (G,) arrays: NaN where the function failed, 0 where an answer ran into its deadline."""
        values: dict[str, DoubleArray] = {}
        for name in sorted(names):
            array = np.zeros(len(self.parts), dtype=np.float64)
            for k, parts in enumerate(self.parts):
                array[k] = parts[name] if parts is not None else np.nan if self.outcomes[k] == "error" else 0.0
            values[name] = array
        return values
