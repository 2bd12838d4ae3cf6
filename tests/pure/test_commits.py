"""When a round counts, what happens when it cannot, and which resumes are refused. No ranks, no engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import BrokenPromise, PlanError
from cluster.model_facts import read_model_facts
from cluster.plan import make_plan
from cluster.resources import Resources
from cluster.run import cli
from cluster.run.checkpoints import Checkpoint, CheckpointStore
from cluster.run.commits import CHANGES_NO_RESULT, Commits, model_digest, own_files, result_settings
from cluster.run.config import Config
from cluster.run.folder import RunFolder
from cluster.run.manifest import Manifest
from cluster.run.metrics import EventLog, MetricsLog, read_events
from cluster.run.resume import check_inputs, choose, requested
from learner.types import Vote
from tests.pure.checkpoint_makers import PLAIN, writer

MACHINE = Resources(cpus=2, gpus=0, memory=16 * 2**30)
PLACE = {"taken": {"*": 4}, "digest": "d"}


@dataclass
class Ranks:
    """Learner ranks that write small files, or fail in chosen rounds."""

    fail_in: set[int] = field(default_factory=set)

    def fingerprint(self, seconds: float) -> str:
        return "initial weights"

    def save(self, folder: Path, round_: int, seconds: float) -> Mapping[str, Vote]:
        if round_ in self.fail_in:
            return {"learner-0": Vote(0, error="No space left on device"), "learner-1": Vote(1)}
        return writer(round_)(folder)


def commits_of(
    run: Path, said: list[str], *, every: int = 1, rounds: int = 9, fail_in: set[int] | None = None
) -> Commits:
    ranks: Any = Ranks(fail_in or set())
    store, events = CheckpointStore(run), EventLog(run)
    commits = Commits(store, PLAIN, ranks, every, rounds, parameters=10, say=said.append, events=events)
    commits.start(PLACE)
    return commits


def latest(run: Path) -> Manifest:
    checkpoint = CheckpointStore(run).find_latest(lambda text: pytest.fail(text))
    assert checkpoint is not None
    return checkpoint.manifest


# --- When a round counts ----------------------------------------------------------------------------------------------


def test_the_start_is_committed_before_anything_is_generated(tmp_path: Path) -> None:
    commits_of(tmp_path, [])
    assert latest(tmp_path).initial
    assert latest(tmp_path).weights == "initial weights"
    assert latest(tmp_path).prompts == PLACE


@pytest.mark.parametrize(
    ("every", "committed"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (0, [5]), (100, [5])]
)
def test_a_checkpoint_is_due_every_n_rounds_and_after_the_last(
    every: int, committed: list[int], tmp_path: Path
) -> None:
    commits = commits_of(tmp_path, [], every=every, rounds=5)
    made = [round_ for round_ in range(1, 6) if commits.after(round_, 100 * round_, PLACE, None)]
    assert made == committed
    assert latest(tmp_path).round == 5
    assert latest(tmp_path).metrics_offset == 500


def test_a_failed_checkpoint_is_said_and_tried_again_after_the_next_round(tmp_path: Path) -> None:
    said: list[str] = []
    commits = commits_of(tmp_path, said, every=3, fail_in={3})
    assert [commits.after(round_, 1, PLACE, None) for round_ in (1, 2, 3)] == [False, False, False]
    assert latest(tmp_path).round == 0
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "tries again" in said[0]
    assert commits.after(4, 1, PLACE, None)
    assert latest(tmp_path).round == 4
    assert not commits.after(5, 1, PLACE, None)
    assert [(e["kind"], e["round"]) for e in read_events(tmp_path)] == [("checkpoint_failed", 3), ("checkpoint", 4)]


def test_the_third_failure_in_a_row_stops_the_run_and_the_old_state_stands(tmp_path: Path) -> None:
    said: list[str] = []
    commits = commits_of(tmp_path, said, fail_in={2, 3, 4})
    assert commits.after(1, 1, PLACE, None)
    assert not commits.after(2, 1, PLACE, None)
    assert not commits.after(3, 1, PLACE, None)
    with pytest.raises(BrokenPromise, match="3 in a row failed"):
        commits.after(4, 1, PLACE, None)
    assert latest(tmp_path).round == 1
    assert len(said) == 2


def test_a_last_round_that_cannot_be_saved_is_no_success(tmp_path: Path) -> None:
    commits = commits_of(tmp_path, [], rounds=2, fail_in={2})
    assert commits.after(1, 1, PLACE, None)
    with pytest.raises(BrokenPromise, match="the last round"):
        commits.after(2, 1, PLACE, None)
    assert latest(tmp_path).round == 1


# --- What may differ --------------------------------------------------------------------------------------------------


def test_every_setting_that_may_differ_exists() -> None:
    assert {name for name, _ in cli.fields()} >= CHANGES_NO_RESULT


def saved_run(tmp_path: Path, *words: str) -> tuple[Path, Config]:
    run = tmp_path / "run"
    run.mkdir()
    config = cli.parse(["--rollouts", "64", "--rounds", "3", "--run", str(run), *words])
    (run / "config.toml").write_text(cli.as_toml(config))
    return run, config


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "7"],
        ["--quiet"],
        ["--rollout.engines", "1", "--learner.microbatch-tokens", "512"],
        ["--checkpoint.every", "5", "--checkpoint.keep", "1", "--doctor.stop-on", "critical"],
        ["--learner.lr", "0.001"],  # what it was
    ],
)
def test_settings_that_change_no_result_may_differ(words: list[str], tmp_path: Path) -> None:
    run, _ = saved_run(tmp_path, "--learner.lr", "0.001")
    config, folder = requested([str(run), *words])
    assert folder == run
    assert config == cli.parse(
        ["--rollouts", "64", "--rounds", "3", "--run", str(run), "--learner.lr", "0.001", *words]
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--learner.lr", "0.1"], "--learner.lr 0.001 -> 0.1"),
        (["--seed", "3", "--kl.kind", "k3"], "--seed 0 -> 3"),
        (["--preset", "r1"], "--preset grpo -> r1"),
        (["--rollout.temperature", "0.7"], "--rollout.temperature 1.0 -> 0.7"),
        (["--eval.size", "9"], "--eval.size 512 -> 9"),
        (["--reward", "mine.py:f"], "mine.py:f"),
        (["--run", "other"], "no --run"),
        (["--config=x.toml"], "no --config"),
    ],
)
def test_settings_that_change_results_may_not(words: list[str], named: str, tmp_path: Path) -> None:
    run, _ = saved_run(tmp_path, "--learner.lr", "0.001")
    with pytest.raises(PlanError) as refused:
        requested([str(run), *words])
    assert named in str(refused.value)


def test_a_resume_may_be_typed_in_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    run, _ = saved_run(tmp_path, "--prompts", "rows.jsonl")
    monkeypatch.chdir("/")
    assert requested([str(run)])[0].prompts == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("words", [[], ["--rounds", "3"], ["nowhere"], ["../../x"]])
def test_a_resume_of_nothing_says_so(words: list[str]) -> None:
    with pytest.raises(PlanError, match=r"needs a run directory|holds no run"):
        requested(words)


# --- Which checkpoint fits --------------------------------------------------------------------------------------------


def committed_run(tmp_path: Path, *words: str, **facts: Any) -> tuple[CheckpointStore, Config]:
    run, config = saved_run(tmp_path, *words)
    plan = make_plan(config, MACHINE, read_model_facts(config.model))
    base = replace(PLAIN, settings=result_settings(config, plan), **facts)
    store = CheckpointStore(run)
    store.commit(replace(base, round=2), writer(2), 0)
    return store, config


def choose_for(store: CheckpointStore, config: Config, heard: list[str] | None = None) -> Checkpoint | None:
    plan = make_plan(config, MACHINE, read_model_facts(config.model))
    return choose(store, config, plan, (heard if heard is not None else []).append)


def test_the_same_settings_fit(tmp_path: Path) -> None:
    store, config = committed_run(tmp_path)
    checkpoint = choose_for(store, config)
    assert checkpoint is not None
    assert checkpoint.manifest.round == 2


def test_another_number_of_ranks_is_refused_with_what_to_type(tmp_path: Path) -> None:
    store, config = committed_run(tmp_path)
    with pytest.raises(PlanError, match=r"written by 2 learner rank.*would use 1") as refused:
        choose_for(store, cli.apply_settings(config, {"learner.ranks": 1}))
    assert "--learner.ranks 2" in str(refused.value)
    assert "export" in str(refused.value)


def test_a_configuration_changed_by_hand_is_refused_by_name(tmp_path: Path) -> None:
    store, config = committed_run(tmp_path)
    with pytest.raises(PlanError, match=r"learner.clip_low: 0\.2, now 0\.1"):
        choose_for(store, cli.apply_settings(config, {"learner.clip_low": 0.1}))


def test_another_precision_of_the_machine_is_refused(tmp_path: Path) -> None:
    store, config = committed_run(tmp_path)
    gpu = Resources(cpus=2, gpus=2, memory=16 * 2**30)
    config = cli.apply_settings(config, {"learner.ranks": 2})
    with pytest.raises(PlanError, match=r"plan.device: 'cpu', now 'cuda'"):
        choose(store, config, make_plan(config, gpu, read_model_facts(config.model)), pytest.fail)


def test_fewer_rounds_than_there_are_is_refused(tmp_path: Path) -> None:
    store, config = committed_run(tmp_path)
    with pytest.raises(PlanError, match="already committed 2 rounds"):
        choose_for(store, cli.apply_settings(config, {"rounds": 1}))


def test_a_run_that_was_killed_while_starting_begins_at_its_beginning(tmp_path: Path) -> None:
    run, config = saved_run(tmp_path)
    heard: list[str] = []
    assert choose_for(CheckpointStore(run), config, heard) is None
    assert len(heard) == 1
    assert "starts at its beginning" in heard[0]


def test_rounds_without_checkpoints_are_not_started_anew(tmp_path: Path) -> None:
    run, config = saved_run(tmp_path)
    with MetricsLog(run) as metrics:
        metrics.append({"round": 1})
    with pytest.raises(PlanError, match="rounds but no checkpoints"):
        choose_for(CheckpointStore(run), config)


@dataclass
class Read:
    """What a run has read, as far as a resume compares it."""

    data: str = "rows"
    model: str = "somewhere"


def test_the_same_rows_and_tokenizer_fit() -> None:
    inputs: Any = Read()
    check_inputs(PLAIN, inputs, "model")


@pytest.mark.parametrize(("data", "model", "why"), [("others", "model", "prompts are not"), ("rows", "x", "tokenizer")])
def test_other_rows_or_another_tokenizer_are_refused(data: str, model: str, why: str) -> None:
    inputs: Any = Read(data=data)
    with pytest.raises(PlanError, match=why):
        check_inputs(PLAIN, inputs, model)


def test_a_model_is_told_by_its_configuration_and_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text("{}")
    first = model_digest(str(tmp_path))
    (tmp_path / "README.md").write_text("other words")
    assert model_digest(str(tmp_path)) == first
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    assert model_digest(str(tmp_path)) != first


def test_a_changed_reward_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(): return 1")
    config = cli.parse(["--reward", f"{file}:score"])
    first = own_files(config)
    file.write_text("def score(): return 2")
    assert own_files(config).keys() == first.keys() == {str(file)}
    assert own_files(config) != first
    assert own_files(cli.parse(["--reward", "package.module:score"])) == {}


# --- The directory ----------------------------------------------------------------------------------------------------


def test_a_directory_with_a_committed_start_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = RunFolder.create(run)
    commits_of(run, [])
    folder.release()
    with pytest.raises(PlanError, match="already holds a run"):
        RunFolder.create(run)


def test_a_start_that_was_renamed_but_not_yet_named_is_resumed(tmp_path: Path) -> None:
    run, _ = saved_run(tmp_path)
    commits_of(run, [])
    (run / "checkpoints" / "LATEST").unlink()
    with pytest.raises(PlanError, match="already holds a run"):
        RunFolder.create(run)
    heard: list[str] = []
    checkpoint = CheckpointStore(run).find_latest(heard.append)
    assert checkpoint is not None
    assert checkpoint.manifest.initial
    assert "LATEST is missing" in heard[0]


def test_a_directory_whose_start_was_cut_short_can_be_used_again(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run").release()
    (tmp_path / "run" / "checkpoints" / ".tmp-round-00000-ab").mkdir(parents=True)
    RunFolder.create(tmp_path / "run").release()
    commits_of(tmp_path / "run", [])
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["LATEST", "round-00000"]


def test_a_start_that_cannot_be_written_stops_before_anything_is_generated(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(BrokenPromise, match="Nothing was generated"):
        commits_of(tmp_path, [])


def test_a_run_in_use_cannot_be_resumed(tmp_path: Path) -> None:
    run, _ = saved_run(tmp_path)
    folder = RunFolder.reopen(run)
    with pytest.raises(PlanError, match="in use"):
        RunFolder.reopen(run)
    folder.release()


def test_files_of_a_run_are_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write("config.toml", "a")
    folder.write("config.toml", "b")
    assert (folder.path / "config.toml").read_text() == "b"
    assert not list(folder.path.glob(".config*"))
