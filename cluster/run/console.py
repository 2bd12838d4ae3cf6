"""What a person sees: one live view on a terminal, plain lines elsewhere, JSON lines or silence when asked."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"


class Console:
    """Prints a run. Text of the model never comes here unescaped."""

    def __init__(self, *, quiet: bool, log_json: bool, rounds: int) -> None:
        """`rounds` is what the ETA counts to."""
        self.quiet, self.log_json, self.rounds = quiet, log_json, rounds
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._started = time.monotonic()
        self._accuracy: list[float] = []
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
            self._live = Live(self._progress, console=self._rich, refresh_per_second=4, transient=True)
            self._live.start()

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.log_json:
            self._json({"event": "line", "text": text})
        elif not self.quiet:
            self._rich.print(Text(text))

    def always(self, text: str) -> None:
        """A line that is shown even when quiet: summaries and findings."""
        if self.log_json:
            self._json({"event": "summary", "text": text})
        else:
            self._rich.print(Text(text))

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
        if "reward/correctness" in row:
            self._accuracy.append(float(row["reward/correctness"]))
        self.line(round_line(row, self.rounds) + (f"  {sparkline(self._accuracy)}" if self._progress else ""))

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


def sparkline(values: list[float], width: int = 24) -> str:
    """The last values as small bars, scaled from 0 to 1."""
    return "".join(SPARKS[min(7, max(0, int(value * 8)))] for value in values[-width:])


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
