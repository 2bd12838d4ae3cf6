"""All rollout engines as one: groups in, groups out as they finish; the work of a lost engine is done by the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.errors import RemoteFailure
from cluster.waiting import ActorLost, stream
from rollout.engine import Sampling
from rollout.types import Group, GroupRequest

MAX_RESTARTS = 3


class RolloutPool:
    """Shares requests out over the engines, whole groups only."""

    def __init__(self, engines: dict[str, Any], replace: Callable[[str], Any], heartbeat: float) -> None:
        """`engines` by name; `replace(name)` gives a new engine that already holds the current weights."""
        self.engines = engines
        self.restarts = 0
        self.on_loss: Callable[[ActorLost], None] = lambda lost: None
        """Told of every engine that is lost, before it is replaced."""
        self.tokens = 0
        self._replace = replace
        self._heartbeat = heartbeat

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[list[Group]]:
        """Groups as they finish, in any order, every one of them; an empty list says that there is none yet.

        A group that was lost with its engine is generated again with the same seeds, so it is the same group.
        """
        names = list(self.engines)
        work = {name: {r.key: r for r in requests[index :: len(names)]} for index, name in enumerate(names)}
        streams = {name: self._ask(name, share, sampling) for name, share in work.items() if share}
        attempts = dict.fromkeys(names, 0)
        made: dict[str, int] = {}
        while streams:
            try:
                for name, item in stream(streams, self._heartbeat):
                    if not name:
                        yield []
                        continue
                    groups, tokens = item
                    made[name] = tokens
                    self.tokens = sum(made.values())
                    yield [self._accept(group, work[name], attempts[name]) for group in groups]
                streams = {}
            except ActorLost as lost:
                self._recover(lost)
                attempts[lost.name] += 1
                streams[lost.name] = self._ask(lost.name, work[lost.name], sampling)
        missing = sum(len(share) for share in work.values())
        if missing:
            raise RemoteFailure(f"{missing} groups were asked for and never came back")

    def _ask(self, name: str, share: dict[tuple[str, int], GroupRequest], sampling: Sampling) -> Any:
        return self.engines[name].generate.options(num_returns="streaming").remote(list(share.values()), sampling)

    def _accept(self, group: Group, share: dict[tuple[str, int], GroupRequest], attempt: int) -> Group:
        request = share.pop(group.request.key)
        if len(group.lengths) != request.group_size:
            raise RemoteFailure(f"row {request.prompt.row_id}: {len(group.lengths)} of {request.group_size} responses")
        return dataclasses.replace(group, attempt=attempt)

    def _recover(self, lost: ActorLost) -> None:
        """Replace a lost engine, a bounded number of times; the others go on meanwhile."""
        self.restarts += 1
        self.on_loss(lost)
        if self.restarts > MAX_RESTARTS:
            raise RemoteFailure(f"engines were lost {self.restarts} times in this run, the last time {lost}")
        self.engines[lost.name] = self._replace(lost.name)
