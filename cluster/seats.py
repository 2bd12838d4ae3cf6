"""The seats of a layout, held by placement groups of Ray: all of them within seconds, or a refusal that says why not.

One group per node, pinned to it: so a tensor-parallel engine never spans two nodes, and a node that is lost takes its
own group with it and no other. Who goes where then is decided in reseating.py; here it is looked and done.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import PlanError
from cluster.paths_on_nodes import Sight
from cluster.placement import Bundle, Demand, Layout, lay_out
from cluster.reseating import Loss, NoRoom, reseat, room_for
from cluster.resources import Node
from cluster.survey import ray_nodes, reachable

RESERVE_SECONDS = 10.0
ATTEMPTS = 3
NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one process is started."""

    group: Any
    """Placement group of Ray."""
    index: int
    """Which of its bundles."""
    bundle: Bundle
    """What the process takes of it, and the node."""


@dataclass(frozen=True, slots=True)
class Change:
    """What has become of the seats because nodes are gone."""

    gone: tuple[str, ...]
    """The nodes, as people know them."""
    moved: dict[str, str]
    """Process -> node where it has a seat now."""
    given_up: tuple[str, ...]
    """Engines that are well and must go: ranks sit in their seats."""
    unseated: tuple[str, ...]
    """Engines without a seat."""

    def text(self) -> str:
        """In one line."""
        parts = [f"{name} goes to {node}" for name, node in self.moved.items()]
        parts += [f"{', '.join(self.given_up)} given up for ranks"] if self.given_up else []
        parts += [f"no room for {', '.join(self.unseated)}"] if self.unseated else []
        return f"node {', '.join(self.gone)} is gone: {'; '.join(parts)}"


