"""What this machine (or Ray cluster) has. No heavy import: `plan` answers in about a second."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    name: str
    """What tells it from others: the node id in a Ray cluster, the host name otherwise."""
    cpus: int
    """Cores in all."""
    gpus: int
    """GPUs in all."""
    memory: int
    """Host memory in bytes."""
    host: str = ""
    """Address, for people (default: the name)."""
    busy_cpus: float = 0.0
    """Cores that others hold now."""
    busy_gpus: int = 0
    """GPUs that others hold now, in whole or in part."""

    @property
    def free_cpus(self) -> float:
        """Cores that can be had now."""
        return max(0.0, self.cpus - self.busy_cpus)

    @property
    def free_gpus(self) -> int:
        """Whole GPUs that can be had now."""
        return max(0, self.gpus - self.busy_gpus)


@dataclass(frozen=True, slots=True)
class Resources:
    """What processes can be placed on."""

    cpus: int
    """Cores this process may use."""
    gpus: int
    """GPUs in all."""
    memory: int
    """Host memory in bytes."""
    nodes: tuple[Node, ...] = ()
    """Machines, the one with the driver first (default: a single one with all of it)."""

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", (Node(socket.gethostname(), self.cpus, self.gpus, self.memory),))


def sum_of(nodes: Sequence[Node]) -> Resources:
    """What several machines have together."""
    return Resources(
        cpus=sum(node.cpus for node in nodes),
        gpus=sum(node.gpus for node in nodes),
        memory=sum(node.memory for node in nodes),
        nodes=tuple(nodes),
    )


def local_resources() -> Resources:
    """What this machine has."""
    return Resources(
        cpus=len(os.sched_getaffinity(0)),
        gpus=_count_gpus(),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def gpu_name() -> str:
    """What the driver calls the first GPU of this machine; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listing = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    return listing.stdout.splitlines()[0].strip() if listing.returncode == 0 and listing.stdout else ""


def _count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
