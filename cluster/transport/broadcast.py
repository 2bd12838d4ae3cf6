"""Weights by broadcast in a process group of learner rank 0 and all devices of all engines: NCCL on GPUs, else gloo."""

from __future__ import annotations

from typing import Any

from cluster.waiting import fetch_all, references

BUCKET_BYTES = 1 << 26


class Broadcast:
    """Faster than the object store for large models; the group is made anew whenever the engines change."""

    def __init__(self) -> None:
        """Not connected."""
        self._members: dict[str, Any] = {}

    def connect(self, learners: list[Any], engines: dict[str, Any], seconds: float) -> None:
        """Open the group: rank 0 of the learner first, then every engine. Nothing to do when these are its members."""
        if engines == self._members:
            return
        self.close()
        finding = fetch_all({"learner-0": learners[0].free_port.remote()}, seconds, "finding a port for the weights")
        host, port = finding["learner-0"]
        devices = fetch_all(
            {name: engine.devices.remote() for name, engine in engines.items()},
            seconds,
            "counting the engines' devices",
        )
        size = 1 + sum(devices.values())
        joining: dict[str, Any] = {"learner-0": learners[0].open_channel.remote(host, port, size, seconds)}
        rank = 1
        for name, engine in engines.items():
            joining[name] = engine.open_channel.remote(host, port, rank, size, seconds)
            rank += devices[name]
        fetch_all(joining, seconds, "opening the weights channel")
        self._members = dict(engines)

    def send(self, learners: list[Any], engines: dict[str, Any], dtype: str, seconds: float) -> int:
        """Rank 0 announces each bucket, the engines start to receive, then it broadcasts.

        A broadcast reaches the whole group, so the group is made of just the engines that are to be reached.
        """
        self.connect(learners, engines, seconds)
        streams = [rank.broadcast.options(num_returns="streaming").remote(dtype, BUCKET_BYTES) for rank in learners]
        loaded = 0
        for announcement in references(streams[0], seconds, "gathering weights"):
            announced = fetch_all({"learner-0": announcement}, seconds, "announcing weights")
            names, shapes = announced["learner-0"]
            counts = fetch_all(
                {
                    name: engine.receive_bucket.remote(list(names), list(shapes), dtype)
                    for name, engine in engines.items()
                },
                seconds,
                "receiving weights",
            )
            loaded += max(counts.values())
        for rank, other in enumerate(streams[1:], start=1):
            for item in references(other, seconds, "gathering weights"):
                fetch_all({f"learner-{rank}": item}, seconds, "gathering weights")
        return loaded

    def close(self) -> None:
        """Leave the group; engines that are gone are left out."""
        for engine in self._members.values():
            engine.close_channel.remote()
        self._members = {}


def make() -> Broadcast:
    """Used by cluster.transport.make."""
    return Broadcast()
