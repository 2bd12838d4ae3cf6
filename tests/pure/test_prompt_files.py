from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import DataConfig
from rollout.problems import BadRows, Problem, places, report
from rollout.prompts import check_prompts, read_rows
from rollout.rewards.selftest import verify_gold
from rollout.row_checks import MAX_ANSWER_CHARACTERS, content_digest, examine, find_keys
from rollout.tasks import DEMO_MODEL
from rollout.tasks.files import MAX_LINE_BYTES, READERS, read_csv, read_file, read_jsonl
from rollout.types import UserError

BAD_ROWS = Path(__file__).resolve().parents[1] / "data" / "prompts" / "bad_rows.jsonl"


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def found(*columns: dict[str, Any], data: DataConfig | None = None, answer_required: bool = True) -> list[str]:
    """Kinds of the problems of some rows."""
    _, problems, _ = checked(*columns, data=data, answer_required=answer_required)
    return [problem.kind for problem in problems]


def checked(*columns: dict[str, Any], data: DataConfig | None = None, answer_required: bool = True):
    from rollout.tasks.files import RawRow

    data = data or DataConfig()
    rows = [RawRow(f"f:{i + 1}", i, row) for i, row in enumerate(columns)]
    keys, notes = find_keys("f", rows, data, answer_required)
    candidates, problems, more = examine(rows, keys, data, answer_required)
    return candidates, problems, notes + more


def message(spec: str, data: DataConfig | None = None) -> str:
    with pytest.raises(UserError) as caught:
        check_prompts(spec, data or DataConfig())
    return str(caught.value)


# --- One report -------------------------------------------------------------------------------------------------------


def test_all_problems_of_a_file_are_in_one_report_with_their_lines():
    with pytest.raises(BadRows) as caught:
        check_prompts(str(BAD_ROWS), DataConfig())
    kinds = {int(problem.where.rpartition(":")[2]): problem.kind for problem in caught.value.problems}
    assert kinds == {
        3: "invalid JSON",
        5: "missing answer",
        6: "missing prompt",
        7: "empty prompt",
        8: "control character",
        9: "control character",
        10: "duplicate",
        11: "invalid UTF-8",
        12: "not an object",
        13: "invalid JSON",
        14: "half a character",
        15: "prompt is not text",
        16: "answer is not text",
        17: "chat is malformed",
        18: "byte order mark",
        19: "control character",
    }
    text = str(caught.value)
    assert all(f"{BAD_ROWS}:{line}: " in text for line in kinds)
    assert "16 of 19 rows have problems" in text
    assert text.endswith("--data.skip-bad-rows")


def test_golds_and_lengths_are_in_the_same_report_as_all_else(tmp_path):
    rows: list[dict[str, object]] = [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": "1+1="},
        {"prompt": "2", "answer": "\\boxed{"},
    ]
    rows += [{"prompt": "1+" * 30 + "1=", "answer": "31"}, {"prompt": [{"role": "user", "content": "1" * 60}]}]
    spec = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(BadRows) as caught:
        check_prompts(
            spec,
            DataConfig(max_prompt_tokens=50),
            verify_gold=verify_gold,
            vocabulary=DEMO_MODEL / "tokenizer.json",
        )
    assert sorted((p.where.rpartition(":")[2], p.kind) for p in caught.value.problems) == [
        ("2", "missing answer"),
        ("3", "gold does not verify"),
        ("4", "prompt too long"),
        ("5", "missing answer"),
    ]


def test_a_text_of_many_bytes_and_few_tokens_is_not_too_long(tmp_path):
    spec = write(tmp_path / "a.jsonl", {"prompt": "é" * 40, "answer": "1"})
    data = DataConfig(max_prompt_tokens=45)
    assert check_prompts(spec, data, vocabulary=DEMO_MODEL / "tokenizer.json") == 1
    assert check_prompts(spec, data, vocabulary=tmp_path / "tokenizer.json") == 1


