"""The subcommands, and how every way to end becomes an exit code and a text for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from cluster.errors import BAD_REQUEST, CRITICAL_FINDING, DONE, INTERRUPTED, PlanError, RollearnError, Stopped
from cluster.run import cli
from cluster.run.config import Config
from cluster.run.inert import inert
from learner.variants import PRESETS
from rollout.types import UserError

if TYPE_CHECKING:
    from cluster.run.stages import Run

Train = Callable[[Config, Path | None], int]
"""Configuration and, to go on with a run, its directory."""
Loop = Callable[["Run"], None]
"""All rounds of a run that stands."""
PAGES = ("plan", "presets", "doctor", "report", "check-reward")
"""Commands that only print."""


def dispatch(words: Sequence[str], train: Train, loop: Loop | None = None) -> int:
    """Run a command line; returns the exit code. A user's mistake gives a message, never a traceback.

    `bench` needs the loop.
    """
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": lambda rest: train(cli.parse(rest), None),
        "resume": lambda rest: _resume(rest, train),
        "plan": plan,
        "presets": presets,
        "bench": lambda rest: bench(rest, loop),
        "doctor": doctor,
        "lesson": lambda rest: _lesson(rest, train),
        "eval": evaluate,
        "check-reward": check_reward,
        "report": report,
        "export": export,
    }
    name = words[0] if words and not words[0].startswith("-") else "train"
    try:
        if "--version" in words:
            sys.stdout.write(f"rollearn {cli.version()}\n")
            return DONE
        if name not in commands:
            close = cli.nearest(name, commands)
            raise PlanError(f"{name}: there is no such command.{close}\n  All: {', '.join(commands)}.")
        code = commands[name](list(words[1:] if words and words[0] == name else words))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _say(error, BAD_REQUEST)
    except Stopped as stopped:
        return _say(stopped, stopped.code)
    except RollearnError as error:
        return _say(error, BAD_REQUEST)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`): a page half read is no fault, a run half done was interrupted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE if name in PAGES else INTERRUPTED


def _resume(words: list[str], train: Train) -> int:
    from cluster.run.resume import requested

    return train(*requested(words))


def _lesson(words: list[str], train: Train) -> int:
    from cluster.run.teaching import main

    return main(words, train)


def plan(words: list[str]) -> int:
    """`plan`: the arithmetic, memory and time of a run; starts nothing."""
    from cluster.run.planning import main

    return main(words)


def presets(words: list[str]) -> int:
    """`presets`: what each preset sets."""
    tyro.cli(PresetsOptions, prog="launch.py presets", args=words)
    for name, variant in PRESETS.items():
        sys.stdout.write(f"{name}\n  {variant.summary}\n  answers  {variant.fixes}\n  source   {variant.source}\n")
        for key, value in variant.settings.items():
            sys.stdout.write(f"    {cli.flag_name(key)} {value}\n")
        sys.stdout.write("\n")
    return DONE


def bench(words: list[str], loop: Loop | None) -> int:
    """`bench`: engines alone, learner alone, sync, the whole round."""
    from cluster.run.bench import main

    assert loop is not None
    return main(words, loop)


def evaluate(words: list[str]) -> int:
    """`eval`: accuracy of a model or a run."""
    from cluster.run.evaluating import main

    return main(words)


def check_reward(words: list[str]) -> int:
    """`check-reward`: what a reward would pay for a gold, an empty, a wrong, a format-only and a huge answer."""
    from cluster.run.checking import main

    return main(words)


@dataclass(frozen=True)
class ReportOptions:
    """Write one self-contained HTML page about a run, or about several side by side."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories."""
    out: Path | None = None
    """File to write (default: report.html in the first run)."""


def report(words: list[str]) -> int:
    """`report`: one HTML file."""
    from cluster.run.report import build_report

    options = tyro.cli(ReportOptions, prog="launch.py report", args=words)
    if not options.runs:
        raise PlanError("report needs a run directory: launch.py report RUN [RUN ...]")
    sys.stdout.write(f"{build_report(list(options.runs), options.out)}\n")
    return DONE


@dataclass(frozen=True)
class DoctorOptions:
    """Name what went wrong in a run, or in the log of another system."""

    log: Annotated[Path, tyro.conf.Positional]
    """Run directory, a .csv, .jsonl or .json file of metrics, or what TRL or verl has printed (.log, .txt)."""
    json: str = ""
    """Also write the findings to this file."""
    fail_on: Literal["never", "critical"] = "never"
    """Exit with 5 when there is a finding of this severity."""


def doctor(words: list[str]) -> int:
    """`doctor`: findings on a run directory or another system's log."""
    from cluster.run.doctor import diagnose, skipped_rules
    from cluster.run.findings import findings_as_json, findings_as_text, worst_severity
    from cluster.run.logs import read_log
    from cluster.run.metrics import METRICS
    from cluster.run.report.collect import limits_of
    from cluster.run.saved_config import saved_settings

    options = tyro.cli(DoctorOptions, prog="launch.py doctor", args=words)
    log = read_log(options.log)
    # The metrics of a run stand beside its configuration, whichever of the two paths is given.
    limits = limits_of(saved_settings(options.log.parent if options.log.name == METRICS else options.log))
    findings, skipped = diagnose(log.rows, limits), skipped_rules(log.rows, limits)
    for note in log.notes:
        sys.stdout.write(inert(f"note: {note}\n"))
    sys.stdout.write(inert(findings_as_text(findings, skipped)) + "\n")
    if options.json:
        Path(options.json).write_text(findings_as_json(findings, skipped))
    return CRITICAL_FINDING if options.fail_on == "critical" and worst_severity(findings) == "critical" else DONE


def export(words: list[str]) -> int:
    """`export`: the newest checkpoint as a model directory."""
    from cluster.run.exporting import main

    return main(words)


@dataclass(frozen=True)
class PresetsOptions:
    """Show what each preset sets."""


def _say(text: object, code: int) -> int:
    sys.stderr.write(inert(f"{text}\n"))
    return code
