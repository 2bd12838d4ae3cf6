"""Lessons: every file in this folder that defines LESSON is one lesson, found by itself.

A lesson is data: settings for the ordinary loop, what to look at, and functions that judge what the finished run left.
Nothing is scripted: `cluster/run/teaching.py` trains as any run does and says what came out, whatever that is.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.variants import Value

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Responses:
    """What every response that was trained on earned, over all rounds."""

    correctness: npt.NDArray[np.float64]
    """(B,) 1 where the answer was right."""
    total: npt.NDArray[np.float64]
    """(B,) the whole reward; beyond correctness it is what was paid for format, which is not all that was measured."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a finished run left behind for the judge."""

    rows: Sequence[Row]
    """Rows of metrics.jsonl, in order, the evaluation before any update included."""
    vocabulary: int
    """V; the entropy of a uniform policy is ln V."""
    responses: Responses
    """Every response."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number at the start of the run and at its end."""

    what: str
    """In words."""
    before: float
    """At the start."""
    after: float
    """At the end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    shown: bool
    """Whether the run showed what the lesson is about."""
    said: str
    """What happened, in plain words, with the numbers that decide."""
    figures: tuple[Figure, ...]
    """The numbers, before and after."""


@dataclass(frozen=True, slots=True)
class Twin:
    """One of the two runs of a lesson: they differ in these settings only."""

    title: str
    """What is different here, in a few words."""
    settings: Mapping[str, Value]
    """Dotted configuration name -> value, on top of the lesson's."""
    judge: Callable[[Evidence], Outcome]
    """Pure: from what the run left behind to its outcome."""
    why: str
    """Why this happens."""
    findings: tuple[str, ...] = ()
    """Ids by which the doctor names the failure, any one is enough; empty for the healthy twin."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One failure of GRPO training, and its healthy twin."""

    name: str
    """What `launch.py lesson` calls it."""
    title: str
    """What it shows, in one line."""
    settings: Mapping[str, Value]
    """Dotted configuration name -> value, for both twins."""
    failing: Twin
    """The run that goes wrong."""
    healthy: Twin
    """The run that does not."""
    look_at: tuple[str, ...]
    """Metrics and what to see in them, one per line."""


def lessons() -> dict[str, Lesson]:
    """All lessons of this folder, by name."""
    found: dict[str, Lesson] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        lesson = getattr(importlib.import_module(f"{__name__}.{module.name}"), "LESSON", None)
        if isinstance(lesson, Lesson):
            found[lesson.name] = lesson
    return found


def level(rows: Sequence[Row], key: str, *, last: bool, count: int = 3) -> float:
    """Mean of a metric over its first or last `count` rows that have it; NaN where none has."""
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return float(np.mean(values[-count:] if last else values[:count])) if values else float("nan")


def figure(rows: Sequence[Row], key: str, what: str, count: int = 3) -> Figure:
    """A metric at the start and at the end of the run."""
    return Figure(what, level(rows, key, last=False, count=count), level(rows, key, last=True, count=count))


def start_and_end(rows: Sequence[Row], key: str) -> tuple[float, float]:
    """First and last value of a metric: for evaluations, which are over many prompts each."""
    return level(rows, key, last=False, count=1), level(rows, key, last=True, count=1)
