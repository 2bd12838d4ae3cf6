"""Where those go whose node is gone: to nodes that are left, while a run goes on. Pure; each placement has its rule.

Ranks come first, because their number stays as it is: a run without one of them cannot go on. Engines only take what is
free, and one without room waits until there is some (another node that joins); the run goes on with the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import RemoteFailure
from cluster.need_have import table_of
from cluster.placement import PROCESSES_PER_CORE, Bundle, Demand, find
from cluster.resources import Node


class NoRoom(RemoteFailure):
    """A run cannot go on with the nodes that are left; the text has the table of need and have."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What is left when nodes are gone."""

    placement: str
    """cpu, colocated or separate."""
    tensor_parallel: int
    """Devices of one engine."""
    nodes: tuple[Node, ...]
    """The nodes that are left. What the run itself holds on them counts as held."""
    held: Mapping[str, Bundle]
    """Process -> its piece, of those whose node is left."""
    lost: Mapping[str, Bundle]
    """Process -> the piece it had, of those whose node is gone."""

    @property
    def ranks(self) -> list[str]:
        """Ranks without a seat, in their order."""
        return _in_order(name for name in self.lost if name.startswith("learner-"))

    @property
    def engines(self) -> list[str]:
        """Engines without a seat, in their order."""
        return _in_order(name for name in self.lost if name.startswith("engine-"))

    def no_room(self) -> NoRoom:
        """The refusal: a table of what the run needs at least and what there is for it, its own pieces included."""
        ranks = sum(name.startswith("learner-") for name in (*self.held, *self.lost))
        mine = {id(piece): piece for piece in self.held.values()}.values()
        nodes = []
        for node in self.nodes:
            cpus = sum(piece.cpus for piece in mine if piece.node == node.name)
            gpus = sum(piece.gpus for piece in mine if piece.node == node.name)
            left = max(0.0, round(node.busy_cpus - cpus, 4)), max(0, node.busy_gpus - gpus)
            nodes.append(Node(node.name, node.cpus, node.gpus, node.memory, node.host, *left))
        table = table_of(self.placement, find(self.placement), Demand(1, ranks, self.tensor_parallel), nodes)
        first, *others = [*self.ranks, *self.engines]
        who = ", ".join([first, *others]) if len(others) < 4 else f"{first} and {len(others)} others"
        return NoRoom(
            "\n".join(
                [
                    f"The node of {who} is gone, and the others have no room: a run needs all its ranks and an engine.",
                    *table,
                    "  Start a node like the one that was lost, or wait until there is room.",
                ]
            )
        )


@dataclass(frozen=True, slots=True)
class Reseating:
    """Who goes where."""

    fresh: tuple[Bundle, ...]
    """Pieces that are to be reserved, with those who sit in them."""
    guests: Mapping[str, tuple[str, Bundle]]
    """Process -> in whose piece it sits from now on, and what it takes of that (nothing: they share)."""
    given_up: tuple[str, ...] = ()
    """Engines that are well and have to leave their pieces to ranks."""
    unseated: tuple[str, ...] = ()
    """Engines that lost their node and have no room now."""


class Room:
    """What is free on the nodes that are left, while one after the other takes a part of it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        """Nobody has taken anything."""
        self._cpus = {node.name: node.free_cpus for node in nodes}
        self._gpus = Counter({node.name: node.free_gpus for node in nodes})
        self._count: Counter[str] = Counter()
        self._taken: list[Bundle] = []

    def take(self, gpus: int = 0, *, engine: int | None = None, ranks: tuple[int, ...] = ()) -> bool:
        """Seat an engine, a rank, or those who share GPUs, on one node; False when none has room for it.

        On GPUs a node that was begun is filled first, because ranks talk to each other; else cores are shared evenly.
        """
        processes = len(ranks) + (engine is not None)
        fits = [
            name
            for name, free in self._cpus.items()
            if self._gpus[name] >= gpus and free * PROCESSES_PER_CORE >= self._count[name] + processes
        ]
        if not fits:
            return False
        if gpus:
            node = max(fits, key=lambda name: (self._count[name] > 0, self._gpus[name], self._cpus[name]))
        else:
            node = max(fits, key=lambda name: self._cpus[name] / (self._count[name] + processes))
        self._gpus[node] -= gpus
        self._count[node] += processes
        self._taken.append(Bundle(node, gpus, engine=engine, ranks=ranks))
        return True

    @property
    def taken(self) -> tuple[Bundle, ...]:
        """All that was taken, with the cores of each node shared out."""
        return tuple(
            Bundle(b.node, b.gpus, b.engine, b.ranks, core_share(self._cpus[b.node], self._count[b.node]))
            for b in self._taken
        )


def core_share(free: float, processes: int) -> float:
    """Cores of each of some processes that share what is free: at most one, in Ray's steps of 1/10000."""
    return min(1.0, math.floor(free / processes * 10000) / 10000)


def number(name: str) -> int:
    """Of `engine-3` or `learner-3`: 3."""
    return int(name.rsplit("-", 1)[1])


def reseat(loss: Loss) -> Reseating:
    """Who goes where; NoRoom when there is none for all ranks and one engine."""
    return find(loss.placement).reseat(loss)


def room_for(engine: str, placement: str, tensor_parallel: int, nodes: Sequence[Node]) -> Bundle | None:
    """A piece of its own for one engine on the nodes as they are now; None when there is no room."""
    room = Room(nodes)
    gpus = tensor_parallel if find(placement).ON_GPUS else 0
    return room.taken[0] if room.take(gpus, engine=number(engine)) else None


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=number)
