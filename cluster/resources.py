"""What this machine (or Ray cluster) has. No heavy import: `plan` answers in about a second."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """What processes can be placed on."""

    cpus: int
    """Cores this process may use."""
    gpus: int
    """GPUs in all."""
    memory: int
    """Host memory in bytes."""
    nodes: int = 1
    """Machines."""


def local_resources() -> Resources:
    """What this machine has."""
    return Resources(
        cpus=len(os.sched_getaffinity(0)),
        gpus=_count_gpus(),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
