"""What a run does when nodes leave or join: seats are changed, engines given up or started, and people told."""

from __future__ import annotations

from collections.abc import Callable

from cluster.fleet import Fleet
from cluster.rollout_pool import RolloutPool
from cluster.seats import Seats

Tell = Callable[[str, str, tuple[str, ...]], None]


def follow_losses(seats: Seats, pool: RolloutPool, tell: Tell) -> None:
    """Give everybody whose node is gone a seat elsewhere, if there is one. NoRoom when the run cannot go on."""
    change = seats.follow()
    if change is None:
        return
    tell(change.text(), "node_lost", (*change.moved, *change.unseated, *change.given_up))
    for name in change.given_up:
        pool.give_up(name, "ranks whose node is gone need its GPUs")


def use_room(seats: Seats, pool: RolloutPool, fleet: Fleet, tell: Tell) -> None:
    """Say which nodes have joined, and start engines that had no room where there is some now.

    They come up beside the next generation. A run gets no more engines than were planned.
    """
    waiting = fleet.unseated()
    for node in seats.newcomers():
        use = "" if waiting else "; all engines of the plan have a seat, so nothing is started on it"
        tell(f"node {node}{use}", "node_joined", ())
    for name in waiting:
        if (place := seats.find_room(name)) is not None:
            tell(f"{name} is started again on node {place}", "seated", (name,))
            pool.welcome(name)
