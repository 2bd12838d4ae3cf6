"""`launch.py lesson NAME`: trains one twin of a lesson through the ordinary loop, then says what came out of it."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from cluster.errors import PlanError
from cluster.model_facts import read_model_facts
from cluster.run import cli
from cluster.run.config import Config
from cluster.run.findings import Finding
from cluster.run.folder import default_run
from cluster.run.lessons import Evidence, Lesson, Outcome, Responses, Twin, lessons

WIDTH = 110


@dataclass(frozen=True)
class LessonOptions:
    """See one way in which training goes wrong on the demo, in minutes, and its healthy twin."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Which lesson (left out: all of them, in a line each)."""
    healthy: bool = False
    """Train the twin that does not go wrong."""
    seed: int = 0
    """Seed of everything that is drawn."""
    run: str = ""
    """Run directory (default: runs/<time>-lesson-<name>)."""
    quiet: bool = False
    """Print no line per round."""
    json: str = ""
    """Also write the outcome and the doctor's findings to this file."""


def main(words: list[str], train: Callable[[Config, Path | None], int]) -> int:
    """Train as the lesson says, then judge; returns the exit code of the training."""
    options = tyro.cli(LessonOptions, prog="launch.py lesson", args=words)
    known = lessons()
    if not options.name:
        sys.stdout.write("".join(f"{name:<14}{lesson.title}\n" for name, lesson in known.items()))
        return 0
    if options.name not in known:
        close = cli.nearest(options.name, known)
        raise PlanError(f"lesson {options.name}: there is no such lesson.{close}\n  All: {', '.join(known)}.")
    lesson = known[options.name]
    config = lesson_config(lesson, healthy=options.healthy, seed=options.seed, run=options.run, quiet=options.quiet)
    sys.stdout.write(introduction(lesson, healthy=options.healthy) + "\n")
    sys.stdout.flush()
    code = train(config, None)
    outcome, findings = judge(lesson, config, healthy=options.healthy)
    sys.stdout.write(conclusion(lesson, config, outcome, findings, healthy=options.healthy) + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(_document(lesson, config, outcome, findings, options.healthy)) + "\n")
    return code


def lesson_config(lesson: Lesson, *, healthy: bool, seed: int, run: str = "", quiet: bool = False) -> Config:
    """The configuration of one twin: defaults, the preset the lesson starts from, its settings, the twin's."""
    twin = lesson.healthy if healthy else lesson.failing
    preset = str(lesson.settings.get("preset", Config.preset))
    settings: dict[str, Any] = cli.preset_settings(preset) | dict(lesson.settings) | dict(twin.settings)
    place = Path(run) if run else default_run(f"lesson-{lesson.name}{'-healthy' if healthy else ''}")
    settings |= {"seed": seed, "run": str(place.absolute()), "quiet": quiet, "checkpoint.every": 0}
    return cli.apply_settings(Config(), settings)


def judge(lesson: Lesson, config: Config, *, healthy: bool) -> tuple[Outcome, list[Finding]]:
    """The outcome of a finished run, and what `launch.py doctor` says about it."""
    from cluster.run.doctor import diagnose
    from cluster.run.logs import read_log

    rows = read_log(config.run).rows
    vocabulary = read_model_facts(config.model).vocab_size
    evidence = Evidence(rows, vocabulary, read_responses(Path(config.run)))
    return _twin(lesson, healthy).judge(evidence), diagnose(rows)


def read_responses(run: Path) -> Responses:
    """Correctness and reward of every response that a run was trained on."""
    import pyarrow.parquet as pq

    columns = ["reward_correctness", "reward_total"]
    tables = [pq.read_table(file, columns=columns) for file in sorted((run / "groups").glob("round-*.parquet"))]
    parts = [[table[name].to_numpy() for table in tables] for name in columns]
    return Responses(*(np.concatenate(part) if part else np.empty(0) for part in parts))


def introduction(lesson: Lesson, *, healthy: bool) -> str:
    """What is about to be run, before it is."""
    twin = _twin(lesson, healthy)
    settings = {**lesson.settings, **twin.settings}
    flags = " ".join(f"{cli.flag_name(name)} {value}" for name, value in settings.items())
    return "\n".join(
        [
            f"lesson {lesson.name}: {lesson.title}",
            _wrapped("this run   ", twin.title + "."),
            _wrapped("settings   ", flags),
            "",
        ]
    )


def conclusion(lesson: Lesson, config: Config, outcome: Outcome, findings: Sequence[Finding], *, healthy: bool) -> str:
    """What happened, the numbers, the doctor's name for it, where to look, and how to run the twin."""
    twin = _twin(lesson, healthy)
    verdict = "It showed what the lesson is about." if outcome.shown else "It did NOT show what the lesson is about."
    lines = ["", _wrapped("what happened  ", f"{verdict} {outcome.said}"), ""]
    lines.append(f"{'':<44}{'start':>10}{'end':>10}")
    lines += [f"  {each.what:<42}{_number(each.before):>10}{_number(each.after):>10}" for each in outcome.figures]
    lines += ["", _wrapped("why            ", twin.why), ""]
    lines += [_wrapped("doctor         ", doctor_says(twin, findings)), ""]
    lines += [_wrapped("look at        " if not at else " " * 15, text) for at, text in enumerate(lesson.look_at)]
    other = f"python launch.py lesson {lesson.name}{'' if healthy else ' --healthy'} --seed {config.seed}"
    lines += ["", f"report         python launch.py report {config.run}"]
    lines += [f"{'failing twin' if healthy else 'healthy twin':<15}{other}"]
    lines += [f"your own       python launch.py --config {config.run}/config.toml --run DIR  (and any flag)"]
    return "\n".join(lines)


def doctor_says(twin: Twin, findings: Sequence[Finding]) -> str:
    """Which finding names the failure; for a healthy twin, that nothing critical was found."""
    loud = [f"{each.id} ({each.severity}, since round {each.since_round})" for each in findings if _loud(each)]
    everything = ", ".join(loud) or "nothing critical and no warning"
    if not twin.findings:
        verdict = "Nothing critical" if named(twin, findings) else "Something critical, which no healthy run has"
        return f"{verdict}: {everything}."
    # The twin lists the closest name first; the doctor lists the loudest first.
    naming = sorted(
        (each for each in findings if each.id in twin.findings), key=lambda each: twin.findings.index(each.id)
    )
    if not naming:
        return f"It did not name this failure ({' or '.join(twin.findings)}); it found: {everything}."
    first = naming[0]
    return f"{first.id} names it, since round {first.since_round}: {first.cause} All that was found: {everything}."


def named(twin: Twin, findings: Sequence[Finding]) -> bool:
    """Whether the doctor is right about a twin: it names the failure, or finds nothing critical in the healthy one."""
    if twin.findings:
        return any(each.id in twin.findings for each in findings)
    return not any(each.severity == "critical" for each in findings)


def _loud(finding: Finding) -> bool:
    return finding.severity != "info"


def _twin(lesson: Lesson, healthy: bool) -> Twin:
    return lesson.healthy if healthy else lesson.failing


def _document(
    lesson: Lesson, config: Config, outcome: Outcome, findings: Sequence[Finding], healthy: bool
) -> dict[str, Any]:
    return {
        "lesson": lesson.name,
        "twin": "healthy" if healthy else "failing",
        "seed": config.seed,
        "run": config.run,
        "shown": outcome.shown,
        "said": outcome.said,
        "figures": [dataclasses.asdict(each) for each in outcome.figures],
        "doctor_right": named(_twin(lesson, healthy), findings),
        "findings": [dataclasses.asdict(each) for each in findings],
    }


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