def test_rows_with_problems_can_be_left_out():
    assert check_prompts(str(BAD_ROWS), DataConfig(skip_bad_rows=True)) == 19


def test_a_long_report_writes_out_some_problems_and_gives_the_places_of_all_others():
    problems = [Problem(f"a.jsonl:{i}", i, "missing answer", "no 'answer'") for i in range(1, 1001)]
    text = report(problems, 5000)
    assert text.startswith("1000 of 5000 rows have problems (1000 x missing answer).")
    assert "and 950 more at a.jsonl:51-1000" in text
    assert len(text.splitlines()) < 60


def test_places_are_written_as_runs():
    assert places(["a:1", "a:2", "a:3", "a:7", "b:8", "c row 9"]) == "a:1-3, 7; b:8; c row 9"


def test_the_report_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(BadRows("text", [Problem("a:1", 0, "k", "t")])))
    assert str(error) == "text"
    assert error.problems == (Problem("a:1", 0, "k", "t"),)


# --- Kinds of files ---------------------------------------------------------------------------------------------------


def test_jsonl_json_csv_tsv_and_parquet_give_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'say "a,\nb"', "answer": "ä"}]
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_bytes('\ufeffprompt,answer\r\n1+1=,2\r\n"say ""a,\r\nb""",ä\r\n'.encode())
    (tmp_path / "a.tsv").write_text('prompt\tanswer\n1+1=\t2\n"say ""a,\nb"""\tä\n')
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for ending in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        assert [row.columns for row in read_file(tmp_path / f"a{ending}")] == rows, ending


def test_a_row_of_a_csv_file_stands_at_its_first_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,answer\n"two\nlines",1\nonly one cell\n\nx,2\ncaf\xe9,3\n"open,4\n')
    rows = read_csv(path)
    assert [(row.where.rpartition(":")[2], row.kind) for row in rows] == [
        ("2", ""),
        ("4", "wrong number of cells"),
        ("6", ""),
        ("7", "invalid UTF-8"),
        ("8", "invalid CSV"),
    ]
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]


def test_verls_layout_is_recognised(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0, "split": "train"},
    }
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([row]), path)
    rows = read_rows(str(path))
    keys, notes = find_keys("f", rows, DataConfig(), True)
    (candidate,), problems, _ = examine(rows, keys, DataConfig())
    assert not problems
    assert candidate.prompt == ({"role": "user", "content": "What is 3 + 4?"},)
    assert (candidate.answer, candidate.domain) == ("7", "openai/gsm8k")
    assert candidate.columns["extra_info"] == {"index": 0, "split": "train"}
    assert any("reward_model.ground_truth" in note for note in notes)
    by_flag, _ = find_keys("f", rows, DataConfig(answer_key="reward_model.ground_truth"), True)
    assert by_flag == keys


@pytest.mark.parametrize(
    ("row", "flag"),
    [
        ({"question": "1+1=", "answer": "2"}, "--data.prompt-key question"),
        ({"problem": "1+1=", "answer": "2"}, "--data.prompt-key problem"),
        ({"prompt": "1+1=", "solution": "2"}, "--data.answer-key solution"),
        ({"prompt": "1+1=", "key": "2"}, "--data.answer-key COLUMN"),
    ],
)
def test_a_column_with_another_name_is_one_mistake_and_the_flag_is_named(tmp_path, row, flag):
    text = message(write(tmp_path / "a.jsonl", row, row | {"n": 1}))
    assert flag in text
    assert len(text.splitlines()) == 2


def test_gsm8ks_answers_are_read_behind_their_mark():
    rows = [{"prompt": "q", "answer": "She has 3 * 6 = <<3*6=18>>18.\n#### 1,018"}, {"prompt": "p", "answer": "5"}]
    candidates, problems, notes = checked(*rows)
    assert [candidate.answer for candidate in candidates] == ["1,018", "5"]
    assert not problems
    assert notes == ["1 answers end in GSM8K's mark (#### x): what follows it is the answer."]


