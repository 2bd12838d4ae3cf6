"""metrics.jsonl and events.jsonl: every round once, in order, readable whatever the numbers and texts are."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import BrokenPromise
from cluster.run.metrics import EventLog, MetricsLog, decode_row, encode_row, read_events, read_metrics
from rollout.types import UserError


def test_rows_come_back_in_order_with_the_length_after_each(tmp_path):
    with MetricsLog(tmp_path) as log:
        assert log.next_round == 1
        offsets = [log.append({"round": round_, "reward/total": round_ / 10}) for round_ in range(3)]
        assert log.next_round == 3
        assert log.offset == offsets[-1] == (tmp_path / "metrics.jsonl").stat().st_size
    assert read_metrics(tmp_path) == [{"round": round_, "reward/total": round_ / 10} for round_ in range(3)]
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert [len(b"".join(lines[: at + 1])) for at in range(3)] == offsets


@pytest.mark.parametrize(
    ("written", "row", "message"),
    [
        ([], {"round": 2}, "leave a gap"),
        ([0, 1], {"round": 3}, "leave a gap"),
        ([0, 1], {"round": 1}, "leave a duplicate"),
        ([0, 1], {"round": 0}, "leave a duplicate"),
        ([], {"reward/total": 1.0}, "integer `round`"),
        ([], {"round": True}, "integer `round`"),
        ([], {"round": 1.0}, "integer `round`"),
    ],
)
def test_no_gap_and_no_duplicate(tmp_path, written, row, message):
    with MetricsLog(tmp_path) as log:
        for round_ in written:
            log.append({"round": round_})
        with pytest.raises(BrokenPromise, match=message):
            log.append(row)
    assert [each["round"] for each in read_metrics(tmp_path)] == written


def test_a_run_without_a_first_evaluation_starts_with_round_one(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"round": 1})
    assert MetricsLog(tmp_path).next_round == 2


def test_values_that_are_not_finite_leave_the_file_valid_json_and_come_back(tmp_path):
    row = {
        "round": 1,
        "policy/loss": math.nan,
        "policy/ratio_max": math.inf,
        "x": -math.inf,
        "numpy": np.float32("nan"),
        "steps": [{"step": 1, "policy/grad_norm": math.inf}, {"step": 2, "policy/grad_norm": 0.5}],
    }
    with MetricsLog(tmp_path) as log:
        log.append(row)

    def refuse(word):
        raise AssertionError(word)

    raw = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert raw["policy/loss"] is None
    assert raw["non_finite"]["policy/ratio_max"] == "inf"
    (again,) = read_metrics(tmp_path)
    assert math.isnan(again["policy/loss"])
    assert math.isnan(again["numpy"])
    assert (again["policy/ratio_max"], again["x"]) == (math.inf, -math.inf)
    assert again["steps"] == row["steps"]
    assert "non_finite" not in again


@given(
    st.dictionaries(
        st.text().filter(lambda key: key != "non_finite"),
        st.floats() | st.integers() | st.text() | st.none() | st.booleans() | st.lists(st.integers()),
    )
)
def test_any_row_is_one_line_of_ascii_and_survives(row):
    line = encode_row(row)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert not set(line[:-1]) & set(range(32))
    again = decode_row(line)
    assert again.keys() == row.keys()
    for key, value in row.items():
        assert again[key] == value or math.isnan(value)


def test_numpy_numbers_and_arrays_are_written_as_numbers():
    assert decode_row(encode_row({"a": np.int64(3), "b": np.float64(0.5), "c": np.arange(2), "d": np.bool_(True)})) == {
        "a": 3,
        "b": 0.5,
        "c": [0, 1],
        "d": True,
    }


def test_what_cannot_be_written_is_refused_before_anything_is_written(tmp_path):
    with MetricsLog(tmp_path) as log:
        with pytest.raises(TypeError):
            log.append({"round": 1, "x": object()})
        log.append({"round": 1})
    assert read_metrics(tmp_path) == [{"round": 1}]


def test_a_resume_moves_the_rows_behind_the_checkpoint_aside(tmp_path):
    with MetricsLog(tmp_path) as log:
        offsets = [log.append({"round": round_, "lost": round_ > 1}) for round_ in range(4)]
    with MetricsLog(tmp_path) as log:
        moved = log.truncate_to(offsets[1])
        assert moved is not None
        assert moved.name.startswith("metrics.discarded.")
        assert [row["round"] for row in read_metrics(moved)] == [2, 3]
        assert log.next_round == 2
        assert log.truncate_to(offsets[1]) is None
        log.append({"round": 2, "lost": False})
    assert [(row["round"], row["lost"]) for row in read_metrics(tmp_path)] == [(0, False), (1, False), (2, False)]


def test_a_resume_from_before_the_first_row_empties_the_file(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"round": 0})
        log.truncate_to(0)
        assert log.next_round == 1
        log.append({"round": 0})


def test_an_offset_that_cannot_be_is_refused(tmp_path):
    with MetricsLog(tmp_path) as log:
        end = log.append({"round": 0})
        with pytest.raises(BrokenPromise, match="rows are lost"):
            log.truncate_to(end + 1)
        with pytest.raises(BrokenPromise, match="no line end"):
            log.truncate_to(end - 3)
    assert [row["round"] for row in read_metrics(tmp_path)] == [0]


def test_a_row_torn_at_any_byte_is_set_aside_and_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with MetricsLog(tmp_path) as log:
        first = log.append({"round": 0})
        log.append({"round": 1})
    file = tmp_path / "metrics.jsonl"
    data = file.read_bytes()
    for length in range(first + 1, len(data)):
        file.write_bytes(data[:length])
        assert [row["round"] for row in read_metrics(tmp_path)] == [0]
        with MetricsLog(tmp_path) as log:
            assert log.torn_bytes == length - first
            log.append({"round": 1})
        assert file.read_bytes() == data
    assert len(list(tmp_path.glob("metrics.discarded.*.jsonl"))) == len(data) - first - 1


def test_a_file_with_a_hole_is_not_continued(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n{"round": 2}\n')
    with pytest.raises(BrokenPromise, match="once each and in order"):
        MetricsLog(tmp_path)


def test_a_line_that_is_no_row_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n[1]\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(tmp_path / "nowhere")


def test_events_are_stamped_and_hostile_text_stays_on_its_line(tmp_path):
    log = EventLog(tmp_path)
    log.append("finding", round=3, id="plateau", evidence={"reward/total": math.nan})
    log.append("response", text='\x1b]0;x\x07\n{"round": 9}\u2028\u202e')
    with pytest.raises(ValueError, match="time"):
        log.append("x", time=1)
    log.close()
    data = (tmp_path / "events.jsonl").read_bytes()
    assert data.isascii()
    assert data.count(b"\n") == 2
    first, second = read_events(tmp_path)
    assert (first["kind"], first["round"], first["id"]) == ("finding", 3, "plateau")
    assert first["time"] <= second["time"]
    assert second["text"].startswith("\x1b]0;x")
    assert read_events(tmp_path / "nowhere") == []
