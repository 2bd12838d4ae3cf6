"""Nodes are lost: who goes where on those that are left, and when a run cannot go on."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import PROCESSES_PER_CORE, Bundle, Demand, lay_out
from cluster.reseating import Loss, NoRoom, Reseating, reseat, room_for
from cluster.resources import Node


def seated(bundles: list[Bundle] | tuple[Bundle, ...]) -> dict[str, Bundle]:
    """Process -> piece."""
    found = {f"learner-{rank}": bundle for bundle in bundles for rank in bundle.ranks}
    return found | {f"engine-{bundle.engine}": bundle for bundle in bundles if bundle.engine is not None}


def loss(placement: str, demand: Demand, nodes: list[Node], gone: set[str], joined: tuple[Node, ...] = ()) -> Loss:
    """A run that was laid out on idle nodes and has lost some of them."""
    pieces = seated(lay_out(placement, demand, nodes).bundles)
    mine = {id(piece): piece for piece in pieces.values()}.values()
    left = []
    for node in nodes:
        here = [piece for piece in mine if piece.node == node.name]
        cpus, gpus = sum(piece.cpus for piece in here), sum(piece.gpus for piece in here)
        left.append(dataclasses.replace(node, busy_cpus=node.busy_cpus + cpus, busy_gpus=node.busy_gpus + gpus))
    held = {name: piece for name, piece in pieces.items() if piece.node not in gone}
    lost = {name: piece for name, piece in pieces.items() if piece.node in gone}
    nodes_left = (*(node for node in left if node.name not in gone), *joined)
    return Loss(placement, demand.tensor_parallel, nodes_left, held, lost)


def after(given: Loss, found: Reseating) -> dict[str, Bundle]:
    """Who sits where in the end."""
    stay = {name: piece for name, piece in given.held.items() if name not in found.given_up}
    return stay | seated(found.fresh) | {name: piece for name, (_, piece) in found.guests.items()}


def two_nodes(cores: int = 1) -> list[Node]:
    return [Node("a", cores, 0, 0), Node("b", cores, 0, 0)]


def test_a_rank_without_a_free_core_shares_those_of_the_run_and_the_engine_waits() -> None:
    given = loss("cpu", Demand(2, 2, 1), two_nodes(), {"b"})
    found = reseat(given)
    assert found.guests == {"learner-1": ("learner-0", Bundle("a", 0, ranks=(1,), share=0.0))}
    assert (found.fresh, found.given_up, found.unseated) == ((), (), ("engine-1",))


def test_free_cores_are_shared_by_all_who_move() -> None:
    joined = (Node("c", 1, 0, 0),)
    found = reseat(loss("cpu", Demand(2, 2, 1), two_nodes(), {"b"}, joined))
    assert found.fresh == (Bundle("c", 0, ranks=(1,), share=0.5), Bundle("c", 0, engine=1, share=0.5))
    assert (dict(found.guests), found.unseated) == ({}, ())


def test_the_last_engine_shares_a_core_rather_than_end_the_run() -> None:
    pieces = seated([Bundle("a", 0, ranks=(0,), share=1.0), Bundle("b", 0, engine=0, share=1.0)])
    given = Loss(
        "cpu", 1, (Node("a", 1, 0, 0, busy_cpus=1),), {"learner-0": pieces["learner-0"]},
        {"engine-0": pieces["engine-0"]},
    )  # fmt: skip
    assert reseat(given).guests == {"engine-0": ("learner-0", Bundle("a", 0, engine=0, share=0.0))}


def test_more_than_eight_processes_never_share_a_core() -> None:
    with pytest.raises(NoRoom, match=r"(?s)learner-1 and 5 others is gone.*need   have.*processes, 8 per core +11 +8"):
        reseat(loss("cpu", Demand(2, 10, 1), two_nodes(), {"b"}))


def test_ranks_take_free_gpus_first_and_keep_together() -> None:
    nodes = [Node(name, 32, 8, 0) for name in "abc"]
    joined = (Node("d", 32, 8, 0, busy_gpus=1), Node("e", 32, 8, 0))
    given = loss("separate", Demand(8, 16, 1), nodes, {"a"}, joined)
    found = reseat(given)
    assert [(piece.node, piece.ranks) for piece in found.fresh] == [("e", (rank,)) for rank in range(8)]
    assert (dict(found.guests), found.given_up, found.unseated) == ({}, (), ())


def test_engines_give_their_gpus_to_ranks_that_have_none_but_one_stays() -> None:
    nodes = [Node(name, 32, 4, 0) for name in "abcd"]
    given = loss("separate", Demand(4, 8, 2), nodes, {"a"})
    found = reseat(given)
    assert found.given_up == ("engine-3", "engine-2")
    assert {name: host for name, (host, _) in found.guests.items()} == {
        "learner-0": "engine-3", "learner-1": "engine-3", "learner-2": "engine-2", "learner-3": "engine-2",
    }  # fmt: skip
    assert all(piece.gpus == 1 and piece.share == 0.5 for _, piece in found.guests.values())
    with pytest.raises(NoRoom, match=r"(?s)The node of learner-0 and 7 others is gone.*GPUs +10 +8"):
        reseat(loss("separate", Demand(4, 8, 2), nodes, {"a", "b"}))


def test_engines_that_lost_their_gpus_wait_while_others_work() -> None:
    nodes = [Node(name, 32, 4, 0) for name in "abc"]
    found = reseat(loss("separate", Demand(8, 4, 1), nodes, {"c"}))
    assert found == Reseating((), {}, (), ("engine-0", "engine-1", "engine-2", "engine-3"))
    with pytest.raises(NoRoom, match="a run needs all its ranks and an engine"):
        reseat(loss("separate", Demand(4, 8, 1), nodes, {"c"}))


def test_a_colocated_engine_moves_with_its_ranks_or_is_left_out() -> None:
    nodes = [Node(name, 32, 2, 0) for name in "ab"]
    whole = reseat(loss("colocated", Demand(2, 4, 2), nodes, {"b"}, (Node("c", 32, 2, 0),)))
    assert whole.fresh == (Bundle("c", 2, engine=1, ranks=(2, 3)),)
    apart = reseat(loss("colocated", Demand(2, 4, 2), nodes, {"b"}, (Node("c", 32, 1, 0), Node("d", 32, 1, 0))))
    assert apart.fresh == (Bundle("c", 1, ranks=(2,)), Bundle("d", 1, ranks=(3,)))
    assert whole.unseated == apart.unseated == ("engine-1",)
    with pytest.raises(NoRoom, match=r"GPUs +4 +2"):
        reseat(loss("colocated", Demand(2, 4, 2), nodes, {"b"}))


@given(
    st.sampled_from([("cpu", 1), ("separate", 1), ("separate", 2), ("colocated", 1), ("colocated", 2)]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=2, max_size=5),
    st.integers(1, 6), st.integers(1, 9), st.data(),
)  # fmt: skip
def test_whatever_is_lost_ranks_all_have_a_seat_or_the_run_ends(
    kind: tuple[str, int], sizes: list[tuple[int, int]], engines: int, ranks: int, data: st.DataObject
) -> None:
    placement, size = kind
    nodes = [Node(f"n{i}", cpus, gpus, 0) for i, (cpus, gpus) in enumerate(sizes)]
    try:
        lay_out(placement, Demand(engines, ranks, size), nodes)
    except Exception:  # noqa: BLE001  nothing to lose
        return
    gone = set(data.draw(st.lists(st.sampled_from([node.name for node in nodes]), min_size=1, max_size=3)))
    joined = tuple(Node(f"j{i}", 8, gpus, 0) for i, gpus in enumerate(data.draw(st.lists(st.integers(0, 4)))))
    given = loss(placement, Demand(engines, ranks, size), nodes, gone, joined)
    try:
        found = reseat(given)
    except NoRoom:
        return
    end = after(given, found)
    assert {name for name in end if name.startswith("learner")} == {f"learner-{rank}" for rank in range(ranks)}
    running = {name for name in end if name.startswith("engine")} - (set(found.unseated) - set(seated(found.fresh)))
    assert running
    assert set(found.unseated) <= set(given.engines)
    assert set(found.given_up) <= set(given.held)
    assert running | set(found.unseated) | set(found.given_up) == {f"engine-{number}" for number in range(engines)}
    capacity = {node.name: node for node in given.nodes}
    assert all(piece.node in capacity for piece in end.values()), "nobody sits on a node that is gone"
    cpus, gpus, crowd = Counter[str](), Counter[str](), Counter[str]()
    pieces = {id(piece): piece for piece in end.values()}.values()
    for piece in pieces:
        gpus[piece.node] += piece.gpus
        crowd[piece.node] += piece.processes
    for piece in found.fresh:
        cpus[piece.node] += round(piece.cpus * 10000)
    for name, node in capacity.items():
        assert gpus[name] <= node.gpus
        assert crowd[name] <= PROCESSES_PER_CORE * node.cpus
        assert cpus[name] <= round(node.free_cpus * 10000) + 1


def test_an_engine_without_a_seat_gets_one_where_there_is_room() -> None:
    nodes = [Node("a", 8, 8, 0, busy_gpus=6), Node("b", 8, 8, 0, busy_gpus=4)]
    assert room_for("engine-3", "separate", 4, nodes) == Bundle("b", 4, engine=3)
    assert room_for("engine-3", "separate", 8, nodes) is None
    assert room_for("engine-3", "separate", 1, [Node("a", 8, 8, 0, busy_cpus=8)]) is None
    full, half = Node("a", 2, 0, 0, busy_cpus=2), Node("b", 2, 0, 0, busy_cpus=1.5)
    assert room_for("engine-3", "cpu", 1, [full, half]) == Bundle("b", 0, engine=3, share=0.5)
    assert room_for("engine-3", "cpu", 1, [full]) is None
