"""A port that is free when it is looked for may be taken when it is used: then another one is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cluster.waiting import ActorLost

Result = TypeVar("Result")

PORT_TRIES = 5
PORT_TAKEN = ("EADDRINUSE", "ddress already in use")
"""What a process says that finds its port taken."""


def on_a_free_port(attempt: Callable[[], Result]) -> Result:
    """What `attempt` gives, which finds a port by itself; ActorLost for any other failure, or after PORT_TRIES."""
    for _ in range(PORT_TRIES - 1):
        try:
            return attempt()
        except ActorLost as lost:
            if not any(sign in lost.reason for sign in PORT_TAKEN):
                raise
    return attempt()
