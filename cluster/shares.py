"""Which engine does which group: the accounts of one generation. Pure; every group comes out exactly once.

Every group is with an engine, in the queue, or answered. The queue holds what was lost with an engine, and copies of
what a slow one has not done yet: the first answer counts, later ones are discarded. Seeds do not depend on the engine,
so a group is the same group whoever answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from cluster.errors import BrokenPromise
from rollout.types import Group, GroupRequest

Key = tuple[str, int]


class Shares:
    """The groups of one generation."""

    def __init__(self, requests: Sequence[GroupRequest]) -> None:
        """All of `requests` are open and with nobody; their order is kept in what is handed out."""
        self._open = {request.key: request for request in requests}
        self._queue: dict[Key, None] = dict.fromkeys(self._open)
        self._held: dict[str, dict[Key, int]] = {}
        """Engine -> what it was asked for and has not answered, with the number of the attempt."""
        self._asked: Counter[Key] = Counter()
        self.discarded = 0
        """Answers that came second."""
        if len(self._open) != len(requests):
            raise BrokenPromise(f"{len(requests) - len(self._open)} groups were requested twice in one generation")

    @property
    def open(self) -> int:
        """Groups without an answer."""
        return len(self._open)

    @property
    def queued(self) -> int:
        """Groups that wait for an engine that has time."""
        return len(self._queue)

    def deal(self, engines: Sequence[str]) -> dict[str, list[GroupRequest]]:
        """Everything in the queue, shared out evenly in turns: the first requests are done first everywhere."""
        keys = list(self._queue)
        parts = {name: self._give(name, keys[index :: len(engines)]) for index, name in enumerate(engines)}
        return {name: part for name, part in parts.items() if part}

    def take(self, engine: str, among: int) -> list[GroupRequest]:
        """An idle engine's part of the queue, when `among` engines (itself included) have or will have time for it.

        From the end, where those who hold the originals come last.
        """
        keys = [key for key in self._queue if key not in self._held.get(engine, {})]
        count = math.ceil(len(keys) / max(1, among))
        return self._give(engine, keys[len(keys) - count :])

    def answer(self, engine: str, group: Group) -> Group | None:
        """A group that came from an engine, with its attempt; None when it was answered before. BrokenPromise for one
        that was never asked of this engine, or that is not whole.
        """
        key = group.request.key
        attempt = self._held.get(engine, {}).pop(key, None)
        if attempt is None:
            raise BrokenPromise(f"{engine} answered row {key[0]} (occurrence {key[1]}), which it was not asked for")
        if len(group.lengths) != group.request.group_size:
            raise BrokenPromise(
                f"{engine} gave {len(group.lengths)} of {group.request.group_size} responses to row {key[0]}"
            )
        if key not in self._open:
            self.discarded += 1
            return None
        asked = self._open[key]
        if (group.request.round, group.request.seed) != (asked.round, asked.seed):
            raise BrokenPromise(f"{engine} answered row {key[0]} with a group of another round or seed")
        del self._open[key]
        self._queue.pop(key, None)
        return dataclasses.replace(group, attempt=attempt)

    def lost(self, engine: str) -> int:
        """An engine will not answer any more: what only it had goes back into the queue. Returns how many."""
        mine = self._held.pop(engine, {})
        elsewhere = {key for held in self._held.values() for key in held}
        orphans = [key for key in mine if key in self._open and key not in elsewhere and key not in self._queue]
        self._queue |= dict.fromkeys(orphans)
        return len(orphans)

    def offer(self, engine: str) -> int:
        """Put copies of what a slow engine has not answered into the queue; returns how many."""
        copies = [key for key in self._held.get(engine, {}) if key in self._open and key not in self._queue]
        self._queue |= dict.fromkeys(copies)
        return len(copies)

    def unanswered(self, engine: str) -> int:
        """Groups this engine was asked for and has not answered."""
        return len(self._held.get(engine, {}))

    def wanted(self, engine: str) -> int:
        """Those of them that nobody has answered."""
        return sum(key in self._open for key in self._held.get(engine, {}))

    def _give(self, engine: str, keys: Iterable[Key]) -> list[GroupRequest]:
        held = self._held.setdefault(engine, {})
        part = []
        for key in keys:
            self._queue.pop(key, None)
            held[key] = self._asked[key]
            self._asked[key] += 1
            part.append(self._open[key])
        return part