@dataclass
class Seats:
    """Who sits where, reserved."""

    planned: Layout
    """As planned."""
    tensor_parallel: int
    """Devices of one engine."""
    _sight: Sight = field(init=False)
    _held: dict[str, Seat] = field(default_factory=dict)
    _nodes: dict[str, str] = field(default_factory=dict)
    """Id of every node there was -> how people know it."""
    _announced: set[str] = field(default_factory=set)
    """Nodes of which it was said, or known from the start, that they are there."""

    def reserve(self, sight: Sight) -> None:
        """Take all seats. PlanError with the table of need and have when others were faster, or when a node does not
        see what it must; nodes that are used later are looked at then.
        """
        self._sight = sight
        sight.require([bundle.node for bundle in self.planned.bundles])
        nodes = ray_nodes()
        self._know(nodes)
        self._announced = set(self._nodes)
        groups = {}
        for name in dict.fromkeys(bundle.node for bundle in self.planned.bundles):
            bundles = [bundle for bundle in self.planned.bundles if bundle.node == name]
            groups[name] = self._hold(name, bundles)
        missing = _not_given(groups)
        if missing:
            for group in groups.values():
                remove_placement_group(group)
            raise self._refusal(missing)

    @property
    def layout(self) -> Layout:
        """Who sits where now."""
        bundles = {id(seat.bundle): seat.bundle for seat in self._held.values()}
        return Layout(self.planned.placement, tuple(bundles.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def options(self, name: str) -> dict[str, Any]:
        """How Ray is told to start a process in its seat."""
        seat = self._held[name]
        strategy = PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=seat.index)
        return {"scheduling_strategy": strategy, "num_cpus": seat.bundle.share}

    def follow(self) -> Change | None:
        """Give those whose node is gone a seat elsewhere; nothing when all nodes are there.

        NoRoom when the run cannot go on with the nodes that are left.
        """
        for _ in range(ATTEMPTS):
            gone = {node for node in {seat.bundle.node for seat in self._held.values()} if not reachable(node)}
            if not gone:
                return None
            held = {name: seat.bundle for name, seat in self._held.items() if seat.bundle.node not in gone}
            lost = {name: seat.bundle for name, seat in self._held.items() if seat.bundle.node in gone}
            nodes = tuple(self._usable(gone))
            broken = {id(self._held[name].group): self._held[name].group for name in lost}.values()
            before = dict(self._held)
            found = reseat(Loss(self.planned.placement, self.tensor_parallel, nodes, held, lost))
            groups = {
                node: self._hold(node, [bundle for bundle in found.fresh if bundle.node == node])
                for node in dict.fromkeys(bundle.node for bundle in found.fresh)
            }
            if _not_given(groups):
                self._let_go(groups.values(), before)
                continue  # another job was faster: there is less room than it seemed
            for name, (host, bundle) in found.guests.items():
                self._held[name] = Seat(self._held[host].group, self._held[host].index, bundle)
            for name in (*found.given_up, *found.unseated):
                if self._held[name].bundle.node in gone or name in found.given_up:
                    del self._held[name]
            for group in broken:
                remove_placement_group(group)  # Ray would wait for its node for ever
            moved = {name: self._nodes[self._held[name].bundle.node] for name in lost if name in self._held}
            without = tuple(name for name in found.unseated if name not in self._held)
            return Change(tuple(sorted(self._nodes[node] for node in gone)), moved, found.given_up, without)
        raise NoRoom(
            f"The node of {', '.join(lost)} is gone, and other jobs take what is left faster than this run can."
        )

    def find_room(self, engine: str) -> str | None:
        """A seat for an engine without one; the node, as people know it, or nothing when there is no room."""
        if self.planned.placement == "colocated":
            # It lives with its ranks: where those have a seat that is its own too, if they have.
            return self._nodes[self._held[engine].bundle.node] if engine in self._held else None
        bundle = room_for(engine, self.planned.placement, self.tensor_parallel, self._usable())
        if bundle is None:
            return None
        before = dict(self._held)
        groups = {bundle.node: self._hold(bundle.node, [bundle])}
        if _not_given(groups):
            self._let_go(groups.values(), before)
            return None
        return self._nodes[bundle.node]

    def newcomers(self) -> tuple[str, ...]:
        """Nodes that have joined since the last look, in words for people: what they have, and if they can be used."""
        nodes = [node for node in ray_nodes() if node.name not in self._announced and reachable(node.name)]
        self._know(nodes)
        self._announced |= {node.name for node in nodes}
        usable = self._sight.of(nodes)
        return tuple(
            f"{self._nodes[node.name]} with {node.cpus} cores and {node.gpus} GPUs joined"
            + ("" if node in usable else "; it does not see the model and the run directory, and is not used")
            for node in nodes
        )

    def _usable(self, gone: Collection[str] = ()) -> list[Node]:
        nodes = [node for node in ray_nodes() if node.name not in gone and reachable(node.name)]
        self._know(nodes)
        return self._sight.of(nodes)

    def _know(self, nodes: Iterable[Node]) -> None:
        self._nodes |= {node.name: f"{node.host or node.name} ({node.name[:6]})" for node in nodes}

    def _hold(self, node: str, bundles: Sequence[Bundle]) -> Any:
        wanted = [{"CPU": b.cpus} | ({"GPU": float(b.gpus)} if b.gpus else {}) for b in bundles]
        group = placement_group(
            wanted, strategy="STRICT_PACK", bundle_label_selector=[{NODE_ID: node} for _ in bundles]
        )
        for index, bundle in enumerate(bundles):
            sitting = [f"learner-{rank}" for rank in bundle.ranks]
            sitting += [f"engine-{bundle.engine}"] if bundle.engine is not None else []
            self._held |= {name: Seat(group, index, bundle) for name in sitting}
        return group

    def _let_go(self, groups: Iterable[Any], before: dict[str, Seat]) -> None:
        """Give groups back; those who were to sit there have the seats they had `before`, on lost nodes or none."""
        for group in groups:
            remove_placement_group(group)
        self._held = before

    def _refusal(self, missing: list[str]) -> PlanError:
        demand = Demand(len(self.planned.engines), len(self.planned.ranks), self.tensor_parallel)
        try:
            lay_out(self.planned.placement, demand, ray_nodes())
        except PlanError as table:
            return table
        return PlanError(
            f"--cluster.placement {self.planned.placement}: Ray did not give the seats on {len(missing)} node(s) "
            f"within {RESERVE_SECONDS:g} s, though there is room now: another job came and went. Start again."
        )


def _not_given(groups: dict[str, Any]) -> list[str]:
    """Nodes whose group Ray did not give in time."""
    deadline = time.monotonic() + RESERVE_SECONDS
    return [node for node, group in groups.items() if not group.wait(max(0.1, deadline - time.monotonic()))]
