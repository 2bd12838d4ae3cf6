"""The trace of a round: what processes note down, and the document it becomes."""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.run.trace import Track, chrome_trace, clock_offset, in_lanes, trace_text
from cluster.timeline import MOST_SPANS, Span, Stopwatch, Timeline, Worker, around, work


class Clock:
    """Every look at it is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def nothing() -> None:
    return None


def test_a_span_lasts_from_the_beginning_to_the_end_of_its_context_and_may_hold_others() -> None:
    timeline = Timeline(on=True, clock=Clock())
    with timeline.span("learn", round=3), timeline.span("forward"):
        pass
    timeline.mark("group done", row="a")
    assert timeline.between(0, 99) == [
        Span("forward", 2.0, 3.0),
        Span("learn", 1.0, 4.0, {"round": 3}),
        Span("group done", 5.0, 5.0, {"row": "a"}),
    ]


def test_work_that_fails_is_a_span_too() -> None:
    timeline = Timeline(on=True, clock=Clock())
    with contextlib.suppress(ValueError), timeline.span("score"):
        raise ValueError
    assert [span.name for span in timeline.between(0, 99)] == ["score"]


def test_switched_off_nothing_is_kept_and_no_clock_is_read() -> None:
    clock = Clock()
    timeline = Timeline(on=False, clock=clock)
    with timeline.span("learn"):
        timeline.mark("here")
        timeline.add("there", 0, 1)
    assert timeline.between(0, 99) == []
    assert clock.now == 0
    assert timeline.span("a") is timeline.span("b")


def test_only_spans_that_touch_the_stretch_are_given_and_only_the_newest_are_kept() -> None:
    timeline = Timeline(on=True)
    for at in range(MOST_SPANS + 10):
        timeline.add("x", at, at + 1)
    assert [span.begin for span in timeline.between(0, 12)] == [10, 11, 12]
    assert len(timeline.between(0, 1e9)) == MOST_SPANS


class Engine:
    def forward(self, value: int) -> int:
        return value + 1

    def stream(self, count: int) -> Iterator[int]:
        yield from range(count)

    def fail(self) -> None:
        raise RuntimeError("out of memory")


def test_methods_become_spans_for_a_while_and_do_what_they_did() -> None:
    timeline, engine, settled = Timeline(on=True, clock=Clock()), Engine(), []
    names = {"forward": "forward", "stream": "old log-probs", "fail": "step"}
    with around(timeline, engine, names, lambda: settled.append(1)):
        assert engine.forward(1) == 2
        assert list(engine.stream(2)) == [0, 1]
        with pytest.raises(RuntimeError):
            engine.fail()
    assert engine.forward(2) == 3
    assert vars(engine) == {}
    assert [span.name for span in timeline.between(0, 99)] == ["forward", "old log-probs", "step"]
    assert len(settled) == 2


def test_switched_off_methods_are_not_touched() -> None:
    engine = Engine()
    with around(Timeline(on=False), engine, {"forward": "forward"}, nothing):
        assert vars(engine) == {}


class Shell(Worker):
    @work("load")
    def load(self, what: str) -> str:
        return f"loaded {what}"

    @work("generate")
    def generate(self, count: int) -> Iterator[int]:
        yield from range(count)

    @work("fail")
    def fail(self) -> None:
        raise RuntimeError


def test_work_is_counted_and_what_lies_between_the_items_of_a_stream_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    shell = Shell(traced=False)
    assert shell.load("it") == "loaded it"
    for _ in shell.generate(3):
        clock.now += 10
    with pytest.raises(RuntimeError):
        shell.fail()
    assert shell.busy == 1 + 4 + 1  # three items, and the end of the stream
    assert inspect.isgeneratorfunction(Shell.generate)


def test_work_is_a_span_of_its_name_where_it_is_traced() -> None:
    shell = Shell(traced=True)
    shell.load("it")
    assert list(shell.generate(2)) == [0, 1]
    with pytest.raises(RuntimeError):
        shell.fail()
    assert [span.name for span in shell.timeline.between(0, time.monotonic())] == ["load", "generate", "fail"]


def test_a_stopwatch_counts_a_context_inside_another_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", Clock())
    watch = Stopwatch()
    with watch, watch:
        pass
    with watch:
        pass
    assert watch.take() == 2
    assert watch.take() == 0


def test_a_round_becomes_one_track_per_process_in_the_order_of_the_flow() -> None:
    tracks = [
        Track("learner-0", "here", 0.0, [Span("minibatch", 105.0, 107.5, {"step": 4}), Span("step", 107.0, 107.25)]),
        Track("engine-10", "here", 0.0, []),
        Track("engine-2", "there", -1000.0, [Span("generate", 1101.0, 1103.0), Span("group done", 1102.0, 1102.0)]),
        Track("driver", "here", 0.0, [Span("old", 90.0, 99.0), Span("sync", 99.5, 100.5), Span("new", 111.0, 112.0)]),
        Track("scorer", "here", 0.0, in_lanes([Span("score", 102.0, 104.0), Span("score", 103.0, 103.5)], "grading")),
    ]  # fmt: skip

    def named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    def placed(pid: int) -> dict[str, Any]:
        return {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}

    assert chrome_trace(4, 100.0, 110.0, tracks) == {
        "displayTimeUnit": "ms",
        "otherData": {"round": 4, "seconds": 10.0, "clock": "monotonic, of the driver"},
        "traceEvents": [
            named("process_name", 0, 0, "driver"),
            placed(0),
            named("thread_name", 0, 0, "driver"),
            {"name": "sync", "pid": 0, "tid": 0, "ts": -500000.0, "ph": "X", "dur": 1000000.0},
            named("process_name", 1, 0, "engine-2 on there"),
            placed(1),
            named("thread_name", 1, 0, "engine-2"),
            {"name": "generate", "pid": 1, "tid": 0, "ts": 1000000.0, "ph": "X", "dur": 2000000.0},
            {"name": "group done", "pid": 1, "tid": 0, "ts": 2000000.0, "ph": "i", "s": "t"},
            named("process_name", 2, 0, "engine-10"),
            placed(2),
            named("thread_name", 2, 0, "engine-10"),
            named("process_name", 3, 0, "scorer"),
            placed(3),
            named("thread_name", 3, 0, "scorer"),
            named("thread_name", 3, 1, "grading 1"),
            named("thread_name", 3, 2, "grading 2"),
            {"name": "score", "pid": 3, "tid": 1, "ts": 2000000.0, "ph": "X", "dur": 2000000.0},
            {"name": "score", "pid": 3, "tid": 2, "ts": 3000000.0, "ph": "X", "dur": 500000.0},
            named("process_name", 4, 0, "learner-0"),
            placed(4),
            named("thread_name", 4, 0, "learner-0"),
            {"name": "minibatch", "pid": 4, "tid": 0, "ts": 5e6, "ph": "X", "dur": 2.5e6, "args": {"step": 4}},
            {"name": "step", "pid": 4, "tid": 0, "ts": 7000000.0, "ph": "X", "dur": 250000.0},
        ],
    }  # fmt: skip


def test_the_file_is_the_trace_in_ascii() -> None:
    track = Track("driver", "here", 0.0, [Span("sc\u00f6re \u202e", 1.0, 2.0, {"row": "</script>"})])
    trace = chrome_trace(1, 0.0, 3.0, [track])
    text = trace_text(trace)
    assert text.isascii()
    assert json.loads(text) == trace
    assert json.loads(trace_text(chrome_trace(1, 0.0, 3.0, []))) == chrome_trace(1, 0.0, 3.0, [])


def test_the_clock_of_another_machine_is_taken_from_the_shortest_exchange() -> None:
    assert clock_offset([(10.0, 500.0, 12.0), (20.0, 509.05, 20.1), (30.0, 530.0, 31.0)]) == pytest.approx(-489.0)


def test_spans_that_follow_each_other_share_a_lane() -> None:
    spans = [Span("c", 2.0, 3.0), Span("a", 0.0, 1.0), Span("b", 0.5, 2.0), Span("d", 2.5, 4.0)]
    assert [(span.name, span.lane) for span in in_lanes(spans, "x")] == [
        ("a", "x 1"), ("b", "x 2"), ("c", "x 1"), ("d", "x 2"),
    ]  # fmt: skip
