"""Seats in a cluster that exists on paper: held, given back and asked for again when nodes go or others are faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cluster import seats as module
from cluster.placement import Bundle, Layout
from cluster.reseating import NoRoom
from cluster.resources import Node
from cluster.seats import Seats


@dataclass(eq=False)
class Group:
    """A placement group."""

    node: str
    given: bool

    def wait(self, _: float) -> bool:
        return self.given


class Paper:
    """Nodes, groups, and what becomes of them."""

    def __init__(self) -> None:
        self.nodes = {"a": Node("a", 1, 0, 0, busy_cpus=1), "b": Node("b", 1, 0, 0, busy_cpus=1)}
        self.gives: Callable[[str], bool] = lambda node: True
        self.made: list[Group] = []
        self.removed: list[Group] = []

    def group(self, _: Any, *, strategy: str, bundle_label_selector: list[dict[str, str]]) -> Group:
        (node,) = {each[module.NODE_ID] for each in bundle_label_selector}
        self.made.append(Group(node, self.gives(node)))
        return self.made[-1]

    # what a node sees

    def require(self, names: list[str]) -> None:
        assert set(names) <= set(self.nodes)

    def of(self, nodes: list[Node]) -> list[Node]:
        return nodes


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    found = Paper()
    monkeypatch.setattr(module, "ray_nodes", lambda: list(found.nodes.values()))
    monkeypatch.setattr(module, "reachable", lambda name: name in found.nodes)
    monkeypatch.setattr(module, "placement_group", found.group)
    monkeypatch.setattr(module, "remove_placement_group", found.removed.append)
    return found


@pytest.fixture
def seats(paper: Paper) -> Seats:
    """An engine and a rank on each of two nodes."""
    pieces = [Bundle(node, 0, engine=i, share=0.5) for i, node in enumerate("ab")]
    pieces += [Bundle(node, 0, ranks=(i,), share=0.5) for i, node in enumerate("ab")]
    made = Seats(Layout("cpu", tuple(pieces)), 1)
    made.reserve(paper)  # type: ignore[arg-type]
    return made


def lose(paper: Paper, joined: str) -> None:
    del paper.nodes["b"]
    paper.nodes[joined] = Node(joined, 1, 0, 0, host=f"host-{joined}")


def test_who_was_on_a_lost_node_sits_elsewhere_and_its_group_is_given_back(paper: Paper, seats: Seats) -> None:
    assert seats.follow() is None
    old = next(group for group in paper.made if group.node == "b")
    lose(paper, "c")
    change = seats.follow()
    assert change is not None
    assert change.moved == {"engine-1": "host-c (c)", "learner-1": "host-c (c)"}
    assert paper.removed == [old]
    assert seats.layout.of_rank(1).node == seats.layout.of_engine(1).node == "c"


def test_when_another_job_is_faster_once_the_next_try_still_gives_the_lost_group_back(
    paper: Paper, seats: Seats
) -> None:
    old = next(group for group in paper.made if group.node == "b")
    lose(paper, "c")
    paper.gives = lambda node: len(paper.made) > 2  # the first on the new node is not given
    change = seats.follow()
    assert change is not None
    assert len(paper.made) == 4
    assert old in paper.removed
    assert [group for group in paper.made if group not in paper.removed] == [paper.made[0], paper.made[3]]


def test_when_others_are_faster_every_time_the_run_ends_and_says_so(paper: Paper, seats: Seats) -> None:
    lose(paper, "c")
    paper.gives = lambda node: False
    with pytest.raises(NoRoom, match="other jobs take what is left faster"):
        seats.follow()


def test_an_engine_whose_new_seat_is_not_given_has_none(paper: Paper, seats: Seats) -> None:
    del paper.nodes["b"]
    change = seats.follow()
    assert change is not None
    assert change.unseated == ("engine-1",)
    assert "engine-1" not in seats
    paper.nodes["c"] = Node("c", 1, 0, 0)
    paper.gives = lambda node: False
    assert seats.find_room("engine-1") is None
    assert "engine-1" not in seats
    assert paper.made[-1] in paper.removed
    paper.gives = lambda node: True
    assert seats.find_room("engine-1") == "c (c)"
    assert seats.layout.of_engine(1).node == "c"
