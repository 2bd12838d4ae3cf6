"""Engines and ranks share GPUs and take turns: an engine lives on the GPUs of as many ranks as it has devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster.placement import Asked, Bundle, Demand, engines_that_fit
from cluster.reseating import Loss, Reseating, Room
from cluster.resources import Node

ON_GPUS = True


def counts(asked: Asked, nodes: Sequence[Node]) -> tuple[int, int]:
    """A rank on every GPU and as many engines as fit, but not more of either than there are groups."""
    size = asked.tensor_parallel
    gpus, room = sum(node.free_gpus for node in nodes), max(1, engines_that_fit(size, nodes))
    by_ranks = room if asked.ranks is None else asked.ranks // size
    engines = max(1, min(room, asked.groups, by_ranks)) if asked.engines is None else asked.engines
    ranks = max(1, engines * size, min(gpus, asked.groups)) if asked.ranks is None else asked.ranks
    return engines, ranks


def ranks_beside(engines: int, tensor_parallel: int, nodes: Sequence[Node]) -> range:
    """At least those whose GPUs the engines use, at most one per GPU."""
    if engines > engines_that_fit(tensor_parallel, nodes):
        return range(0)
    return range(engines * tensor_parallel, sum(node.free_gpus for node in nodes) + 1)


def seats(demand: Demand, nodes: Sequence[Node]) -> list[Bundle]:
    """Node after node: first the engines with their ranks, then the ranks whose GPUs no engine uses."""
    size = demand.tensor_parallel
    room = Counter({node.name: node.free_gpus for node in nodes})
    bundles = []
    for engine in range(demand.engines):
        node = next(node.name for node in nodes if room[node.name] >= size)
        room[node] -= size
        bundles.append(Bundle(node, size, engine=engine, ranks=tuple(range(engine * size, (engine + 1) * size))))
    for rank in range(demand.engines * size, demand.ranks):
        node = next(node.name for node in nodes if room[node.name])
        room[node] -= 1
        bundles.append(Bundle(node, 1, ranks=(rank,)))
    return bundles


def reseat(loss: Loss) -> Reseating:
    """GPUs that are free, an engine with its ranks where that goes; it starts again when they are up.

    Where only ranks find room, the engine is left out: it lives on the GPUs of its own ranks.
    """
    room = Room(loss.nodes)
    pieces = {id(piece): piece for piece in loss.lost.values()}.values()
    for piece in sorted(pieces, key=lambda piece: (piece.ranks, -piece.gpus)):
        whole = room.take(piece.gpus, engine=piece.engine, ranks=piece.ranks)
        if not whole and not all(room.take(1, ranks=(rank,)) for rank in piece.ranks):
            raise loss.no_room()
    if not any(name.startswith("engine") for name in loss.held):
        raise loss.no_room()
    return Reseating(room.taken, {}, unseated=tuple(loss.engines))
