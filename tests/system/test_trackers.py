"""Trackers run beside the training: what happens to them never happens to it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from cluster.run.metrics import EventLog, MetricsLog, read_events
from cluster.run.tracker_process import numbers_of
from cluster.run.trackers import Choice, Trackers, choose_trackers
from rollout.types import UserError


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run / "tensorboard"))
    seen.Reload()
    return {
        tag: [(each.step, round(each.tensor_proto.float_val[0], 6)) for each in seen.Tensors(tag)]
        for tag in seen.Tags()["tensors"]
    }


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.toml").write_text('rollouts = 8\npreset = "grpo"\n')
    return tmp_path


def test_the_numbers_of_every_round_arrive(run):
    events, metrics = EventLog(run), MetricsLog(run)
    trackers = Trackers([Choice("tensorboard")], run, events)
    for round_ in range(3):
        metrics.append({"round": round_, "reward/total": round_ / 4, "policy/loss": float("nan"), "steps": [{"a": 1}]})
        assert trackers.check(round_) == []
    trackers.close(seconds=60)
    assert read_events(run) == []
    assert scalars(run) == {"reward/total": [(0, 0.0), (1, 0.25), (2, 0.5)]}


def test_names_of_trl_by_option_and_only_rounds_of_this_start(run):
    events, metrics = EventLog(run), MetricsLog(run)
    for round_ in range(3):
        metrics.append({"round": round_, "reward/total": round_ / 4})
    Trackers([Choice("tensorboard", trl=True)], run, events, first_round=2).close(seconds=60)
    assert read_events(run) == []
    assert scalars(run) == {"reward": [(2, 0.5)]}


def test_a_tracker_that_fails_is_told_once_and_switched_off(run):
    (run / "tensorboard").write_text("a file where a folder should be")
    events, metrics = EventLog(run), MetricsLog(run)
    trackers = Trackers([Choice("tensorboard")], run, events)
    metrics.append({"round": 0, "reward/total": 1.0})
    wait_for(lambda: trackers.check(0))
    metrics.append({"round": 1, "reward/total": 1.0})
    assert trackers.check(1) == []
    trackers.close()
    (event,) = read_events(run)
    assert (event["kind"], event["tracker"], event["round"]) == ("tracker_off", "tensorboard", 0)
    assert "exit code 1" in event["reason"]
    assert event["last_line"]


def test_a_tracker_that_hangs_is_ended_at_the_deadline(run):
    events = EventLog(run)
    trackers = Trackers([Choice("tensorboard")], run, events)
    (pid,) = trackers.pids.values()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    trackers.close(seconds=0.5)
    assert time.monotonic() - began < 10
    assert not os.path.exists(f"/proc/{pid}")
    (event,) = read_events(run)
    assert "was not done within 0.5 s" in event["reason"]


def test_a_typing_mistake_is_found_before_anything_starts():
    assert choose_trackers("") == []
    assert choose_trackers("tensorboard:trl, tensorboard") == [Choice("tensorboard", trl=True), Choice("tensorboard")]
    with pytest.raises(UserError, match="Perhaps you meant tensorboard"):
        choose_trackers("tensorbord")
    with pytest.raises(UserError, match="unknown option dark"):
        choose_trackers("tensorboard:dark")


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install mlflow-skinny"):
        choose_trackers("mlflow")


def test_only_finite_numbers_are_sent():
    row = {"round": 3, "a": 1, "b": float("inf"), "c": "text", "steps": [], "reward/total": 0.5}
    assert numbers_of(row) == {"a": 1.0, "reward/total": 0.5}
    assert numbers_of(row, trl=True) == {"a": 1.0, "reward": 0.5}
