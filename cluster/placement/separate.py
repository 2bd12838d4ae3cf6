"""Two pools of GPUs: engines on one, ranks on the other, so that both can work at the same time.

Ranks talk to each other in every microbatch and engines do not, so ranks get whole nodes as far as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster.placement import Asked, Bundle, Demand, engines_that_fit
from cluster.reseating import Loss, Reseating, Room, core_share, number
from cluster.resources import Node

ON_GPUS = True


def counts(asked: Asked, nodes: Sequence[Node]) -> tuple[int, int]:
    """Half of the GPUs for the ranks, the others for engines; not more of either than there are groups."""
    size = asked.tensor_parallel
    gpus, room = sum(node.free_gpus for node in nodes), max(1, engines_that_fit(size, nodes))
    if asked.engines is None:
        left = gpus - (gpus // 2 if asked.ranks is None else asked.ranks)
        engines = max(1, min(room, asked.groups, left // size))
    else:
        engines = asked.engines
    ranks = max(1, min(gpus - engines * size, asked.groups)) if asked.ranks is None else asked.ranks
    return engines, ranks


def ranks_beside(engines: int, tensor_parallel: int, nodes: Sequence[Node]) -> range:
    """One on every GPU that no engine has."""
    if engines > engines_that_fit(tensor_parallel, nodes):
        return range(0)
    return range(1, sum(node.free_gpus for node in nodes) - engines * tensor_parallel + 1)


def seats(demand: Demand, nodes: Sequence[Node]) -> list[Bundle]:
    """Engines where they leave the least behind, from the last node on; ranks on as few nodes as possible."""
    room = Counter({node.name: node.free_gpus for node in nodes})
    size = demand.tensor_parallel
    bundles = []
    for engine in range(demand.engines):
        node = min((n.name for n in reversed(nodes) if room[n.name] >= size), key=lambda name: room[name])
        room[node] -= size
        bundles.append(Bundle(node, size, engine=engine))
    rank = 0
    while rank < demand.ranks:
        left = demand.ranks - rank
        enough = [node.name for node in nodes if room[node.name] >= left]
        node = min(enough, key=lambda name: room[name]) if enough else max(room, key=lambda name: room[name])
        for _ in range(min(left, room[node])):
            bundles.append(Bundle(node, 1, ranks=(rank,)))
            rank += 1
        room[node] = 0
    return bundles


def reseat(loss: Loss) -> Reseating:
    """GPUs that are free first. Where they are too few for the ranks, engines give up theirs, all but one of them."""
    room, size = Room(loss.nodes), loss.tensor_parallel
    guests: dict[str, tuple[str, Bundle]] = {}
    without = [name for name in loss.ranks if not room.take(1, ranks=(number(name),))]
    well = sorted((name for name in loss.held if name.startswith("engine")), key=number)
    given_up = []
    while without and well:
        given_up.append(engine := well.pop())
        piece = loss.held[engine]
        for name in without[:size]:
            part = Bundle(piece.node, 1, ranks=(number(name),), share=core_share(piece.cpus, size))
            guests[name] = engine, part
        without = without[size:]
    unseated = [name for name in loss.engines if not room.take(size, engine=number(name))]
    if without or not (well or len(unseated) < len(loss.engines)):
        raise loss.no_room()
    return Reseating(room.taken, guests, tuple(given_up), tuple(unseated))
