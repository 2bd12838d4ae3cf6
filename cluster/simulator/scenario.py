"""What is simulated: the processes, their speed, the lengths, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.fleet import Limits
from cluster.schedule import Kind
from cluster.simulator.engine import EngineModel
from cluster.simulator.learner import LearnerModel
from cluster.simulator.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at: float
    """Seconds after the start."""
    who: str
    """engine-0, engine-1, ... or `ranks`."""
    how: Literal["dies", "hangs"] = "dies"
    """A death is known at once, a hang when the supervision has waited long enough."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run."""

    name: str
    """For people."""
    schedule: Kind
    """phased, streamed or async."""
    max_lag: int
    """Async: versions a response may be behind."""
    rounds: int
    """How many are played; the first ones fill the pipeline."""
    groups: tuple[int, ...]
    """(M,) groups of each minibatch."""
    group_size: int
    """G."""
    lengths: Lengths
    """How long responses are."""
    prompt_tokens: float
    """Of each response in the learner."""
    engines: int
    """How many."""
    engine: EngineModel
    """What each can do."""
    learner: LearnerModel
    """What the ranks can do."""
    sync: float
    """Seconds of a sync."""
    record: float
    """Seconds in which a round is written down and committed."""
    turn: float = 0.0
    """Colocated: seconds to hand the devices over, once to the ranks and once back, in all."""
    engine_start: float = 60.0
    """Seconds until a new engine is up."""
    ranks_start: float = 120.0
    """Seconds until new ranks are up."""
    restore: float = 30.0
    """Seconds in which new ranks load the last commit."""
    slowness: Mapping[str, float] = field(default_factory=dict)
    """Engines that are slower than the others, by name, and how much."""
    faults: tuple[Fault, ...] = ()
    """What goes wrong."""
    limits: Limits = field(default_factory=lambda: Limits(gap=float("inf")))
    """Of the supervision. Virtual time never stands still."""
    gpus: int = 1
    """Devices in all, for tokens per second and device."""
    seed: int = 0
    """Of the lengths."""
