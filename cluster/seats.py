"""The seats of a layout, held by placement groups of Ray: all of them within seconds, or a refusal that says why not.

One group per node, pinned to it: so a tensor-parallel engine never spans two nodes, and a node that is lost takes its
own group with it and no other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import PlanError
from cluster.placement import Bundle, Demand, Layout, find, lay_out
from cluster.resources import Node
from cluster.survey import ray_nodes, reachable

RESERVE_SECONDS = 10.0
NODE_ID = "ray.io/node-id"


@dataclass
class Seats:
    """Who sits where, reserved."""

    layout: Layout
    """As planned."""
    tensor_parallel: int
    """Devices of one engine."""
    _held: dict[str, tuple[Any, int, Bundle]] = field(default_factory=dict)
    """Process -> placement group, index of the bundle in it, and the bundle."""

    def reserve(self) -> None:
        """Take all seats. PlanError with the table of need and have when others were faster."""
        nodes = ray_nodes()
        known = {node.name for node in nodes}
        groups = {}
        for name in dict.fromkeys(bundle.node for bundle in self.layout.bundles):
            # A private Ray has one node, and the plan knows it by the name of the machine.
            target = name if name in known else nodes[0].name
            bundles = [bundle for bundle in self.layout.bundles if bundle.node == name]
            groups[name] = self._hold(target, bundles)
        deadline = time.monotonic() + RESERVE_SECONDS
        missing = [n for n, group in groups.items() if not group.wait(max(0.1, deadline - time.monotonic()))]
        if missing:
            for group in groups.values():
                remove_placement_group(group)
            raise self._refusal(missing)

    def options(self, name: str) -> dict[str, Any]:
        """How Ray is told to start a process in its seat."""
        group, index, bundle = self._held[name]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy, "num_cpus": bundle.share}

    def keep_or_move(self, name: str) -> str:
        """Before an engine is started again: its seat, or another when its node is gone.

        Returns why it cannot be seated, or nothing.
        """
        group, _, bundle = self._held[name]
        planned = {node.name for node in ray_nodes()}
        if bundle.node not in planned or reachable(bundle.node):
            return ""  # a private Ray, or a node that is there
        nodes = [node for node in ray_nodes() if node.name != bundle.node]
        other = seat_for_engine(int(name.rsplit("-", 1)[1]), self.layout.placement, self.tensor_parallel, nodes)
        if other is None:
            return f"its node {bundle.node[:8]} is gone, and no other has room for it"
        remove_placement_group(group)
        moved = self._hold(other.node, [other])
        if not moved.wait(RESERVE_SECONDS):
            return "another job took the seat it was to move to"
        return ""

    def _hold(self, node: str, bundles: Sequence[Bundle]) -> Any:
        wanted = [{"CPU": b.cpus} | ({"GPU": float(b.gpus)} if b.gpus else {}) for b in bundles]
        group = placement_group(
            wanted, strategy="STRICT_PACK", bundle_label_selector=[{NODE_ID: node} for _ in bundles]
        )
        for index, bundle in enumerate(bundles):
            sitting = [f"learner-{rank}" for rank in bundle.ranks]
            sitting += [f"engine-{bundle.engine}"] if bundle.engine is not None else []
            self._held |= {name: (group, index, bundle) for name in sitting}
        return group

    def _refusal(self, missing: list[str]) -> PlanError:
        demand = Demand(len(self.layout.engines), len(self.layout.ranks), self.tensor_parallel)
        try:
            lay_out(self.layout.placement, demand, ray_nodes())
        except PlanError as table:
            return table
        return PlanError(
            f"--cluster.placement {self.layout.placement}: Ray did not give the seats on {len(missing)} node(s) within "
            f"{RESERVE_SECONDS:g} s, though there is room now: another job came and went. Start again."
        )


def seat_for_engine(engine: int, placement: str, tensor_parallel: int, nodes: Sequence[Node]) -> Bundle | None:
    """A seat of its own for one engine on the nodes as they are now; None when there is no room. Pure."""
    gpus = tensor_parallel if find(placement).ON_GPUS else 0
    for node in sorted(nodes, key=lambda node: (-node.free_gpus, -node.free_cpus) if gpus else (-node.free_cpus,)):
        if node.free_gpus >= gpus and node.free_cpus >= 0.125:
            return Bundle(node.name, gpus, engine=engine, share=min(1.0, node.free_cpus))
    return None
