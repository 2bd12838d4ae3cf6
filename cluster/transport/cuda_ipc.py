"""Weights through the memory of a GPU that rank and engine share (colocated): handles travel, tensors do not.

Every rank gathers each bucket into a buffer on its own GPU and gives out a handle; an engine opens the one of its GPU
and copies. The next bucket is asked for only when all engines have copied the last one.
"""

from __future__ import annotations

import functools
from typing import Any

from cluster.waiting import fetch_all
from rollout.types import SharedBucket

BUCKET_BYTES = 1 << 28


class CudaIpc:
    """Nothing lasts for longer than one sync."""

    def connect(self, learners: list[Any], engines: dict[str, Any], seconds: float) -> None:
        """Nothing to set up."""

    def send(self, learners: list[Any], engines: dict[str, Any], dtype: str, seconds: float) -> int:
        """Bucket by bucket, all ranks and then all engines."""
        ranks = {f"learner-{rank}": actor for rank, actor in enumerate(learners)}
        opening = {name: actor.begin_sharing.remote(dtype, BUCKET_BYTES) for name, actor in ranks.items()}
        fetch_all(opening, seconds, "gathering weights")
        loaded = 0
        while True:
            gathering = {name: actor.next_shared.remote() for name, actor in ranks.items()}
            shared = list(fetch_all(gathering, seconds, "gathering weights").values())
            if shared[0] is None:
                return loaded
            bucket = functools.reduce(SharedBucket.joined, shared)
            loading = {name: engine.load_shared.remote(bucket) for name, engine in engines.items()}
            loaded += max(fetch_all(loading, seconds, "loading weights").values())

    def close(self) -> None:
        """Nothing to undo."""


def make() -> CudaIpc:
    """Used by cluster.transport.make."""
    return CudaIpc()
