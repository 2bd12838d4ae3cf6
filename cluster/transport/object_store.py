"""Weights through Ray's object store: no process group, so engines can come and go; one copy per node."""

from __future__ import annotations

from typing import Any

from cluster.waiting import fetch_all, references

BUCKET_BYTES = 1 << 28


class ObjectStore:
    """Buckets are owned by the driver, which passes references on and never holds the weights itself."""

    def connect(self, learners: list[Any], engines: dict[str, Any], seconds: float) -> None:
        """Nothing to set up."""

    def send(self, learners: list[Any], engines: dict[str, Any], dtype: str, seconds: float) -> int:
        """Rank 0's buckets to every engine, in order; the other ranks only take part in the gathering."""
        # At most two buckets are in the store at once, however large the model.
        how = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2}
        streams = [rank.outgoing.options(**how).remote(dtype, BUCKET_BYTES) for rank in learners]
        loaded = 0
        for bucket in references(streams[0], seconds, "gathering weights"):
            loading = {name: engine.load_bucket.remote(bucket) for name, engine in engines.items()}
            counts = fetch_all(loading, seconds, "loading weights")
            loaded += max(counts.values())
        for rank, other in enumerate(streams[1:], start=1):
            for item in references(other, seconds, "gathering weights"):
                fetch_all({f"learner-{rank}": item}, seconds, "gathering weights")
        return loaded

    def close(self) -> None:
        """Nothing to undo."""


def make() -> ObjectStore:
    """Used by cluster.transport.make."""
    return ObjectStore()
