"""Faults on purpose: they happen at their place, as often as was asked, and never otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import faults


def test_without_the_variable_no_fault_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert not any(faults.reach(point, 0, 1) for point in ("ckpt.shard", "bwd", "gen.mid", "sync.recv"))


def test_a_fault_happens_at_its_place_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(faults.VARIABLE, "bwd@2:1:7:nan")
    assert [faults.reach("bwd", 1, 7) for _ in range(3)] == [False, True, False]
    assert not faults.reach("bwd", 0, 7)
    assert not faults.reach("bwd", 1, 8)
    assert not faults.reach("fwd", 1, 7)
    monkeypatch.setenv(faults.VARIABLE, "bwd@0:1:7:nan")
    assert faults.reach("bwd", 1, 7)
    assert faults.reach("bwd", 1, 7)


def test_a_fault_that_happens_once_is_remembered_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(faults.VARIABLE, "pack:0:3:raise:once")
    with pytest.raises(RuntimeError, match="injected at pack"):
        faults.reach("pack", 0, 3, tmp_path)
    faults._reached.clear()  # what a new process starts with
    assert not faults.reach("pack", 0, 3, tmp_path)


@pytest.mark.parametrize("text", ["bwd:0:1", "bwd:0:1:explode", "bwd:x:1:nan", "bwd:0:1:nan:twice"])
def test_a_malformed_fault_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        faults.parse_fault(text)
