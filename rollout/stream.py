"""The order in which a run walks through its prompts: drawn from the seed, and exactly where it was after a resume.

Every domain has its own walk: in each epoch all of its rows once, in a fresh order. Domains take turns so that every
stretch of the stream holds the mixture as closely as whole rows allow, without any dice.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.seeds import stable_hash
from rollout.types import Prompt, UserError

ALL = "*"
"""Name of the one walk when there is no mixture."""
Order = npt.NDArray[np.int64]


def parse_mix(text: str) -> dict[str, float]:
    """Weights out of `name=weight,name=weight`, as shares that sum to 1; empty text gives no mixture."""
    weights: dict[str, float] = {}
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = (part.strip() for part in piece.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not equals or not name or not math.isfinite(weight) or weight < 0:
            raise UserError(f"--data.mix {text}: {piece!r} is not name=weight with a weight of 0 or more.")
        if name in weights:
            raise UserError(f"--data.mix {text}: {name!r} has two weights.")
        weights[name] = weight
    total = sum(weights.values())
    if weights and not total:
        raise UserError(f"--data.mix {text}: at least one weight must be above 0.")
    return {name: weight / total for name, weight in weights.items()}


class PromptStream:
    """An endless walk through the prompts whose place can be saved."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True, mix: str = "") -> None:
        """Without `shuffle` rows come in the order of their source; `mix` is the text of --data.mix."""
        if not prompts:
            raise UserError("There are no prompts to train on.")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._shares, self._rows = self._walks(parse_mix(mix), mix)
        self._taken = dict.fromkeys(self._rows, 0)
        self._orders: dict[str, tuple[int, Order]] = {}
        self._digest = self._fingerprint(mix)

    def _walks(self, mix: dict[str, float], text: str) -> tuple[dict[str, float], dict[str, list[int]]]:
        if not mix:
            return {ALL: 1.0}, {ALL: list(range(len(self._prompts)))}
        rows: dict[str, list[int]] = {name: [] for name in sorted(mix)}
        known = sorted({prompt.domain for prompt in self._prompts})
        if set(mix) != set(known):
            strange = ", ".join(sorted(set(mix) - set(known))) or "none"
            missing = ", ".join(sorted(set(known) - set(mix))) or "none"
            raise UserError(
                f"--data.mix {text}: the prompts have the domains {', '.join(known)}.\n"
                f"  Weights without prompts: {strange}. Domains without a weight: {missing} (weight 0 leaves one out)."
            )
        for index, prompt in enumerate(self._prompts):
            rows[prompt.domain].append(index)
        return {name: mix[name] for name in rows if mix[name]}, {name: rows[name] for name in rows if mix[name]}

    def _fingerprint(self, mix: str) -> str:
        """Everything the order depends on, so that a saved place is not applied to something else."""
        state = hashlib.sha256(repr((self._seed, self._shuffle, sorted(parse_mix(mix).items()))).encode())
        for prompt in self._prompts:
            state.update("\x1f".join((prompt.row_id, prompt.domain)).encode() + b"\x1e")
        return state.hexdigest()

    @property
    def size(self) -> int:
        """Distinct rows the stream draws from."""
        return sum(len(rows) for rows in self._rows.values())

    @property
    def epoch(self) -> float:
        """How often the rows have been walked through, on average."""
        return sum(self._taken.values()) / self.size

    def take(self, n: int, already: Mapping[str, int] | None = None) -> list[tuple[Prompt, int]]:
        """The next `n` (prompt, occurrence).

        Occurrence counts the repetitions of a row within this call, or within the round when `already` says how often
        each row id has been taken in it before (refills, inner updates).
        """
        counts: Counter[str] = Counter(already or {})
        chosen: list[tuple[Prompt, int]] = []
        for _ in range(n):
            prompt = self._prompts[self._next()]
            chosen.append((prompt, counts[prompt.row_id]))
            counts[prompt.row_id] += 1
        return chosen

    def _next(self) -> int:
        total = sum(self._taken.values()) + 1
        name = max(self._shares, key=lambda domain: (self._shares[domain] * total - self._taken[domain], domain))
        epoch, position = divmod(self._taken[name], len(self._rows[name]))
        self._taken[name] += 1
        return self._rows[name][int(self._order(name, epoch)[position])]

    def _order(self, name: str, epoch: int) -> Order:
        """Order of one epoch of one walk.

        Sorting raw output of the generator, not `permutation`: numpy promises the raw bits of PCG64 for ever, but not
        what it makes of them, and a run may be resumed under another numpy.
        """
        cached = self._orders.get(name)
        if cached is not None and cached[0] == epoch:
            return cached[1]
        size = len(self._rows[name])
        order: Order = np.arange(size, dtype=np.int64)
        if self._shuffle:
            generator = np.random.PCG64(stable_hash("order", self._seed, name, epoch))
            order = np.argsort(generator.random_raw(size), kind="stable")
        self._orders[name] = (epoch, order)
        return order

    def state(self) -> dict[str, Any]:
        """The place, as JSON: what has been taken of each walk, and what the walks are over."""
        return {"taken": dict(self._taken), "digest": self._digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place; one that belongs to other prompts, another seed or mixture is refused."""
        taken = state.get("taken")
        if state.get("digest") != self._digest or not isinstance(taken, Mapping) or set(taken) != set(self._rows):
            raise UserError(
                "The saved place in the prompts belongs to other prompts, another order of them, another --seed or "
                "another --data.mix: continuing there would skip or repeat rows unnoticed.\n"
                "  Resume with the prompts the run was started with, or start a new run from its model directory."
            )
        self._taken = {name: int(count) for name, count in taken.items()}
