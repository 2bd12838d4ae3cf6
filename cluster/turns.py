"""Whose turn it is on a device that engines and ranks share (colocated). Elsewhere nothing has to be handed over.

    learning            engines asleep (no memory), optimizer state on the device
    syncing             engines awake for weights, optimizer state in host memory
    generating          engines awake with their KV cache

So that an engine's weights and its KV cache never stand beside the optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.waiting import fetch_all


@dataclass
class Turns:
    """Hands a shared device over; where it is not shared every method does nothing."""

    shared: bool
    """Engines and ranks use the same devices."""
    seconds: float
    """Deadline of one handing over."""
    asleep: dict[str, str] = field(default_factory=dict)
    """Engine -> what it still lacks: `weights` (and so all) or `kv_cache`; absent when it is awake."""

    def to_ranks(self, learners: list[Any], engines: dict[str, Any]) -> None:
        """Before learning: engines give their memory up, then optimizer state comes back."""
        if not self.shared:
            return
        awake = {name: engine.sleep.remote() for name, engine in engines.items() if name not in self.asleep}
        fetch_all(awake, self.seconds, "putting the engines to sleep")
        self.asleep |= dict.fromkeys(awake, "weights")
        self._ranks(learners, "unpark", "taking the optimizer state back")

    def to_weights(self, learners: list[Any], engines: dict[str, Any]) -> None:
        """Before a sync: optimizer state goes, then engines take back the memory of their weights."""
        if not self.shared:
            return
        self._ranks(learners, "park", "moving the optimizer state to host memory")
        self._wake(engines, "weights", "kv_cache")

    def to_engines(self, engines: dict[str, Any]) -> None:
        """After a sync that was proved: engines take back their KV cache and can answer."""
        if self.shared:
            self._wake(engines, "kv_cache", "")

    def forget(self, name: str) -> None:
        """An engine was replaced: a new one is awake."""
        self.asleep.pop(name, None)

    def _wake(self, engines: dict[str, Any], what: str, still: str) -> None:
        waking = {name: engine.wake.remote(what) for name, engine in engines.items() if self.asleep.get(name) == what}
        fetch_all(waking, self.seconds, f"waking the engines ({what})")
        for name in waking:
            if still:
                self.asleep[name] = still
            else:
                del self.asleep[name]

    def _ranks(self, learners: list[Any], verb: str, what: str) -> None:
        calls = {f"learner-{rank}": getattr(actor, verb).remote() for rank, actor in enumerate(learners)}
        fetch_all(calls, self.seconds, what)


def memory_share(asked: float, shared: bool) -> float:
    """Share of a GPU's memory an engine may plan with: half of it at most beside a rank, whose weights stay there."""
    return min(asked, 0.5) if shared else asked
