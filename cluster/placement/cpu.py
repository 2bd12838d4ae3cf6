"""No GPUs: engines and ranks share the cores of a node and take turns, one thread each.

A node is filled with one engine and one rank per core before the next one is begun; when all are full, what is left is
spread evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster.placement import PROCESSES_PER_CORE, Asked, Bundle, Demand
from cluster.resources import Node

ON_GPUS = False


def counts(asked: Asked, nodes: Sequence[Node]) -> tuple[int, int]:
    """Up to two of each: on a small model a third costs more to start than it gives."""
    usual = max(1, min(2, int(sum(node.free_cpus for node in nodes)), asked.groups))
    return asked.engines or usual, asked.ranks or usual


def ranks_beside(engines: int, tensor_parallel: int, nodes: Sequence[Node]) -> range:
    """As many as eight processes per core allow."""
    room = [int(PROCESSES_PER_CORE * node.free_cpus) for node in nodes]
    if engines > sum(places // tensor_parallel for places in room):
        return range(0)
    return range(1, sum(room) - engines * tensor_parallel + 1)


def seats(demand: Demand, nodes: Sequence[Node]) -> list[Bundle]:
    """Engine i and rank i beside each other: both kinds go round the nodes in the same way."""
    room = Counter({node.name: int(PROCESSES_PER_CORE * node.free_cpus) for node in nodes})
    engines = _spread(demand.engines, demand.tensor_parallel, nodes, room)
    ranks = _spread(demand.ranks, 1, nodes, room)
    return [Bundle(node, 0, engine=engine) for engine, node in enumerate(engines)] + [
        Bundle(node, 0, ranks=(rank,)) for rank, node in enumerate(ranks)
    ]


def _spread(count: int, size: int, nodes: Sequence[Node], room: Counter[str]) -> list[str]:
    """The node of each of `count` processes of one kind; takes their places out of `room`."""
    load: Counter[str] = Counter()
    chosen = []
    for _ in range(count):
        open_ = [node for node in nodes if room[node.name] >= size] or list(nodes)
        node = min(open_, key=lambda node: max(1.0, (load[node.name] + size) / (node.free_cpus or 1e-9)))
        load[node.name] += size
        room[node.name] -= size
        chosen.append(node.name)
    return chosen
