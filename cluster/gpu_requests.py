"""What Ray is asked for, so that a process gets the GPUs of its seat. Pure.

Ranks, and engines with GPUs of their own, are given them by Ray. A colocated engine asks for none: it is started after
its ranks, on their node, and is shown the GPUs that they were given (Ray leaves that alone where no GPU is asked for).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.placement import Layout, find


@dataclass(frozen=True, slots=True)
class Request:
    """What an actor is started with."""

    resources: Mapping[str, float]
    """num_cpus or num_gpus."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of its side of the house."""
    node: str = ""
    """Id of the Ray node it must be on; empty where Ray may choose."""


def rank_request(layout: Layout, rank: int) -> Request:
    """For a learner rank."""
    if not find(layout.placement).ON_GPUS:
        return Request({"num_cpus": 1})
    return Request({"num_gpus": layout.of_rank(rank).rank_gpus})


def engine_request(layout: Layout, engine: int, abouts: Mapping[str, Mapping[str, Any]]) -> Request:
    """For an engine. `abouts` is what actors said about themselves (Shell.about), its ranks among them if any.

    Without ranks, as in an evaluation, it takes the GPUs of its seat for itself.
    """
    if not find(layout.placement).ON_GPUS:
        return Request({"num_cpus": 1})
    seat = layout.of_engine(engine)
    ranks = [abouts[f"learner-{rank}"] for rank in seat.ranks if f"learner-{rank}" in abouts]
    if seat.engine_gpus or not ranks:
        return Request({"num_gpus": seat.engine_gpus or seat.gpus})
    gpus = [str(gpu) for about in ranks for gpu in about["gpus"]]
    return Request({"num_cpus": 0, "num_gpus": 0}, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, str(ranks[0]["node"]))
