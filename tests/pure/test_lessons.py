"""Lessons: their settings make runs that can be planned, and their judges tell what was shown from what was not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.errors import PlanError
from cluster.model_facts import read_model_facts
from cluster.plan import make_plan
from cluster.resources import Resources
from cluster.run.cli import fields
from cluster.run.findings import Finding
from cluster.run.lessons import Evidence, Lesson, Responses, lessons
from cluster.run.lessons.clip import falls_apart, holds
from cluster.run.lessons.format_hack import hacked, honest
from cluster.run.lessons.kl_collapse import collapsed, stays
from cluster.run.rules import all_rules
from cluster.run.teaching import conclusion, doctor_says, introduction, lesson_config, main, named

LESSONS = list(lessons().values())
VOCABULARY = 128
LAPTOP = Resources(cpus=2, gpus=0, memory=16 << 30)


def evidence(right: Sequence[float] = (), total: Sequence[float] = (), **columns: Sequence[float]) -> Evidence:
    """A run whose rows hold the columns (`stage__what` for `stage/what`), and its responses."""
    count = max(len(column) for column in columns.values())
    rows: list[dict[str, Any]] = [{"round": at} for at in range(count)]
    for name, column in columns.items():
        for at, value in enumerate(column):
            if not math.isnan(value):
                rows[at][name.replace("__", "/")] = value
    return Evidence(rows, VOCABULARY, Responses(np.array(right, dtype=float), np.array(total, dtype=float)))


def finding(name: str, severity: Any) -> Finding:
    return Finding(name, severity, 3, {}, "A cause.", "A cure.")


def test_there_are_the_three_lessons() -> None:
    assert sorted(lessons()) == ["clip", "format-hack", "kl-collapse"]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
@pytest.mark.parametrize("healthy", [False, True])
def test_a_twin_is_a_run_that_can_be_planned(lesson: Lesson, healthy: bool) -> None:
    config = lesson_config(lesson, healthy=healthy, seed=3, run="lesson-run")
    plan = make_plan(config, LAPTOP, read_model_facts(config.model))
    assert plan.steps_per_round >= 1
    assert (config.seed, config.checkpoint.every, config.model) == (3, 0, "demo")
    assert plan.eval_every > 0, "there must be an evaluation before and after"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_twins_differ_in_what_the_lesson_is_about_and_in_nothing_else(lesson: Lesson) -> None:
    first = dict(fields(lesson_config(lesson, healthy=False, seed=0, run="one")))
    other = dict(fields(lesson_config(lesson, healthy=True, seed=0, run="one")))
    different = {name for name in first if first[name] != other[name]}
    assert different == set(lesson.failing.settings) == set(lesson.healthy.settings)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_failing_twin_names_findings_that_exist_and_a_healthy_one_none(lesson: Lesson) -> None:
    known = {rule.id for rule in all_rules()}
    assert lesson.failing.findings
    assert set(lesson.failing.findings) <= known
    assert lesson.healthy.findings == ()


def test_clip_without_a_bound_is_shown_when_accuracy_is_gone() -> None:
    gone = evidence(eval__correctness=[0.2, 0.1, 0.01], policy__ratio_max=[math.nan, 50, 2000])
    kept = evidence(eval__correctness=[0.2, 0.1, 0.19], policy__ratio_max=[math.nan, 50, 2000])
    assert falls_apart(gone).shown
    assert "2,000" in falls_apart(gone).said
    assert not falls_apart(kept).shown
    assert holds(kept).shown
    assert not holds(evidence(eval__correctness=[0.2, 0.3, 0.1])).shown, "half is lost, however good it was meanwhile"


def test_kl_collapse_needs_both_noise_and_the_loss_of_all_accuracy() -> None:
    top = math.log(VOCABULARY)
    nan = math.nan
    noise = [nan, 0.3, *[0.95 * top] * 3]
    both = evidence(
        eval__correctness=[0.2, nan, nan, nan, 0.0],
        policy__entropy=noise,
        reward__correctness=[nan, 0.3, 0.0, 0.0, 0.0],
    )
    assert collapsed(both).shown
    assert "since round 2" in collapsed(both).said
    assert not stays(both).shown
    calm = evidence(eval__correctness=[0.2, nan, nan, 0.0], policy__entropy=[nan, 0.3, 0.4, 0.5])
    assert not collapsed(calm).shown, "accuracy is gone, but the policy is no noise"
    assert stays(calm).shown
    noisy = evidence(eval__correctness=[0.2, nan, nan, nan, 0.1], policy__entropy=noise)
    assert not collapsed(noisy).shown, "noise, but some accuracy is left"


@pytest.mark.parametrize(
    ("right", "form", "shown"),
    [
        ([0.2, 0.2], [0.5, 0.95], True),
        ([0.2, 0.1], [0.5, 0.95], True),
        ([0.2, 0.4], [0.5, 0.95], False),
        ([0.2, 0.2], [0.5, 0.8], False),
        ([0.2, 0.1], [0.97, 0.95], False),
    ],
)
def test_format_is_hacked_when_it_saturates_while_accuracy_does_not_rise(
    right: list[float], form: list[float], shown: bool
) -> None:
    assert hacked(evidence(eval__correctness=right, eval__format=form)).shown is shown


def test_one_response_paid_for_form_alone_refutes_conditional_format() -> None:
    curves: dict[str, list[float]] = {"eval__correctness": [0.2, 0.3], "eval__format": [0.5, 0.9]}
    assert honest(evidence(right=[1, 1, 0], total=[4, 1, 0], **curves)).shown
    assert not honest(evidence(right=[1, 1, 0], total=[4, 1, 3], **curves)).shown
    assert not honest(evidence(**curves)).shown, "no response was read, so nothing is proven"
    curves["eval__correctness"] = [0.2, 0.19]
    assert not honest(evidence(right=[1], total=[4], **curves)).shown


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_what_a_lesson_says_holds_verdict_doctor_numbers_and_the_command_of_the_twin(lesson: Lesson) -> None:
    config = lesson_config(lesson, healthy=False, seed=1, run="runs/x")
    run = evidence(eval__correctness=[0.2, 0.01], eval__format=[0.5, 0.9])
    outcome = lesson.failing.judge(run)
    text = conclusion(lesson, config, outcome, [finding(lesson.failing.findings[0], "critical")], healthy=False)
    assert f"launch.py lesson {lesson.name} --healthy --seed 1" in text
    assert f"{lesson.failing.findings[0]} names it, since round 3" in " ".join(text.split())
    assert "0.200" in text
    assert "0.010" in text
    assert all(len(line) <= 200 for line in text.splitlines())
    assert lesson.failing.title in " ".join(introduction(lesson, healthy=False).split())
    refuted = conclusion(lesson, config, dataclasses.replace(outcome, shown=False), [], healthy=False)
    assert "It did NOT show" in refuted


def test_the_doctor_is_right_when_it_names_the_failure_and_is_silent_about_health() -> None:
    clip = lessons()["clip"]
    assert named(clip.failing, [finding("ratio-explosion", "warning")])
    assert not named(clip.failing, [finding("plateau", "info")])
    assert "did not name" in doctor_says(clip.failing, [finding("plateau", "info")])
    assert named(clip.healthy, [finding("clip-saturation", "warning")])
    assert not named(clip.healthy, [finding("reward-collapse", "critical")])
    assert doctor_says(clip.healthy, [finding("reward-collapse", "critical")]).startswith("Something critical")


def test_lessons_are_listed_and_an_unknown_one_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    def never(*_: object) -> int:
        raise AssertionError("nothing must be trained")

    assert main([], never) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in lessons())
    with pytest.raises(PlanError, match="Perhaps you meant kl-collapse"):
        main(["kl-colapse"], never)
