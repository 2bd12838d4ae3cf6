"""The checkpoint protocol: whatever happens, what is found afterwards is whole, and it is the old or the new state."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import faults
from cluster.errors import PlanError
from cluster.run.checkpoints import CheckpointStore, verify
from cluster.run.manifest import (
    Damaged,
    Manifest,
    NotSaved,
    check_name,
    count_votes,
    evictable,
    folder_name,
    round_of,
    search_order,
    setting_differences,
)
from learner.types import SavedFile, Vote
from tests.pure.checkpoint_makers import PLAIN, flip, manifest_of, swap_for_link, truncate, writer

POINTS = ("ckpt.shard", "ckpt.vote", "ckpt.manifest", "ckpt.rename", "ckpt.latest", "ckpt.evict")


def silent(_: str) -> None:
    pass


def commit(store: CheckpointStore, round_: int, score: float | None = None) -> None:
    store.commit(manifest_of(round_, score=score), writer(round_), expected_bytes=0)
    store.evict(round_)


def run_of(tmp_path: Path, *rounds: int) -> CheckpointStore:
    store = CheckpointStore(tmp_path, keep=2)
    for round_ in rounds:
        commit(store, round_)
    return store


def found(store: CheckpointStore, heard: list[str] | None = None) -> int:
    checkpoint = store.find_latest((heard if heard is not None else []).append)
    assert checkpoint is not None
    assert verify(checkpoint.path) == checkpoint.manifest
    return checkpoint.manifest.round


# --- The normal case --------------------------------------------------------------------------------------------------


def test_what_was_committed_is_found_again(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1)
    checkpoint = CheckpointStore(tmp_path).find_latest(silent)
    assert checkpoint is not None
    assert checkpoint.manifest.weights == "weights 1"
    assert checkpoint.manifest.steps == 4
    assert replace(checkpoint.manifest, files=(), weights="", steps=0, round=0) == PLAIN
    assert sorted(p.name for p in store.path.iterdir()) == ["LATEST", "round-00001"]


def test_a_run_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path).find_latest(silent) is None


def test_round_0_needs_no_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.commit(replace(manifest_of(0, initial=True), weights="w"), writer(0), expected_bytes=0)
    checkpoint = store.find_latest(silent)
    assert checkpoint is not None
    assert checkpoint.manifest.initial
    assert checkpoint.manifest.weights == "w"
    assert [path.name for path in checkpoint.path.iterdir()] == ["manifest.json"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for round_, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.4), (5, None)):
        commit(store, round_, score)
    assert sorted(p.name for p in store.path.glob("round-*")) == ["round-00002", "round-00004", "round-00005"]


@given(
    scores=st.dictionaries(st.integers(0, 30), st.none() | st.floats(0, 1), min_size=1),
    keep=st.integers(-1, 5),
    data=st.data(),
)
def test_eviction_never_takes_the_current_the_newest_or_the_best(
    scores: dict[int, float | None], keep: int, data: st.DataObject
) -> None:
    current = data.draw(st.sampled_from(sorted(scores)))
    gone = evictable(scores, keep, current)
    kept = set(scores) - set(gone)
    assert current in kept
    assert max(scores) in kept
    measured = [score for score in scores.values() if score is not None]
    assert not measured or max(measured) in [scores[round_] for round_ in kept]
    assert len(kept) <= max(1, keep) + 2


# --- Killed anywhere --------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Run in a forked process, killed some seconds after it began; returns the wait status."""
    begun, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(begin, b".")
            work()
        except BaseException:  # noqa: BLE001  the child must never return into the test runner
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.read(begun, 1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    os.close(begun)
    os.close(begin)
    return os.waitpid(pid, 0)[1]


def commit_with_shard_fault(store: CheckpointStore, round_: int) -> None:
    def write(folder: Path) -> dict[str, Vote]:
        (folder / "half").write_bytes(b"x" * 1000)
        faults.reach("ckpt.shard", 0, round_)
        (folder / "half").unlink()
        return dict(writer(round_)(folder))

    store.commit(manifest_of(round_), write, expected_bytes=0)
    store.evict(round_)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_every_point_leaves_the_old_or_the_new_state(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_of(tmp_path, 1, 2, 3)
    monkeypatch.setenv(faults.VARIABLE, f"{point}:0:4:kill9")
    status = in_child(lambda: commit_with_shard_fault(store, 4))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    after = CheckpointStore(tmp_path)
    heard: list[str] = []
    assert found(after, heard) == (4 if point == "ckpt.evict" else 3)
    assert heard == []
    monkeypatch.delenv(faults.VARIABLE)
    checkpoint = after.find_latest(silent)
    assert checkpoint is not None
    after.adopt(checkpoint)
    assert not list(after.path.glob(".tmp-*"))
    commit(after, checkpoint.manifest.round + 1)
    assert found(after) == checkpoint.manifest.round + 1


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    draw = random.Random(5)
    began = time.monotonic()
    store = run_of(tmp_path, 1, 2, 3)
    one_commit = (time.monotonic() - began) / 3
    done = 3

    def forever() -> None:
        round_ = done
        while True:
            round_ += 1
            commit(store, round_)

    for _ in range(50):
        status = in_child(forever, kill_after=draw.uniform(0.0, 3 * one_commit))
        assert os.WIFSIGNALED(status)
        heard: list[str] = []
        round_ = found(store, heard)
        assert heard == []
        assert round_ >= done
        checkpoint = store.find_latest(silent)
        assert checkpoint is not None
        store.adopt(checkpoint)
        done = round_
    assert done > 3


# --- Failed, and tried again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS[1:5])
def test_a_full_disk_at_any_point_keeps_the_old_checkpoint_and_leaves_no_rubbish(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_of(tmp_path, 1)
    monkeypatch.setenv(faults.VARIABLE, f"{point}:0:2:enospc")
    with pytest.raises(NotSaved, match="round 2 was not made"):
        commit(store, 2)
    assert store.failures == 1
    assert found(store) == 1
    assert not list(store.path.glob(".tmp-*"))
    if point != "ckpt.latest":
        commit(store, 3)
        assert store.failures == 0
        assert found(store) == 3


def test_a_quota_is_a_full_disk(tmp_path: Path) -> None:
    """open-mmlab/mmdetection#12069: another number, the same thing."""
    store = run_of(tmp_path, 1)

    def write(folder: Path) -> dict[str, Vote]:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(NotSaved, match="Disk quota exceeded"):
        store.commit(manifest_of(2), write, expected_bytes=0)
    assert found(store) == 1
    assert sorted(p.name for p in store.path.iterdir()) == ["LATEST", "round-00001"]


def test_one_rank_that_votes_no_is_enough(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1)

    def write(folder: Path) -> dict[str, Vote]:
        votes = dict(writer(2)(folder))
        votes["learner-1"] = replace(votes["learner-1"], error="No space left on device")
        return votes

    with pytest.raises(NotSaved, match="learner-1: No space left on device"):
        store.commit(manifest_of(2), write, expected_bytes=0)
    assert found(store) == 1
    assert sorted(p.name for p in store.path.iterdir()) == ["LATEST", "round-00001"]


def test_an_error_of_another_kind_removes_the_half_made_checkpoint_too(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1)

    def write(folder: Path) -> dict[str, Vote]:
        (folder / "half").write_bytes(b"x")
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        store.commit(manifest_of(2), write, expected_bytes=0)
    assert found(store) == 1
    assert not list(store.path.glob(".tmp-*"))


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1)
    with pytest.raises(NotSaved, match=r"needs about .* MiB free; make"):
        store.commit(manifest_of(2), writer(2), expected_bytes=1 << 60)
    assert found(store) == 1


def test_a_file_that_only_the_rank_can_see_is_no_checkpoint(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1)

    def write(folder: Path) -> dict[str, Vote]:
        votes = dict(writer(2)(folder))
        (folder / "shards/rank_1.pt").unlink()
        return votes

    with pytest.raises(NotSaved, match="shared file system"):
        store.commit(manifest_of(2), write, expected_bytes=0)
    assert found(store) == 1


@pytest.mark.parametrize(
    ("votes", "reason"),
    [
        ({"learner-0": Vote(0, steps=4)}, "not from all 2"),
        ({"learner-0": Vote(0, steps=4), "learner-1": Vote(0, steps=4)}, "not from all 2"),
        ({"learner-0": Vote(0, steps=4), "learner-1": Vote(1, steps=3)}, "different numbers of optimizer steps"),
        (
            {n: Vote(rank, (SavedFile("same", rank, 1, "x"),)) for rank, n in enumerate(("learner-0", "learner-1"))},
            "the same name",
        ),
    ],
)
def test_votes_that_do_not_agree_make_no_checkpoint(votes: dict[str, Vote], reason: str) -> None:
    with pytest.raises(NotSaved, match=reason):
        count_votes(votes, 2)


# --- Damaged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, swap_for_link])
@pytest.mark.parametrize("name", ["shards/rank_1.pt", "manifest.json"])
def test_damage_is_named_and_the_older_checkpoint_is_used(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    store = run_of(tmp_path, 1, 2)
    damage(store.path / "round-00002" / name)
    heard: list[str] = []
    assert found(store, heard) == 1
    assert len(heard) == 1
    assert "round-00002 is damaged" in heard[0]
    assert name.rpartition("/")[2].partition(".")[0] in heard[0]


@pytest.mark.parametrize("byte", range(0, 1500, 31))
def test_no_changed_byte_of_a_manifest_goes_unnoticed(byte: int, tmp_path: Path) -> None:
    store = run_of(tmp_path, 1, 2)
    file = store.path / "round-00002" / "manifest.json"
    data = bytearray(file.read_bytes())
    data[byte % len(data)] ^= 0x01
    file.write_bytes(data)
    try:
        changed = Manifest.from_bytes(bytes(data))
    except Damaged:
        assert found(store) == 1
    else:  # white space
        assert changed == verify(store.path / "round-00002")


def test_an_extra_file_is_not_tolerated(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1, 2)
    (store.path / "round-00002" / "shards" / "mp_rank_01_model_states.pt").write_bytes(b"not ours")
    heard: list[str] = []
    assert found(store, heard) == 1
    assert "not in the manifest" in heard[0]


def test_when_none_verifies_the_run_is_not_started_anew(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1, 2)
    for folder in store.path.glob("round-*"):
        flip(folder / "shards/rank_0.pt")
    heard: list[str] = []
    with pytest.raises(PlanError, match="no checkpoint verifies"):
        store.find_latest(heard.append)
    assert len(heard) == 2


@pytest.mark.parametrize(
    "text", ["", "round-00009", "../x", "../evil/round-00002", "round-2", "\x00", "/etc", "x" * 999]
)
def test_a_latest_that_names_nothing_is_not_followed(text: str, tmp_path: Path) -> None:
    store = run_of(tmp_path, 1, 2)
    outside = tmp_path / "x"
    (store.path / "round-00001").rename(outside)
    (store.path / "LATEST").write_text(text)
    heard: list[str] = []
    assert found(store, heard) == 2
    assert len(heard) == 1
    assert "LATEST" in heard[0]
    checkpoint = store.find_latest(silent)
    assert checkpoint is not None
    store.adopt(checkpoint)
    assert (store.path / "LATEST").read_text() == "round-00002\n"


def test_a_missing_latest_is_found_out(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1, 2)
    (store.path / "LATEST").unlink()
    heard: list[str] = []
    assert found(store, heard) == 2
    assert "LATEST is missing" in heard[0]


def test_linked_folders_are_refused(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1, 2)
    (store.path / "round-00002").rename(tmp_path / "elsewhere")
    (store.path / "round-00002").symlink_to(tmp_path / "elsewhere")
    assert found(store) == 1
    store.path.rename(tmp_path / "moved")
    store.path.symlink_to(tmp_path / "moved")
    with pytest.raises(PlanError, match="symbolic link"):
        store.find_latest(silent)
    with pytest.raises(PlanError, match="symbolic link"):
        commit(store, 3)


def test_later_checkpoints_step_aside_when_a_run_goes_on_from_an_earlier_one(tmp_path: Path) -> None:
    store = run_of(tmp_path, 1, 2)
    flip(store.path / "round-00002" / "shards/rank_0.pt")
    checkpoint = store.find_latest(silent)
    assert checkpoint is not None
    aside = store.adopt(checkpoint)
    assert aside is not None
    assert [path.name for path in aside.iterdir()] == ["round-00002"]
    assert store.find_latest(silent) == checkpoint
    commit(store, 2)
    assert found(store) == 2


# --- Names and settings -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**8))
def test_folder_names_and_rounds_are_one_to_one(round_: int) -> None:
    assert round_of(folder_name(round_)) == round_


@given(st.text(max_size=20))
def test_nothing_else_is_the_name_of_a_checkpoint(name: str) -> None:
    round_ = round_of(name)
    assert round_ is None or folder_name(round_) == name


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b/c", "", "a//b", ".hidden", "a/..", "a\x00", "a\nb", "ä"])
def test_a_manifest_cannot_name_files_outside(name: str) -> None:
    with pytest.raises(Damaged, match="not a plain name"):
        check_name(name)
    forged = replace(PLAIN, files=(SavedFile(name, 0, 1, "x"),))
    with pytest.raises(Damaged, match="not a plain name"):
        Manifest.from_bytes(forged.as_bytes())


def test_a_manifest_of_another_format_is_refused() -> None:
    data = PLAIN.as_bytes().replace(b'"format": 1', b'"format": 2')
    with pytest.raises(Damaged, match="format 2"):
        Manifest.from_bytes(data)


def test_the_named_checkpoint_comes_first_then_the_newest() -> None:
    names = ["round-00001", "round-00003", "round-00002", ".tmp-round-00004-ab", "LATEST", "discarded.1"]
    assert search_order("round-00002\n", names) == (["round-00002", "round-00003", "round-00001"], "")


def test_settings_that_differ_are_listed() -> None:
    assert setting_differences({"a": 1, "b": None}, {"a": 2, "c": 3}) == [
        ("a", 1, 2),
        ("b", None, None),
        ("c", None, 3),
    ]
