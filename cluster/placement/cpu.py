"""No GPUs: engines and ranks share the cores of a node and take turns, one thread each.

A node is filled with one engine and one rank per core before the next one is begun; when all are full, what is left is
spread evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cluster.placement import PROCESSES_PER_CORE, Asked, Bundle, Demand
from cluster.reseating import Loss, Reseating, Room, number
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


def reseat(loss: Loss) -> Reseating:
    """Cores that are free first. Ranks without any share those of the run, and so does an engine if it is the last."""
    room, unseated = Room(loss.nodes), []
    guests: dict[str, tuple[str, Bundle]] = {}

    def beside(name: str) -> None:
        host = _least_crowded(loss, guests)
        if host is None:
            raise loss.no_room()
        node, rank = loss.held[host].node, name.startswith("learner")
        guests[name] = host, Bundle(node, 0, None if rank else number(name), (number(name),) if rank else (), 0.0)

    for name in loss.ranks:
        if not room.take(ranks=(number(name),)):
            beside(name)
    left = any(name.startswith("engine") for name in loss.held)
    for name in loss.engines:
        if room.take(engine=number(name)):
            left = True
        else:
            unseated.append(name)
    if not left and unseated:
        beside(unseated.pop(0))
    return Reseating(room.taken, guests, unseated=tuple(unseated))


def _least_crowded(loss: Loss, guests: Mapping[str, tuple[str, Bundle]]) -> str | None:
    """Someone of the run on the node where the fewest of its processes share a core; None when all are full."""
    pieces = [*loss.held.values(), *(piece for _, piece in guests.values())]

    def crowd(node: str) -> float:
        mine = [piece for piece in pieces if piece.node == node]
        return len(mine) / (sum(piece.cpus for piece in mine) or 1e-9)

    hosts = [name for name, piece in loss.held.items() if crowd(piece.node) < PROCESSES_PER_CORE]
    return min(hosts, key=lambda name: crowd(loss.held[name].node), default=None)


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
