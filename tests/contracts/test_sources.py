"""What holds for every source of prompts, and what is special about those that are made of other libraries."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout.config import DataConfig, EvalConfig, RewardConfig
from rollout.problems import BadRows
from rollout.prompts import check_prompts, load_prompt_sets, load_prompts, read_rows
from rollout.row_checks import SCORED_BY, examine, find_keys
from rollout.scoring import Scoring
from rollout.tasks import source, sources
from rollout.tasks.reasoning_gym import parse
from rollout.types import Group, GroupRequest, UserError
from tests.pure.small_models import byte_level_bpe

ROOT = Path(__file__).resolve().parents[2]
TASKS = "chain_sum/size=40/max_terms=3,spell_backward/size=30"
EXAMPLES = {"arithmetic": "", "reasoning-gym": TASKS, "hf": ""}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory written by `save_to_disk`."""
    import datasets

    folder = tmp_path_factory.mktemp("saved")
    rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(33)]
    parts = {"train": datasets.Dataset.from_list(rows[:30]), "test": datasets.Dataset.from_list(rows[30:])}
    datasets.DatasetDict(parts).save_to_disk(folder / "both")
    parts["train"].save_to_disk(folder / "one")
    return folder


def spec_of(name: str, saved: Path) -> str:
    return f"hf:{saved / 'both'}" if name == "hf" else f"{name}:{EXAMPLES[name]}"


def test_every_source_has_an_example_here():
    assert set(EXAMPLES) == set(sources())


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_rows_pass_the_checks_and_no_held_out_question_is_trained_on(name, saved):
    spec = spec_of(name, saved)
    asked = {}
    for split in ("train", "eval"):
        rows = read_rows(spec, seed=0, split=split)
        keys, _ = find_keys(name, rows, DataConfig(), True)
        candidates, problems, _ = examine(rows, keys, DataConfig())
        assert rows
        assert not problems
        assert len({candidate.row_id for candidate in candidates}) == len(candidates)
        asked[split] = {candidate.question for candidate in candidates}
    assert asked["train"].isdisjoint(asked["eval"])


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_held_out_rows_do_not_depend_on_the_seed(name, saved):
    spec = spec_of(name, saved)
    one, two = (read_rows(spec, seed=seed, split="eval") for seed in (0, 1))
    assert [row.columns for row in one] == [row.columns for row in two]


def test_listing_the_sources_loads_no_heavy_library():
    code = "import sys; from rollout.tasks import sources; sources(); print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"torch", "transformers", "datasets", "pyarrow", "reasoning_gym", "pandas"} & set(done.stdout.split())


# --- Hugging Face data sets -------------------------------------------------------------------------------------------


def test_a_data_set_that_was_saved_to_disk_loads_with_its_splits(saved):
    sets = load_prompt_sets(str(saved / "both"), DataConfig(), EvalConfig(), byte_level_bpe(), seed=0)
    assert (len(sets.train.prompts), len(sets.held_out.prompts)) == (30, 3)
    alone = load_prompts(str(saved / "one"), DataConfig(), byte_level_bpe(), seed=0, split="train")
    assert len(alone.prompts) == 30


def test_a_split_that_is_not_there_is_named(saved, monkeypatch):
    from rollout.tasks import hf

    monkeypatch.setattr(hf, "_load", lambda wanted: {"train": [], "test": []})
    with pytest.raises(UserError, match="no split 'dev'; there are train, test"):
        hf.rows("openai/gsm8k:main@dev", seed=0, split="train")
    assert hf.rows("openai/gsm8k:main@test", seed=0, split="eval") == []
    with pytest.raises(UserError, match="is not understood"):
        hf.parse("a/b/c")


# --- reasoning-gym ----------------------------------------------------------------------------------------------------


def scored(answers, row):
    from rollout.tasks.reasoning_gym_scorers import score

    return [score(answer, row["task"], row["entry"]) for answer in answers]


@pytest.fixture(scope="module")
def rows():
    return source("reasoning-gym").rows(TASKS, seed=0, split="train")


def test_rows_are_the_same_in_every_process_and_differ_by_seed(rows):
    """A generator may walk through sets, whose order depends on the hash seed of its process."""
    spec = "ransom_note/size=8,isomorphic_strings/size=8,list_functions/size=8"
    code = f"from rollout.tasks.reasoning_gym import rows; print(rows({spec!r}, seed=0, split='train'))"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        check=True,
        text=True,
        timeout=300,
    ).stdout
    here = source("reasoning-gym").rows(spec, seed=0, split="train")
    assert len(here) > 20
    assert ast.literal_eval(elsewhere) == here
    other = source("reasoning-gym").rows(TASKS, seed=1, split="train")
    assert {row["prompt"] for row in other} != {row["prompt"] for row in rows}


def test_each_task_is_a_domain_and_brings_its_scorer(rows):
    assert {row["domain"] for row in rows} == {"chain_sum", "spell_backward"}
    assert {row[SCORED_BY] for row in rows} == {"reasoning-gym"}
    for row in rows:
        full, nothing, none = scored([f"\n{row['answer']} ", "zzz", None], row)
        assert full == {"correctness": 1.0, "partial": 0.0}
        assert nothing["correctness"] == none["correctness"] == none["partial"] == 0.0
    (partly,) = scored([f"it is {rows[0]['answer']}"], rows[0])
    assert partly["correctness"] == 0.0
    assert 0.0 < partly["partial"] < 1.0


