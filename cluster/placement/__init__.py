"""Where engines and ranks sit. One file is one placement; it is found by its file name.

A placement is pure and has `ON_GPUS`, whether its processes take GPUs, and four functions:

    counts(asked, nodes) -> (engines, ranks)           how many of each when the command line leaves it open
    ranks_beside(engines, tensor_parallel, nodes)      the numbers of ranks that fit beside so many engines, a range;
                                                       an empty one when the engines alone do not fit
    seats(demand, nodes) -> bundles                    who sits where, for a demand that fits
    reseat(loss) -> reseating                          who goes where when a node is gone (cluster/reseating.py)
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.errors import PlanError
from cluster.need_have import does_not_fit, too_few_cores
from cluster.resources import Node

if TYPE_CHECKING:
    from cluster.reseating import Loss, Reseating

PROCESSES_PER_CORE = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says about the numbers of processes."""

    engines: int | None
    """--rollout.engines, if given."""
    ranks: int | None
    """--learner.ranks, if given."""
    tensor_parallel: int
    """Devices of one engine."""
    groups: int
    """P, prompts per round: a group is not shared between engines, so more engines than groups would idle."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed."""

    engines: int
    """Rollout engines."""
    ranks: int
    """Learner processes."""
    tensor_parallel: int
    """Devices of one engine, all within one node."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is reserved as one piece on one node, and who sits in it."""

    node: str
    """Name of the node."""
    gpus: int
    """Whole GPUs of the piece. Ranks take one each; an engine takes what is left, or shares those of the ranks."""
    engine: int | None = None
    """The engine in it."""
    ranks: tuple[int, ...] = ()
    """The ranks in it."""
    share: float = 1.0
    """Cores of each process: at most one, less where more processes than cores share a node."""

    @property
    def processes(self) -> int:
        """How many actors sit in it."""
        return len(self.ranks) + (self.engine is not None)

    @property
    def cpus(self) -> float:
        """Cores of the piece."""
        return round(self.share * self.processes, 4)

    @property
    def engine_gpus(self) -> int:
        """GPUs that belong to the engine alone; 0 when it shares those of the ranks (or needs none)."""
        return self.gpus - len(self.ranks) if self.engine is not None and self.gpus else 0

    @property
    def rank_gpus(self) -> int:
        """GPUs of each rank."""
        return 1 if self.gpus else 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every engine and every rank sits."""

    placement: str
    """cpu, colocated or separate."""
    bundles: tuple[Bundle, ...]
    """All pieces, engines and ranks in order of their numbers."""

    def of_engine(self, engine: int) -> Bundle:
        """The piece an engine sits in."""
        return next(bundle for bundle in self.bundles if bundle.engine == engine)

    def of_rank(self, rank: int) -> Bundle:
        """The piece a rank sits in."""
        return next(bundle for bundle in self.bundles if rank in bundle.ranks)

    @property
    def engines(self) -> tuple[int, ...]:
        """Numbers of the engines that have a seat."""
        return tuple(sorted(bundle.engine for bundle in self.bundles if bundle.engine is not None))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of the ranks that have a seat."""
        return tuple(sorted(rank for bundle in self.bundles for rank in bundle.ranks))


class Placement(Protocol):
    """What a file of this folder offers."""

    ON_GPUS: bool
    """Whether processes take GPUs."""

    def counts(self, asked: Asked, nodes: Sequence[Node]) -> tuple[int, int]:
        """Engines and ranks."""

    def ranks_beside(self, engines: int, tensor_parallel: int, nodes: Sequence[Node]) -> range:
        """Numbers of ranks that fit."""

    def seats(self, demand: Demand, nodes: Sequence[Node]) -> list[Bundle]:
        """Who sits where."""

    def reseat(self, loss: Loss) -> Reseating:
        """Who goes where when nodes are gone; NoRoom when it cannot be."""


def names() -> tuple[str, ...]:
    """Placements there are."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find(name: str) -> Placement:
    """The placement of that name, from its own file."""
    if name not in names():
        raise PlanError(f"--cluster.placement {name}: there is no such placement. Choose one of: {', '.join(names())}.")
    module: Any = importlib.import_module(f"{__name__}.{name}")
    placement: Placement = module
    return placement


def lay_out(name: str, demand: Demand, nodes: Sequence[Node]) -> Layout:
    """Seats for everyone, or PlanError with what is needed, what there is, and the nearest that fits."""
    placement = find(name)
    if demand.ranks not in placement.ranks_beside(demand.engines, demand.tensor_parallel, nodes):
        raise does_not_fit(name, placement, demand, nodes)
    return Layout(name, with_cores(name, placement.seats(demand, nodes), nodes))


def with_cores(name: str, bundles: Sequence[Bundle], nodes: Sequence[Node]) -> tuple[Bundle, ...]:
    """The bundles with the cores of each node shared out; PlanError where there would be too little of a core."""
    processes: Counter[str] = Counter()
    for bundle in bundles:
        processes[bundle.node] += bundle.processes
    shares = {}
    for node in nodes:
        count = processes[node.name]
        if count > PROCESSES_PER_CORE * node.free_cpus:
            raise too_few_cores(name, node, count, PROCESSES_PER_CORE)
        # Ray counts in steps of 1/10000.
        shares[node.name] = min(1.0, math.floor(node.free_cpus / max(1, count) * 10000) / 10000)
    return tuple(dataclasses.replace(bundle, share=shares[bundle.node]) for bundle in bundles)


def engines_that_fit(tensor_parallel: int, nodes: Sequence[Node]) -> int:
    """Engines on GPUs, each within one node."""
    return sum(node.free_gpus // tensor_parallel for node in nodes)
