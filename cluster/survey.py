"""What the nodes of a Ray cluster have, and what others hold of it: `python -m cluster.survey ADDRESS` prints it.

A process of its own, so that a plan can be made before this process has anything to do with Ray.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from cluster.resources import Node

PROBE_SECONDS = 2.0


def ray_nodes() -> list[Node]:
    """The nodes of the cluster this process has joined, its own first."""
    here = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        as_node(node, free.get(node["NodeID"], {}))
        for node in sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    ]


def as_node(about: Mapping[str, Any], free: Mapping[str, float]) -> Node:
    """What Ray says about a node, as a Node. A GPU of which anybody holds a part counts as held."""
    total = about["Resources"]
    cpus, gpus = int(total.get("CPU", 0)), int(total.get("GPU", 0))
    return Node(
        name=about["NodeID"],
        cpus=cpus,
        gpus=gpus,
        memory=int(total.get("memory", 0)),
        host=about["NodeManagerAddress"],
        busy_cpus=round(cpus - min(cpus, free.get("CPU", 0.0)), 4),
        busy_gpus=gpus - math.floor(free.get("GPU", 0.0) + 1e-6),
    )


def reachable(name: str) -> bool:
    """Whether a node still answers: Ray itself takes seconds to notice that one is gone."""
    for node in ray.nodes():
        if node["NodeID"] == name and node["Alive"]:
            try:
                with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), PROBE_SECONDS):
                    return True
            except OSError:
                return False
    return False


def main() -> None:
    """Join, look, print."""
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", configure_logging=False)
    sys.stdout.write("\n" + json.dumps([dataclasses.asdict(node) for node in ray_nodes()]) + "\n")


if __name__ == "__main__":
    main()
