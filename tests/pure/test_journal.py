"""The journal: nothing that was appended is lost, nothing counts twice, whatever a crash leaves behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import BrokenPromise
from cluster.run.journal import Journal, read_round, round_files
from rollout.types import ScoredGroup, UserError
from tests.pure.scored_groups import assert_same, scored_group

ROOT = Path(__file__).resolve().parents[2]


def advantages_of(groups):
    return {scored.group.request.key: np.arange(len(scored.total)) - 1.5 for scored in groups}


def test_groups_come_back_exactly_as_they_were(tmp_path):
    groups = [scored_group(f"row{at}", seed=at, columns={"level": at, "tags": ["a"]}) for at in range(5)]
    with Journal(tmp_path) as journal:
        for scored in groups:
            journal.append(scored)
    loaded = Journal(tmp_path).load(1)
    for one, other in zip(groups, loaded, strict=True):
        assert_same(one, other)


def test_a_group_is_with_the_operating_system_as_soon_as_append_returns(tmp_path):
    script = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from tests.pure.scored_groups import assert_same, scored_group\n"
        "from cluster.run.journal import Journal\n"
        f"journal = Journal(Path({str(tmp_path)!r}))\n"
        "[journal.append(scored_group(f'row{at}')) for at in range(3)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert len(Journal(tmp_path).load(1)) == 3


def test_a_tail_torn_at_any_byte_costs_only_the_last_group(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # thousands of them take seconds
    groups = [scored_group(f"row{at}", size=1, seed=at) for at in range(3)]
    with Journal(tmp_path) as journal:
        for scored in groups[:2]:
            journal.append(scored)
        journal.sync(1)
        whole = (tmp_path / "groups/round-00001.journal").stat().st_size
        journal.append(groups[2])
    file = tmp_path / "groups/round-00001.journal"
    data = file.read_bytes()
    for length in range(whole, len(data)):
        file.write_bytes(data[:length])
        with Journal(tmp_path) as journal:
            loaded = journal.load(1)
            assert [each.group.request.key for each in loaded] == [("row0", 0), ("row1", 0)]
            assert journal.torn == ({1: length - whole} if length > whole else {})
            journal.append(groups[2])
        assert file.read_bytes() == data


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_file_whose_first_bytes_are_torn_is_begun_anew(tmp_path, at):
    with Journal(tmp_path) as journal:
        journal.append(scored_group())
    file = tmp_path / "groups/round-00001.journal"
    data = file.read_bytes()
    file.write_bytes(data[:at])
    with Journal(tmp_path) as journal:
        assert journal.load(1) == []
        journal.append(scored_group())
    assert file.read_bytes() == data


def test_a_flipped_bit_is_recognised_and_everything_before_it_kept(tmp_path):
    with Journal(tmp_path) as journal:
        for at in range(3):
            journal.append(scored_group(f"row{at}", size=2))
    file = tmp_path / "groups/round-00001.journal"
    data = bytearray(file.read_bytes())
    third = len(data) * 2 // 3 + 40
    data[third] ^= 4
    file.write_bytes(data)
    with Journal(tmp_path) as journal:
        assert [each.group.request.key[0] for each in journal.load(1)] == ["row0", "row1"]
        assert journal.torn[1] > 0


def test_a_tail_of_zeros_is_no_record(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(scored_group())
    file = tmp_path / "groups/round-00001.journal"
    file.write_bytes(file.read_bytes() + bytes(4096))
    with Journal(tmp_path) as journal:
        assert len(journal.load(1)) == 1
        assert journal.torn == {1: 4096}


def test_the_same_group_twice_is_refused_also_after_a_restart(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(scored_group())
        with pytest.raises(BrokenPromise, match="second time"):
            journal.append(scored_group(seed=1))
        journal.append(scored_group(occurrence=1))
        journal.append(scored_group(round_=2))
    with Journal(tmp_path) as journal, pytest.raises(BrokenPromise, match="second time"):
        journal.append(scored_group())


def test_a_group_that_is_not_whole_is_refused(tmp_path):
    scored = scored_group(size=4)
    short = ScoredGroup(scored.group, scored.parts, scored.total[:3], scored.outcomes)
    with Journal(tmp_path) as journal:
        with pytest.raises(BrokenPromise, match="total has 3, not 4"):
            journal.append(short)
        assert journal.load(1) == []


def test_a_reward_part_may_not_take_the_name_of_the_sum(tmp_path):
    scored = scored_group()
    clash = ScoredGroup(scored.group, {"total": scored.total}, scored.total, scored.outcomes)
    with Journal(tmp_path) as journal, pytest.raises(UserError, match="total"):
        journal.append(clash)


def test_a_column_that_cannot_be_kept_is_named(tmp_path):
    with (
        Journal(tmp_path) as journal,
        pytest.raises(UserError, match=r"'picture' of row row0 holds a \S*object"),
    ):
        journal.append(scored_group(columns={"picture": object()}))


def test_compacting_gives_one_row_per_response_and_removes_the_journal(tmp_path):
    groups = [scored_group(f"row{at}", minibatch=1 - at, seed=at) for at in range(2)]
    with Journal(tmp_path) as journal:
        for scored in groups:
            journal.append(scored)
        path = journal.compact(1, advantages_of(groups))
    assert path == tmp_path / "groups/round-00001.parquet"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    rows = read_round(path).to_pylist()
    assert [(row["minibatch"], row["row_id"], row["k"]) for row in rows] == [
        (minibatch, f"row{1 - minibatch}", k) for minibatch in range(2) for k in range(4)
    ]
    for row in rows:
        scored = groups[int(row["row_id"][-1])]
        group, k = scored.group, row["k"]
        start, stop = group.offsets[k], group.offsets[k + 1]
        assert row["response"] == group.texts[k]
        assert row["token_ids"] == group.token_ids[start:stop].tolist()
        assert row["sampler_logprobs"] == group.sampler_logprobs[start:stop].tolist()
        assert row["length"] == stop - start
        assert row["finished"] == group.finished[k]
        assert row["reward_total"] == scored.total[k]
        assert row["reward_correctness"] == scored.parts["correctness"][k]
        assert row["reward_format"] == scored.parts["format"][k]
        assert row["advantage"] == k - 1.5
        assert row["seed"] == (1 << 60) + k
        assert row["prompt_token_ids"] == (group.request.prompt.token_ids.tolist() if k == 0 else None)
        fixed = {
            name: row[name] for name in ("round", "occurrence", "attempt", "domain", "prompt", "answer", "outcome")
        }
        assert fixed == {
            "round": 1,
            "occurrence": 0,
            "attempt": 2,
            "domain": "sums",
            "prompt": "What is 2 + 2?",
            "answer": "4",
            "outcome": "right",
        }
        assert (row["weights_version"], row["engine"], row["dropped"]) == (0, 1, None)


def test_the_table_is_the_same_whichever_engine_was_faster(tmp_path):
    groups = [scored_group(f"row{at}", minibatch=at % 2, seed=at) for at in range(6)]
    written = []
    for name, order in (("one", groups), ("two", groups[::-1])):
        with Journal(tmp_path / name) as journal:
            for scored in order:
                journal.append(scored)
            written.append(read_round(journal.compact(1, advantages_of(groups))))
    assert written[0].equals(written[1])


def test_dropped_groups_stay_readable_with_their_reason(tmp_path):
    groups = [scored_group("kept"), scored_group("bad", seed=1)]
    with Journal(tmp_path) as journal:
        for scored in groups:
            journal.append(scored)
        path = journal.compact(1, advantages_of(groups[:1]), dropped={("bad", 0): "grader_error"})
    by_row = {
        row["row_id"]: row for row in read_round(path, ["row_id", "dropped", "advantage", "minibatch"]).to_pylist()
    }
    assert by_row["kept"]["dropped"] is None
    assert by_row["bad"] == {"row_id": "bad", "dropped": "grader_error", "advantage": None, "minibatch": None}


@pytest.mark.parametrize(
    ("trained", "dropped", "message"),
    [
        (["a"], {}, "journalled but neither trained nor dropped.*b/0"),
        (["a", "b"], {("b", 0): "x"}, "both trained and dropped.*b/0"),
        (["a", "b", "c"], {}, "never journalled.*c/0"),
        (["a", "b"], {("c", 0): "x"}, "never journalled.*c/0"),
    ],
)
def test_planned_is_trained_plus_dropped(tmp_path, trained, dropped, message):
    with Journal(tmp_path) as journal:
        for row in "ab":
            journal.append(scored_group(row))
        advantages = {(row, 0): np.zeros(4) for row in trained}
        with pytest.raises(BrokenPromise, match=message):
            journal.compact(1, advantages, dropped=dropped)
    assert list(round_files(tmp_path).values()) == [tmp_path / "groups/round-00001.journal"]


def test_compacting_again_after_a_crash_changes_nothing(tmp_path):
    scored = scored_group()
    with Journal(tmp_path) as journal:
        journal.append(scored)
        path = journal.compact(1, advantages_of([scored]), keep_journal=True)
    table = read_round(path)
    assert path.with_suffix(".journal").exists()
    with Journal(tmp_path) as journal:
        assert len(journal.load(1)) == 1
        assert read_round(journal.compact(1, advantages_of([scored]))).equals(table)
        assert not path.with_suffix(".journal").exists()
        assert journal.compact(1, advantages_of([scored])) == path
        with pytest.raises(BrokenPromise, match="Round 2 has no journal"):
            journal.compact(2, {})


def test_journals_are_kept_until_a_checkpoint_covers_them(tmp_path):
    with Journal(tmp_path) as journal:
        for round_ in (1, 2, 3):
            scored = scored_group(round_=round_)
            journal.append(scored)
            if round_ < 3:
                journal.compact(round_, advantages_of([scored]), keep_journal=True)
        journal.retire(through_round=1)
        assert {each.name for each in (tmp_path / "groups").glob("*.journal")} == {
            "round-00002.journal",
            "round-00003.journal",
        }
        journal.retire(through_round=3)
        assert {each.name for each in (tmp_path / "groups").glob("*.journal")} == {"round-00003.journal"}


def test_a_resume_sets_later_rounds_aside_and_keeps_what_it_can_use(tmp_path):
    with Journal(tmp_path) as journal:
        for round_ in (1, 2, 3, 4):
            scored = scored_group(round_=round_)
            journal.append(scored)
            if round_ < 4:
                journal.compact(round_, advantages_of([scored]), keep_journal=round_ > 1)
    with Journal(tmp_path) as journal:
        assert len(journal.load(4)) == 1  # looked at, and not kept
        aside = journal.set_aside(after_round=1, keep={2})
        assert aside is not None
        assert {each.name for each in aside.iterdir()} == {
            "round-00002.parquet",
            "round-00003.journal",
            "round-00003.parquet",
            "round-00004.journal",
        }
        assert {path.name for path in round_files(tmp_path).values()} == {"round-00001.parquet", "round-00002.journal"}
        assert len(journal.load(2)) == 1
        assert journal.load(3) == []
        assert journal.set_aside(after_round=1, keep={2}) is None


def test_evaluations_are_kept_beside_the_rounds_and_set_aside_with_them(tmp_path):
    with Journal(tmp_path) as journal:
        with pytest.raises(BrokenPromise, match="keep_evaluation"):
            journal.append(scored_group(round_=-1))
        for round_ in (0, 2):
            journal.keep_evaluation(round_, [scored_group(f"row{at}", round_=-1, seed=at) for at in range(3)])
        files = round_files(tmp_path, "eval")
        assert list(files) == [0, 2]
        table = read_round(files[2], ["row_id", "dropped", "response"])
        assert set(table["dropped"].to_pylist()) == {"held out"}
        assert table.num_rows == 12
        journal.set_aside(after_round=1, keep=())
        assert list(round_files(tmp_path, "eval")) == [0]
        assert round_files(tmp_path) == {}


def test_two_rounds_may_be_open_at_once(tmp_path):
    with Journal(tmp_path) as journal:
        one, two = scored_group(round_=1), scored_group(round_=2)
        journal.append(one)
        journal.append(two)
        journal.compact(1, advantages_of([one]))
        assert len(journal.load(2)) == 1
        assert journal.load(1) == []


def test_a_round_that_is_not_committed_can_be_read(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(scored_group())
        table = read_round(round_files(tmp_path)[1])
    assert table["advantage"].null_count == table.num_rows == 4
    assert table["response"].to_pylist() == [f"answer {k}" for k in range(4)]
    with pytest.raises(UserError, match="holds no groups"):
        read_round(tmp_path / "metrics.jsonl")


def test_hostile_text_and_half_surrogates_survive(tmp_path):
    texts = ("\x1b]0;x\x07", '</script>\u2028"\n', "\ud800 half", "\u202e right to left")
    scored = scored_group(texts=texts)
    with Journal(tmp_path) as journal:
        journal.append(scored)
        assert journal.load(1)[0].group.texts == texts
        path = journal.compact(1, advantages_of([scored]))
    assert read_round(path)["response"].to_pylist() == [texts[0], texts[1], "\ufffd half", texts[3]]


def test_a_full_disk_takes_nothing_that_was_there_and_says_so(tmp_path):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from tests.pure.scored_groups import assert_same, scored_group\n"
        "from cluster.errors import BrokenPromise\n"
        "from cluster.run.journal import Journal\n"
        f"journal = Journal(Path({str(tmp_path)!r}))\n"
        "kept = 0\n"
        "try:\n"
        "    while True:\n"
        "        journal.append(scored_group(f'row{kept}'))\n"
        "        kept += 1\n"
        "except BrokenPromise as error:\n"
        "    assert 'round-00001.journal cannot be written' in str(error), error\n"
        "    assert len(journal.load(1)) == kept > 0\n"
        "    print(kept)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], preexec_fn=limited, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    with Journal(tmp_path) as journal:
        assert len(journal.load(1)) == int(ended.stdout)
        assert journal.torn == {}


def test_no_file_is_left_half_written_under_its_final_name(tmp_path, monkeypatch):
    scored = scored_group()
    with Journal(tmp_path) as journal:
        journal.append(scored)

        def fails(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="No space"):
            journal.compact(1, advantages_of([scored]))
    assert not (tmp_path / "groups/round-00001.parquet").exists()
    assert len(Journal(tmp_path).load(1)) == 1
