"""Starts launch.py as people do, ends it as machines do, and compares what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.faults import VARIABLE
from cluster.run.checkpoints import CheckpointStore
from cluster.run.metrics import read_events, read_metrics

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("time/", "memory/", "fleet/", "sync/seconds", "grader/timeouts")
"""Keys that may differ between two equal runs (CONTRACT)."""


DEMO_RUN = (
    "--rollouts", "128", "--rounds", "3", "--minibatches", "4", "--rollout.engines", "2", "--learner.ranks", "2",
    "--eval.size", "64",
)  # fmt: skip
"""The settings of the fixture `demo_run`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; negative when a signal ended it."""
    text: str
    """What it printed."""
    seconds: float
    """How long it took."""


class Command:
    """One launch.py command as a process of its own."""

    def __init__(self, *words: str, fault: str = "", environment: dict[str, str] | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | (environment or {})
        if fault:
            environment[VARIABLE] = fault
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "launch.py", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, seconds: float = 600.0) -> Ended:
        """Wait for the end."""
        text, _ = self.process.communicate(timeout=seconds)
        return Ended(self.process.returncode, text, time.monotonic() - self._began)


def launch(*words: str, fault: str = "", seconds: float = 600.0, environment: dict[str, str] | None = None) -> Ended:
    """Run a command to its end, whatever ends it; `environment` is added to this process's own."""
    return Command(*words, fault=fault, environment=environment).end(seconds)


def pid_of(run: Path, name: str) -> int:
    """Process of an engine or rank that is up now."""
    pids = dict(line.split() for line in (run / "pids.txt").read_text().splitlines())
    return int(pids[name])


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """What the event log has of a kind."""
    return [event for event in read_events(run) if event["kind"] == kind]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, as far as they must be the same."""
    return [{key: value for key, value in row.items() if not key.startswith(LEFT_OUT)} for row in read_metrics(run)]


def state_of(run: Path) -> tuple[int, str]:
    """(round, sha256 of the weights) of the newest checkpoint, which must verify at once."""
    complaints: list[str] = []
    checkpoint = CheckpointStore(run).find_latest(complaints.append)
    assert checkpoint is not None, "no checkpoint"
    assert not complaints, complaints
    return checkpoint.manifest.round, checkpoint.manifest.weights


def salvaged_groups(run: Path) -> list[int]:
    """How many groups each resume of the run found in the journal."""
    return [int(event["salvaged_groups"]) for event in read_events(run) if event["kind"] == "resume"]


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Where two lists of rows differ, for people."""
    found = [] if len(one) == len(other) else [f"{len(one)} rows and {len(other)} rows"]
    for a, b in zip(one, other, strict=False):
        keys = sorted(key for key in a.keys() | b.keys() if json.dumps(a.get(key)) != json.dumps(b.get(key)))
        found += [f"round {a['round']} {key}: {str(a.get(key))[:80]} and {str(b.get(key))[:80]}" for key in keys]
    return found
