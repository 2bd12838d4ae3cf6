from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.errors import INTERRUPTED, BrokenPromise, PlanError, RemoteFailure, Stopped
from cluster.run import evaluating
from cluster.run.cli import as_toml, parse
from cluster.run.config import Config
from cluster.run.generation import Generation
from rollout.config import DataConfig
from rollout.types import Prompt


@pytest.fixture
def asked(monkeypatch):
    """What an evaluation was asked for; none is made."""
    seen = []

    def record(config, temperature, aside):
        seen.append((config, temperature, aside))
        return "table", {}

    monkeypatch.setattr(evaluating, "_evaluate", record)
    return seen


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that has a trained model."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    for file in ("metrics.jsonl", "model/config.json"):
        (folder / file).write_text("{}")
    words = ["--prompts", "my.jsonl", "--reward", "my.py:reward", "--data.answer-key", "gold", "--eval.size", "40"]
    (folder / "config.toml").write_text(as_toml(parse([*words, "--rollout.max-new-tokens", "24"])))
    return folder


def test_a_run_is_measured_as_it_was_while_it_was_trained(asked, run):
    evaluating.main([str(run), "--samples", "4"])
    (config, temperature, aside) = asked[0]
    assert (config.model, config.prompts) == (str(run / "model"), "my.jsonl")
    assert config.reward_function.endswith("my.py:reward")
    assert (config.data.answer_key, config.rollout.max_new_tokens) == ("gold", 24)
    assert (config.eval.size, config.eval.samples, temperature, aside) == (40, 4, 1.0, 40)


def test_other_prompts_for_a_run_are_taken_as_they_are(asked, run):
    evaluating.main(["--prompts", "other.jsonl", "--size", "7", "--data.answer-key", "answer", str(run)])
    (config, _, aside) = asked[0]
    assert (config.prompts, config.data.answer_key, config.eval.size, aside) == ("other.jsonl", "answer", 7, 0)


def test_an_evaluation_joins_a_cluster_when_it_is_told_to_and_not_because_the_run_did(asked, run):
    (run / "config.toml").write_text(as_toml(parse(["--cluster.address", "box1:6379"])))
    evaluating.main([str(run)])
    evaluating.main([str(run), "--cluster.address", "box2:6379"])
    evaluating.main(["demo", "--cluster.address", "box3:6379"])
    assert [config.cluster.address for config, *_ in asked] == ["", "box2:6379", "box3:6379"]


def test_a_model_has_the_defaults_and_columns_can_be_named(asked):
    evaluating.main(["demo", "--greedy", "--data.prompt-key", "question"])
    (config, temperature, aside) = asked[0]
    assert (config.model, config.prompts, temperature, aside) == ("demo", "arithmetic", 0.0, 0)
    assert config.data == DataConfig(prompt_key="question")


def test_greedy_with_several_samples_is_refused(asked):
    with pytest.raises(PlanError, match="leave --samples at 1"):
        evaluating.main(["demo", "--greedy", "--samples", "2"])


def test_a_run_without_a_model_says_how_to_get_one(asked, run):
    (run / "model" / "config.json").unlink()
    with pytest.raises(PlanError, match="no trained model yet"):
        evaluating.main([str(run)])


@pytest.mark.parametrize(("failed", "stops"), [(0, False), (2, False), (3, True)])
def test_a_grader_that_fails_on_more_than_one_percent_stops_an_evaluation_too(failed, stops):
    prompt = Prompt("r", "q", np.zeros(1, np.int32), "7", "sums")
    outcomes = [SimpleNamespace(errors=int(k < failed)) for k in range(200)]
    generation: Any = SimpleNamespace(
        config=Config(),
        plan=None,
        sampling=lambda temperature: None,
        scorer=SimpleNamespace(last_error="--reward my.py:reward, row r: KeyError"),
        _stream=lambda *_: iter([*outcomes, None]),
    )
    generation._check_grader = Generation._check_grader.__get__(generation)
    if stops:
        with pytest.raises(BrokenPromise, match=r"evaluation: the reward failed on 3 of 200 .*\n.*KeyError"):
            Generation.held_out(generation, [prompt] * 200)
    else:
        assert len(Generation.held_out(generation, [prompt] * 200)) == 200


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)])
def test_an_evaluation_that_is_terminated_has_nothing_to_resume(number, ending):
    def terminated():
        with evaluating.ended_as_a_run({}, [], 60.0):
            os.kill(os.getpid(), number)
            time.sleep(1.0)

    with pytest.raises(ending) as raised:
        terminated()
    assert getattr(raised.value, "code", INTERRUPTED) == (4 if number == signal.SIGTERM else 130)


def test_an_evaluation_whose_engines_are_lost_is_no_mistake_of_the_user():
    with pytest.raises(Stopped, match="engine-0: lost 4 times") as raised, evaluating.ended_as_a_run({}, [], 60.0):
        raise RemoteFailure("engine-0: lost 4 times within 60 min")
    assert raised.value.code == 4
    with pytest.raises(PlanError), evaluating.ended_as_a_run({}, [], 60.0):
        raise PlanError("--model nowhere")
