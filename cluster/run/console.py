"""What a person sees: one live view on a terminal, plain lines elsewhere, JSON lines or silence when asked."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from cluster.run.findings import Finding
from cluster.run.inert import inert
from cluster.run.status import status_lines
from cluster.timeline import Stopwatch

CURVES = {"reward/correctness": "correct", "reward/total": "reward", "eval/correctness": "held-out"}
"""Metrics of the live view's bars, and what they are called there."""


class Console:
    """Prints a run. Text of the model never comes here unescaped."""

    def __init__(self, *, quiet: bool, log_json: bool, rounds: int) -> None:
        """`rounds` is what the ETA counts to."""
        self.quiet, self.log_json, self.rounds = quiet, log_json, rounds
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._started = time.monotonic()
        self.watch = Stopwatch()
        """Time spent on watching: everything here, the doctor, trackers."""
        self.states: Callable[[], Mapping[str, str]] = dict
        """Process -> state, asked for whenever the live view is drawn."""
        self._curves: dict[str, list[float]] = {name: [] for name in CURVES.values()}
        self._found: list[tuple[str, str, int]] = []
        self.loss_explained = False
        self._round = 0
        self._done = 0
        self._lanes: dict[str, TaskID] = {}
        if self._rich.is_terminal and not quiet and not log_json:
            self._progress = Progress(
                TextColumn("{task.description:<28}"),
                BarColumn(bar_width=32),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=self._rich,
            )
            self._lanes[""] = self._progress.add_task("starting", total=None, note="")
            self._live = Live(self, console=self._rich, refresh_per_second=4, transient=True)
            self._live.start()

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The live view: progress, and how it goes below it."""
        if self._progress is not None:
            yield self._progress
            for line in status_lines(self._curves, self.states(), self._found):
                yield Text(line, no_wrap=True, overflow="ellipsis")

    def line(self, text: str) -> None:
        """A line that stays."""
        with self.watch:
            if self.log_json:
                self._json({"event": "line", "text": text})
            elif not self.quiet:
                self._rich.print(Text(inert(text)))

    def always(self, text: str) -> None:
        """A line that is shown even when quiet: summaries and findings."""
        if self.log_json:
            self._json({"event": "summary", "text": text})
        else:
            self._rich.print(Text(inert(text)))

    def finding(self, finding: Finding) -> None:
        """What the doctor has found; shown even when quiet, and in the live view from now on."""
        if self.log_json:
            self._json({"event": "finding", **dataclasses.asdict(finding)})
            return
        self._found.append((finding.severity, finding.id, finding.since_round))
        self.always(f"{finding.severity}: {finding.id} since round {finding.since_round}: {finding.cause}")

    def phase(self, name: str, total: int | None = None, round_: int | None = None, lane: str = "") -> None:
        """A phase begins: `total` items of work, if known.

        Each lane, engines and learner, has a line of its own while it is at work; a phase without a lane has all.
        """
        if round_ is not None:
            self._round = round_
        title = f"round {self._round}/{self.rounds}  {name}" if self._round else name
        if self._progress is not None:
            for other in self._lanes if not lane else [""]:
                self.rest(other)
            if lane not in self._lanes:
                self._lanes[lane] = self._progress.add_task(title, total=total, note="")
            task = self._lanes[lane]
            self._progress.reset(task, description=title, total=total, note=self._eta(), completed=0, visible=True)
        elif self.log_json:
            self._json({"event": "phase", "round": self._round, "phase": name})

    def advance(self, done: int, note: str = "", lane: str = "") -> None:
        """`done` items of the phase are finished."""
        if self._progress is not None:
            with self.watch:
                self._progress.update(self._lanes[lane], completed=done, note=f"{note}  {self._eta()}".strip())

    def rest(self, lane: str) -> None:
        """A lane has nothing to do for now."""
        if self._progress is not None and lane in self._lanes:
            self._progress.update(self._lanes[lane], visible=False)

    def row(self, row: Mapping[str, Any]) -> None:
        """One row of metrics: the line of a round."""
        if self.log_json:
            self._json({"event": "round", **row})
            return
        self._done = int(row["round"])
        for metric, name in CURVES.items():
            if metric in row:
                self._curves[name].append(float(row[metric]))
        self.line(round_line(row, self.rounds))
        if not self.loss_explained and loss_is_zero_by_construction(row):
            self.loss_explained = True
            self.line(LOSS_NOTE)

    def close(self) -> None:
        """Take the live view away."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._progress = None

    def _eta(self) -> str:
        if self._done < 1:
            return ""
        left = (time.monotonic() - self._started) / self._done * (self.rounds - self._done)
        return f"about {duration(left)} left"

    def _json(self, value: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(dict(value), default=str) + "\n")
        sys.stdout.flush()


LOSS_NOTE = (
    "note: the first step of a round prints a loss of 0, by construction: its ratios are 1 and the advantages of a "
    "group sum to 0. Its gradient is not 0. Watch accuracy, entropy and the gradient norm instead."
)


def loss_is_zero_by_construction(row: Mapping[str, Any]) -> bool:
    """Whether the first step of a round printed a loss of 0 at ratio 1 although it had a gradient."""
    first: Mapping[str, Any] = next((step for step in row.get("steps", ()) if not step["skipped"]), {})
    if not {"policy/loss", "policy/ratio_max", "policy/grad_norm"} <= first.keys():
        return False
    at_one = abs(first["policy/ratio_max"] - 1.0) < 1e-6
    return bool(at_one and abs(first["policy/loss"]) < 1e-4 and first["policy/grad_norm"] > 1e-6)


def round_line(row: Mapping[str, Any], rounds: int) -> str:
    """A round on one line; only what was measured in it."""
    parts = [f"round {row['round']:>3}/{rounds}"]
    if "reward/correctness" in row:
        parts.append(f"correct {row['reward/correctness']:.3f}  format {row['reward/format']:.3f}")
    if "eval/correctness" in row:
        parts.append(f"held-out {row['eval/correctness']:.3f} (format {row['eval/format']:.3f})")
    if "response/length" in row:
        parts.append(f"length {row['response/length']:.1f}")
    if "policy/entropy" in row:
        parts.append(f"entropy {row['policy/entropy']:.3f}")
    if "group/zero_signal" in row:
        parts.append(f"no signal {row['group/zero_signal']:.0%}")
    if "mismatch/max" in row:
        parts.append(f"mismatch {row['mismatch/max']:.0e}")
    if row.get("time/generate"):
        parts.append(f"{row['tokens/generated'] / row['time/generate']:,.0f} tok/s")
    if "time/round" in row:
        parts.append(f"{row['time/round']:.1f} s")
    return "  ".join(parts)


def summary(rows: list[dict[str, Any]], folder: object) -> str:
    """What a run came to, for its last lines."""
    measured = [row for row in rows if "eval/correctness" in row]
    trained = [row for row in rows if "reward/correctness" in row]
    lines = []
    if measured:
        first, last = measured[0], measured[-1]
        lines.append(
            f"held-out accuracy {first['eval/correctness']:.1%} before, {last['eval/correctness']:.1%} after "
            f"round {last['round']}; format {first['eval/format']:.1%} to {last['eval/format']:.1%}"
        )
    if trained:
        spent = sum(row["time/round"] for row in trained)
        responses = sum(row["responses"] for row in trained)
        steps = sum(len(row.get("steps", [])) for row in trained)
        lines.append(f"{len(trained)} rounds, {responses:,} responses, {steps} optimizer steps in {duration(spent)}")
    return "\n".join([*lines, f"model and metrics are in {folder}"])


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
