"""Trackers beside metrics.jsonl: TensorBoard, W&B, trackio, MLflow.

Each tracker is a process of its own that follows metrics.jsonl. So a tracker that prints, hangs, crashes or waits for
a network cannot touch the training: the run sees that it has ended, says so once in events.jsonl, and goes on.
`--tracker wandb,tensorboard` takes several; `wandb:offline` keeps everything on this machine, `wandb:trl` writes the
metric names that dashboards made for TRL expect. What runs in the process is in tracker_process.py.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.run.metrics import EventLog
from rollout.types import UserError

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow-skinny"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One tracker as the user asked for it."""

    name: str
    offline: bool = False
    """Keep everything on this machine."""
    trl: bool = False
    """Write TRL's metric names."""

    def __str__(self) -> str:
        return self.name + ":offline" * self.offline + ":trl" * self.trl


def choose_trackers(text: str) -> list[Choice]:
    """Read `--tracker`; UserError for an unknown tracker or option, and for a package that is not installed."""
    choices = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, *options = word.split(":")
        if name not in _PACKAGES:
            close = difflib.get_close_matches(name, _PACKAGES, n=1)
            hint = f" Perhaps you meant {close[0]}." if close else ""
            raise UserError(f"--tracker {name}: there is no such tracker.{hint}\n  All: {', '.join(_PACKAGES)}.")
        if odd := set(options) - {"offline", "trl"}:
            raise UserError(
                f"--tracker {word}: unknown option {', '.join(sorted(odd))}; use {name}:offline or {name}:trl."
            )
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--tracker {name}: its package is not installed.\n  Type: pip install {_PACKAGES[name]}")
        choices.append(Choice(name, "offline" in options, "trl" in options))
    return choices


class Trackers:
    """The tracker processes of a run."""

    def __init__(self, choices: Sequence[Choice], run_folder: Path, events: EventLog, *, first_round: int = 0) -> None:
        """Start one process per tracker; each follows metrics.jsonl from `first_round` on."""
        self._events = events
        self._logs = run_folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._running = {str(choice): self._start(choice, run_folder.absolute(), first_round) for choice in choices}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the trackers that still run."""
        return {name: process.pid for name, process in self._running.items()}

    def check(self, round_: int | None = None) -> list[str]:
        """Call after every round: names of the trackers that have ended since, each told once in events.jsonl."""
        ended = [name for name, process in self._running.items() if process.poll() is not None]
        for name in ended:
            self._tell(name, round_, f"ended with exit code {self._running.pop(name).returncode}")
        return ended

    def close(self, seconds: float = 10.0) -> None:
        """Let the trackers send what is left, for at most `seconds` in all, then end them."""
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + seconds
        for name, process in self._running.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._tell(name, None, f"was not done within {seconds:g} s of the end of the run, and was ended")
            else:
                if code:
                    self._tell(name, None, f"ended with exit code {code}")
        self._running.clear()

    def _start(self, choice: Choice, run_folder: Path, first_round: int) -> subprocess.Popen[bytes]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log(str(choice)).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cluster.run.tracker_process", str(choice), str(run_folder), str(first_round)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=run_folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C is for the run; the tracker ends when its standard input closes
            )  # fmt: skip

    def _log(self, name: str) -> Path:
        return self._logs / f"tracker-{name.replace(':', '-')}.log"

    def _tell(self, name: str, round_: int | None, what: str) -> None:
        last = self._log(name).read_text(errors="replace").strip().splitlines()[-1:]
        self._events.append("tracker_off", round=round_, tracker=name, reason=what, last_line="".join(last)[:500])