def test_a_line_beyond_the_cap_is_a_problem_and_the_next_line_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    good = b'{"prompt": "1+1=", "answer": "2"}\n'
    path.write_bytes(good + b'{"prompt": "' + b"x" * (2 * MAX_LINE_BYTES + 5) + b'"}\n' + good)
    rows = read_jsonl(path)
    assert [(row.where.rpartition(":")[2], row.kind) for row in rows] == [("1", ""), ("2", "line too long"), ("3", "")]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", '{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
        ("a.json", b'{"prompt": "x"}', "a list of objects"),
        ("a.json", b'[{"prompt": \n]', "line 2 column 1"),
        ("a.json", b'[{"prompt":\n "\xff"}]', ":2: invalid UTF-8"),
        ("a.csv", b"prompt,prompt\nx,1\n", "'prompt' twice"),
        ("a.parquet", b"PAR1 no", "cannot be read as Parquet"),
        ("a.txt", b"x", "not a kind of file"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_whole_says_why(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert says in message(str(tmp_path / name))


def test_a_missing_file_names_one_that_is_nearly_called_so(tmp_path):
    write(tmp_path / "train.jsonl", {"prompt": "x", "answer": "1"})
    assert "Did you mean" in message(str(tmp_path / "trian.jsonl"))
    assert "hf:openai/gsm8k" in message("openai/gsm8k")
    assert "Sources: arithmetic" in message("arithmetics")


@given(st.sampled_from(sorted(READERS)), st.binary(max_size=200))
def test_no_bytes_whatever_break_a_reader(tmp_path_factory, ending, content):
    path = tmp_path_factory.mktemp("fuzz") / f"a{ending}"
    path.write_bytes(content)
    try:
        rows = read_file(path)
    except UserError:
        return
    candidates, problems, _ = examine(rows, find_keys_or_default(rows), DataConfig())
    assert len(candidates) + len({problem.index for problem in problems}) == len(rows)


def find_keys_or_default(rows):
    from rollout.row_checks import Keys

    try:
        return find_keys("f", rows, DataConfig(), True)[0]
    except UserError:
        return Keys("prompt", "answer", "domain")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.fixed_dictionaries({"prompt": JSON_VALUES, "answer": JSON_VALUES}))
def test_a_row_is_either_fine_or_says_what_is_wrong(row):
    from rollout.row_checks import Keys
    from rollout.tasks.files import RawRow

    candidates, problems, _ = examine([RawRow("f:1", 0, row)], Keys("prompt", "answer", "domain"), DataConfig())
    assert bool(candidates) != bool(problems)
    for candidate in candidates:
        assert candidate.question.strip()
        assert candidate.answer


# --- What is checked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["\x0c", "\x08", "\t", "\x0b", "\r", "\x00", "\x1b", "\x85"])
def test_control_characters_in_an_answer_are_refused(sign):
    assert found({"prompt": "q", "answer": f"{sign}rac12"}) == ["control character"]


def test_a_lost_backslash_is_named(tmp_path):
    """`"\\frac12"` in a string that is not raw holds a form feed (huggingface/Math-Verify#35)."""
    text = message(write(tmp_path / "a.jsonl", {"prompt": "q", "answer": "\x0crac12"}))
    assert "a.jsonl:1: control character U+000C in the answer, character 1; was it \\frac?" in text
    assert "\\\\frac" in text


def test_line_ends_and_tabs_in_a_prompt_are_fine():
    assert found({"prompt": "a\n\tb\r\nc", "answer": "1"}) == []
    assert found({"prompt": "a\rb", "answer": "1"}) == ["control character"]


def test_identical_rows_are_a_problem_and_equal_questions_with_other_columns_a_note():
    row = {"prompt": "q", "answer": "1"}
    assert found(row, dict(reversed(row.items()))) == ["duplicate"]
    candidates, problems, notes = checked(row, row | {"source": "b"})
    assert (len(candidates), len(problems)) == (2, 0)
    assert notes == ["1 rows ask the same as an earlier row, with other columns; they are kept."]


def test_sizes_that_cannot_fit_are_found_without_a_tokenizer():
    data = DataConfig(max_prompt_tokens=10)
    assert found({"prompt": "x" * 2000, "answer": "1"}, data=data) == ["prompt too long"]
    assert found({"prompt": "q", "answer": "9" * (MAX_ANSWER_CHARACTERS + 1)}) == ["answer too long"]


@pytest.mark.parametrize(
    ("value", "answer"), [(42, "42"), (0.5, "0.5"), (3.0, "3"), (" 7 \n", "7"), ("1e-07", "1e-07"), (1e-07, "1e-07")]
)
def test_numbers_are_answers(value, answer):
    (candidate,), problems, _ = checked({"prompt": "q", "answer": value})
    assert not problems
    assert candidate.answer == answer


def test_a_gap_in_a_table_is_a_missing_answer():
    assert found({"prompt": "q", "answer": 1.0}, {"prompt": "p", "answer": float("nan")}) == ["missing answer"]


def test_no_answer_is_needed_with_a_reward_of_ones_own():
    assert found({"prompt": "q", "tests": ["a"]}, answer_required=False) == []


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([], "empty prompt"),
        ([{"role": "user", "content": " "}], "empty prompt"),
        ([{"role": "user"}], "chat is malformed"),
        (["text"], "chat is malformed"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "chat is malformed"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "chat is malformed"),
        ([{"role": "user", "content": "q\x00"}], "control character"),
    ],
)
def test_chats_are_checked(prompt, kind):
    assert found({"prompt": prompt, "answer": "1"}) == [kind]


