"""`--trace-round N`: one round as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

Pure: spans of every process in, a JSON document out. One track per process (driver, scorer, engines, ranks), in the
order of the flow; times are microseconds since the round began, on the driver's clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.timeline import Span

_ORDER = ("driver", "engine", "scorer", "learner")


@dataclass(frozen=True, slots=True)
class Track:
    """The spans of one process."""

    name: str
    """driver, scorer, engine-0, learner-1, ..."""
    host: str
    """Machine it runs on."""
    offset: float
    """Seconds to add to its clock to get the driver's; 0 on the driver's own machine, where clocks are one."""
    spans: Sequence[Span]


def clock_offset(samples: Sequence[tuple[float, float, float]]) -> float:
    """Seconds to add to another clock to get ours, from (sent, theirs, received) samples.

    The sample with the shortest way says most: the other clock was read somewhere between sending and receiving.
    """
    sent, theirs, received = min(samples, key=lambda sample: sample[2] - sample[0])
    return (sent + received) / 2 - theirs


def chrome_trace(round_: int, begin: float, end: float, tracks: Sequence[Track]) -> dict[str, Any]:
    """The trace of a round that lasted from `begin` to `end` on the driver's clock; spans outside are left out.

    A span that began before the round, or ends after it, is shown whole.
    """
    events: list[dict[str, Any]] = []
    for pid, track in enumerate(sorted(tracks, key=_place)):
        title = track.name if track.host == _host(tracks) else f"{track.name} on {track.host}"
        events.append(_named("process_name", pid, 0, title))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        lanes = ["", *sorted({span.lane for span in track.spans if span.lane}, key=_natural)]
        for tid, lane in enumerate(lanes):
            events.append(_named("thread_name", pid, tid, lane or track.name))
        shown = [span for span in track.spans if span.end + track.offset >= begin and span.begin + track.offset <= end]
        for span in sorted(shown, key=lambda span: (span.begin, -span.end)):
            events.append(_event(span, pid, lanes.index(span.lane), track.offset - begin))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"round": round_, "seconds": round(end - begin, 6), "clock": "monotonic, of the driver"},
        "traceEvents": events,
    }


def in_lanes(spans: Sequence[Span], name: str) -> list[Span]:
    """Spans that overlap, spread over as few lanes as it takes: `name 1`, `name 2`, ..."""
    free: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        lane = next((at for at, until in enumerate(free) if until <= span.begin), len(free))
        free[lane : lane + 1] = [span.end]
        placed.append(Span(span.name, span.begin, span.end, span.detail, f"{name} {lane + 1}"))
    return placed


def trace_text(trace: Mapping[str, Any]) -> str:
    """The file: ASCII JSON, one event per line."""
    events = ",\n".join(json.dumps(event, ensure_ascii=True, allow_nan=False) for event in trace["traceEvents"])
    rest = json.dumps({key: value for key, value in trace.items() if key != "traceEvents"}, ensure_ascii=True)
    return f'{rest[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def _event(span: Span, pid: int, tid: int, shift: float) -> dict[str, Any]:
    event: dict[str, Any] = {"name": span.name, "pid": pid, "tid": tid, "ts": _micro(span.begin + shift)}
    if span.end > span.begin:
        event |= {"ph": "X", "dur": round(_micro(span.end + shift) - event["ts"], 3)}
    else:
        event |= {"ph": "i", "s": "t"}
    return event | ({"args": dict(span.detail)} if span.detail else {})


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _micro(seconds: float) -> float:
    """Microseconds to the nanosecond."""
    return round(seconds * 1e6, 3)


def _host(tracks: Sequence[Track]) -> str:
    return next((track.host for track in tracks if track.name == "driver"), "")


def _place(track: Track) -> tuple[int, list[Any]]:
    kind = track.name.split("-")[0]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), _natural(track.name))


def _natural(name: str) -> list[Any]:
    """`engine-10` after `engine-9`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
