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


def make(name: str) -> Transport:
    """The transport of that name, from its own file."""
    if name not in names():
        raise PlanError(f"--cluster.transport {name}: there is no such transport. Choose one of: {', '.join(names())}.")
    transport: Transport = importlib.import_module(f"{__name__}.{name}").make()
    return transport
