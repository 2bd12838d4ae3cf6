"""What can be set about processes, weights and what is kept. The docstring under a field is its `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClusterConfig:
    """Where processes live and how they take turns."""

    placement: str = "auto"
    """Where engines and ranks sit: cpu, colocated, separate (auto: cpu without a GPU, else colocated)."""
    schedule: Literal["auto", "phased", "streamed", "async"] = "auto"
    """What overlaps (auto: phased on shared devices, streamed on separate ones); see docs/schedules.md."""
    max_lag: int = 1
    """Async: how many weights versions a response may be behind; 1 is one round ahead."""
    transport: str = "auto"
    """How weights travel: object_store, broadcast (auto: object_store on a CPU)."""
    address: str = ""
    """Ray cluster to join (default: a private one on this machine)."""
    heartbeat: float = 60.0
    """Seconds an engine or rank may go without any progress."""
    mismatch_limit: float | None = None
    """Largest |engine - learner| log-prob of a token before the run stops (default: 0.02 in float32, else 1.0)."""
    grace: float = 20.0
    """Seconds the run has to finish cleanly after SIGINT or SIGTERM; then it is ended at once."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept for a resume."""

    every: int = 1
    """Rounds between checkpoints (0: only at the end)."""
    keep: int = 2
    """Newest checkpoints kept."""


@dataclass(frozen=True)
class DoctorConfig:
    """What a diagnosis may do to the run."""

    stop_on: Literal["never", "critical"] = "never"
    """Stop the run when a finding of this severity appears."""
