"""Gathering a trace: whom it asks, when, and what happens when somebody is gone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.run import tracing
from cluster.run.folder import RunFolder
from cluster.run.tracing import Tracer
from cluster.schedule import Generate, Record, Train
from cluster.timeline import Span


class Method:
    """A method of an actor; its call is what it will answer, None for no answer."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def remote(self, *_: float) -> Any:
        self.asked += 1
        return self.answer


def actor(spans: list[Span] | None, clock: float = 0.0) -> Any:
    return SimpleNamespace(spans=Method(spans), clock=Method(clock))


def answers(refs: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {name: ref for name, ref in refs.items() if ref is not None}


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "fetch_those", answers)
    monkeypatch.setattr("socket.gethostname", lambda: "here")


def system(**hosts: str) -> Any:
    members = {name.replace("_", "-"): actor([Span("generate", 1e9, 1e9 + 1)]) for name in hosts}
    return SimpleNamespace(members=members, hosts={name.replace("_", "-"): host for name, host in hosts.items()})


def test_without_a_round_to_trace_nobody_is_asked_and_nothing_is_kept(tmp_path: Path) -> None:
    said: list[str] = []
    tracer, fleet = Tracer(0, RunFolder(tmp_path), said.append), system(engine_0="here")
    tracer.begun(Generate(1, 0))
    tracer.ended(Generate(1, 0))
    tracer.align(0, fleet)
    tracer.ask(0, 0.0, fleet)
    tracer.close()
    engine = fleet.members["engine-0"]
    assert (engine.spans.asked, engine.clock.asked) == (0, 0)
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_the_round_is_asked_for_when_it_is_recorded_and_written_when_all_are_idle(tmp_path: Path) -> None:
    said: list[str] = []
    tracer, fleet = Tracer(2, RunFolder(tmp_path), said.append), system(engine_0="here", learner_0="here")
    for round_ in (1, 2, 3):
        tracer.write()
        tracer.align(round_, fleet)
        for task in (Generate(round_, round_ - 1), Train(round_, (0,), True), Record(round_)):
            tracer.begun(task)
            tracer.ended(task)
        tracer.ask(round_, 0.0, fleet)
        assert (tmp_path / "trace-round-2.json").exists() == (round_ == 3)
    tracer.close()
    engine = fleet.members["engine-0"]
    assert engine.spans.asked == 1
    assert engine.clock.asked == 0, "processes of one machine have one clock"
    (line,) = said
    assert "trace-round-2.json" in line
    events = json.loads((tmp_path / "trace-round-2.json").read_text())["traceEvents"]
    names = [(event["name"], event["args"]["round"]) for event in events if event.get("ph") == "X"]
    assert [name for name in names if name[1] == 2] == [("generate", 2), ("train", 2), ("record", 2)]


def test_the_clock_of_another_machine_is_read_several_times(tmp_path: Path) -> None:
    tracer, fleet = Tracer(1, RunFolder(tmp_path)), system(engine_0="there")
    tracer.align(1, fleet)
    assert fleet.members["engine-0"].clock.asked == tracing.CLOCK_READINGS
    tracer.ask(1, 0.0, fleet)
    tracer.close()
    assert "engine-0 on there" in (tmp_path / "trace-round-1.json").read_text()


def test_whoever_is_gone_is_missing_and_named_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    tracer, fleet = Tracer(1, RunFolder(tmp_path), said.append), system(engine_0="here", engine_1="here")
    tracer.align(1, fleet)
    fleet.members["engine-1"].spans.answer = None
    tracer.ask(1, 0.0, fleet)
    tracer.close()
    assert "without engine-1" in said[0]
    assert "engine-0" in (tmp_path / "trace-round-1.json").read_text()


def test_a_round_that_this_start_did_not_make_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    Tracer(2, RunFolder(tmp_path), said.append).close()
    assert "did not make that round" in said[0]
