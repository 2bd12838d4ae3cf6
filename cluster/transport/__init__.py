"""How weights travel from the learner to the engines. One file is one way; it is found by its file name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, Protocol

from cluster.errors import PlanError


class Transport(Protocol):
    """One way for weights to travel."""

    def connect(self, learners: list[Any], engines: dict[str, Any], seconds: float) -> None:
        """Set up what lasts for longer than one sync; called again whenever the engines change."""

    def send(self, learners: list[Any], engines: dict[str, Any], dtype: str, seconds: float) -> int:
        """Move all weights between the engines' `begin_load` and `finish_load`; returns the number of tensors."""

    def close(self) -> None:
        """Undo `connect`."""


def names() -> tuple[str, ...]:
    """Transports there are."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def choose(asked: str, placement: str) -> str:
    """The transport `auto` means for a placement, or the one that was asked for; PlanError where it cannot work."""
    best = {"cpu": "object_store", "colocated": "cuda_ipc", "separate": "broadcast"}[placement]
    if asked == "auto":
        return best
    if asked == "cuda_ipc" and placement != "colocated":
        raise PlanError(
            f"--cluster.transport cuda_ipc needs engines and ranks on the same GPUs; the placement is {placement}.\n"
            f"  Use --cluster.transport {best}."
        )
    if asked == "broadcast" and placement == "colocated":
        raise PlanError(
            "--cluster.transport broadcast with colocated engines and ranks: NCCL takes one process per GPU.\n"
            "  Use --cluster.transport cuda_ipc."
        )
    if asked not in names():
        raise PlanError(
            f"--cluster.transport {asked}: there is no such transport. Choose one of: {', '.join(names())}."
        )
    return asked


def make(name: str) -> Transport:
    """The transport of that name, from its own file."""
    if name not in names():
        raise PlanError(f"--cluster.transport {name}: there is no such transport. Choose one of: {', '.join(names())}.")
    transport: Transport = importlib.import_module(f"{__name__}.{name}").make()
    return transport