def test_parts_of_text_in_a_chat_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (candidate,), _, _ = checked({"prompt": [{"role": "user", "content": parts}], "answer": "1"})
    assert candidate.prompt == ({"role": "user", "content": "ab"},)


def test_row_ids_say_content_and_place():
    row = {"prompt": "q", "answer": "1"}
    (a, b), _, _ = checked(row, row | {"n": 2})
    (again, *_), _, _ = checked(row, row | {"n": 3})
    assert a.row_id == f"{content_digest(row)}-0" == again.row_id
    assert b.row_id.endswith("-1")
    assert len(a.row_id) == 18


def test_further_columns_travel_with_the_row():
    (candidate,), _, _ = checked({"prompt": "q", "answer": "1", "level": 3, "domain": "algebra"})
    assert candidate.columns == {"answer": "1", "level": 3, "domain": "algebra"}
    assert candidate.domain == "algebra"


# --- Directories ------------------------------------------------------------------------------------------------------


def test_a_directory_is_sorted_into_splits_by_the_names_of_its_files(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000-of-00002.jsonl", {"prompt": "a", "answer": "1"})
    write(tmp_path / "data" / "train-00001-of-00002.jsonl", {"prompt": "b", "answer": "1"})
    write(tmp_path / "data" / "test-00000-of-00001.jsonl", {"prompt": "c", "answer": "1"})
    (tmp_path / "dataset_infos.json").write_text("{}")
    train = read_rows(str(tmp_path))
    assert [(row.index, row.columns["prompt"]) for row in train] == [(0, "a"), (1, "b")]
    assert [row.columns["prompt"] for row in read_rows(str(tmp_path), split="eval")] == ["c"]
    write(tmp_path / "data" / "more.jsonl", {"prompt": "d", "answer": "1"})
    assert "these do not: data/more.jsonl" in message(str(tmp_path))


def test_a_directory_without_such_names_is_training_data(tmp_path):
    write(tmp_path / "part1.jsonl", {"prompt": "a", "answer": "1"})
    assert len(read_rows(str(tmp_path))) == 1
    assert read_rows(str(tmp_path), split="eval") == []