@pytest.mark.parametrize(
    ("task", "canary"),
    [
        ("binary_matrix", "[__import__('pathlib').Path('CANARY').touch()]"),
        ("n_queens", "__import__('pathlib').Path('CANARY').touch()"),
        ("spiral_matrix", "[open('CANARY','w')]"),
        ("string_insertion", "[open('CANARY','w').name]"),
        ("countdown", "open('CANARY','w')"),
        ("simple_integration", "open('CANARY','w')"),
        ("intermediate_integration", "__import__('pathlib').Path('CANARY').touch()"),
        ("polynomial_multiplication", 'S(\'open("CANARY","w")\')'),
    ],
)
def test_no_answer_is_run_as_code(task, canary, tmp_path, monkeypatch):
    from rollout.tasks.reasoning_gym_scorers import make_dataset, score

    monkeypatch.chdir(tmp_path)
    dataset = make_dataset(task, {"seed": 3, "size": 2})
    entry = dataset[0]
    assert score(canary, task, entry)["correctness"] == 0.0
    assert not (tmp_path / "CANARY").exists()
    assert score(entry["answer"], task, entry)["correctness"] == 1.0
    dataset.score_answer(canary.replace("CANARY", "CANARY2"), entry)
    # Without our guard the library does run it, where the guard is not a replacement of `eval` itself.
    if task in ("countdown", "simple_integration", "intermediate_integration"):
        assert (tmp_path / "CANARY2").exists()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("chain_smu", "Did you mean chain_sum"),
        ("chain_sum/max_trms=3", "unexpected keyword argument 'max_trms'"),
        ("game_of_life_halting", "whatever the text says"),
        ("puzzle24", "not only those of the puzzle"),
    ],
)
def test_what_cannot_be_used_says_why(spec, says):
    from rollout.tasks.reasoning_gym_scorers import scorer

    with pytest.raises(UserError, match=says):
        scorer(spec)


def test_what_is_found_while_generating_reaches_the_user():
    with pytest.raises(UserError, match=r"--prompts reasoning-gym:puzzle24: puzzle24 accepts any four numbers"):
        source("reasoning-gym").rows("puzzle24", seed=0, split="train")


@pytest.mark.slow
def test_every_task_that_is_not_refused_pays_its_own_answers_and_no_nonsense():
    from reasoning_gym.factory import DATASETS

    from rollout.tasks.reasoning_gym_scorers import FAULTS

    names = [name for name in sorted(DATASETS) if name not in FAULTS]
    found = source("reasoning-gym").rows(",".join(f"{name}/size=6" for name in names), seed=0, split="train")
    assert {row["domain"] for row in found} == set(names)
    for row in found:
        full, empty, nonsense = (each["correctness"] for each in scored([row["answer"], "", "zzz"], row))
        assert (full or not row["answer"], empty, nonsense) == (True, 0.0, 0.0), row["task"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [("", "names no task"), ("a,a", "twice"), ("a/b", "is not option=value"), ("a/size=0", "a number of rows")],
)
def test_what_is_not_understood_is_said_at_once(spec, says):
    with pytest.raises(UserError, match=says):
        parse(spec)


def test_a_group_is_scored_in_the_pool(rows):
    """The scorer runs in a grading process under the memory limit, and loading it is not part of any deadline."""
    from cluster.scorer_pool import ScorerPool

    tokenizer = byte_level_bpe()
    found = load_prompts(f"reasoning-gym:{TASKS}", DataConfig(), tokenizer, seed=0, split="train")
    assert len(found.prompts) == len(rows)
    prompt = found.prompts[0]
    texts = (f"<think>x</think>{prompt.answer}<|end|>", "<think>x</think>zzz", f"<think>{prompt.answer}")
    request = GroupRequest(prompt, 1, 0, 0, 3, 0)
    lengths = np.full(3, 2, np.int32)
    group = Group(request, 0, np.zeros(6, np.int32), np.zeros(6, np.float32), lengths, np.ones(3, np.bool_), texts)
    pool = ScorerPool(RewardConfig(), Scoring(None, 64))
    try:
        pool.submit(group)
        (done,) = pool.drain()
    finally:
        pool.close()
    assert done.outcomes == ("right", "wrong", "wrong")
    assert done.timeouts == 0
    assert done.total.tolist() == [1.0, 0.0, 0.0]


def test_the_example_of_the_documentation_has_rows_that_travel():
    rows = read_rows("reasoning-gym:chain_sum/size=12,gsm_symbolic/size=12", seed=0)
    assert {row.columns["domain"] for row in rows} == {"chain_sum", "gsm_symbolic"}
    assert pickle.loads(pickle.dumps(rows)) == rows


def test_bad_rows_of_a_saved_data_set_are_found_without_a_tokenizer_in_both_splits(tmp_path):
    import datasets

    good, bad = {"prompt": "1 + 1?", "answer": "2"}, {"prompt": "", "answer": "2"}
    parts = {"train": datasets.Dataset.from_list([good, bad]), "test": datasets.Dataset.from_list([bad])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    with pytest.raises(BadRows) as caught:
        check_prompts(str(tmp_path / "both"), DataConfig())
    assert [problem.where.rpartition("row ")[2] for problem in caught.value.problems] == ["2", "1"]
    with pytest.raises(BadRows) as caught:
        check_prompts(str(tmp_path / "both"), DataConfig(), splits=("train",))
    assert len(caught.value.problems) == 1
