"""The arithmetic before anything starts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import PlanError
from cluster.model_facts import read_model_facts
from cluster.plan import Plan, make_plan, split_rollouts
from cluster.plan_text import plan_text
from cluster.resources import Resources
from cluster.run.cli import apply_settings, as_toml, parse
from cluster.run.config import Config
from cluster.run.inputs import check_rows
from learner.variants import PRESETS
from rollout.problems import BadRows
from rollout.tasks import DEMO_MODEL
from rollout.types import UserError

LAPTOP = Resources(cpus=2, gpus=0, memory=16 << 30)


def planned(*words: str) -> Plan:
    config = parse(list(words))
    return make_plan(config, LAPTOP, read_model_facts(config.model))


@pytest.mark.parametrize(
    ("rollouts", "group_size", "minibatches", "expected"),
    [
        (8192, None, 16, (16, 512, 16)),
        (8192, None, None, (16, 512, 16)),
        (64, None, None, (16, 4, 4)),
        (8, None, None, (8, 1, 1)),
        (1024, 8, 4, (8, 128, 4)),
        (48, None, None, (16, 3, 3)),
    ],
)
def test_rollouts_are_split_into_prompts_groups_and_minibatches(
    rollouts: int, group_size: int | None, minibatches: int | None, expected: tuple[int, int, int]
) -> None:
    assert split_rollouts(rollouts, group_size, minibatches) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollouts", "8192", "--group-size", "15"], ["leaves 2 responses over", "--group-size 16"]),
        (["--rollouts", "8", "--minibatches", "16"], ["1 group", "--minibatches 1"]),
        (["--rollouts", "1"], ["--rollouts 1", "at least 2"]),
        (["--group-size", "1"], ["a group of one has no advantage"]),
        (["--rounds", "0"], ["--rounds 0"]),
        (["--eval.every", "-1"], ["--eval.every -1", "at least 0"]),
        (["--eval.size", "0"], ["--eval.size 0", "at least 1"]),
        (["--trace-round", "5", "--rounds", "3"], ["--trace-round 5", "3 rounds", "--trace-round 3", "--rounds 5"]),
        (["--trace-round", "-1"], ["--trace-round -1"]),
        (["--rollout.top-p", "0.9"], ["--rollout.top-p 0.9", "--rollout.allow-unscored-sampling"]),
        (["--rollout.temperature", "0"], ["needs samples"]),
        (["--kl.coef", "0.1"], ["--kl.coef", "--kl.kind"]),
        (["--kl.ref-refresh-steps", "400"], ["--kl.ref-refresh-steps"]),
        (["--correction.kind", "tis_token", "--learner.old-logprobs", "sampler"], ["same difference twice"]),
        (["--learner.loss", "cispo", "--learner.ratio-level", "sequence_sum"], ["cispo", "token"]),
        (["--cluster.placement", "separate"], ["need   have", "GPUs                         2      0", "no GPU"]),
        (["--rollout.engines", "64"], ["need   have", "66     16", "--rollout.engines 14"]),
        (["--learner.offload"], ["--learner.offload", "--learner.zero-stage 1"]),
        (["--learner.lora-rank", "9999"], ["--learner.lora-rank 9999", "512"]),
        (["--cluster.transport", "cuda_ipc"], ["cuda_ipc", "--cluster.transport object_store"]),
        (["--preset", "bok-kl"], ["book-kl"]),
        (["--model", "/nowhere/model"], ["/nowhere/model", "no such directory"]),
        (["--rollout.max-new-tokens", "100000"], ["leaves no room for a prompt"]),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_type(words: list[str], said: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        planned(*words)
    for part in said:
        assert part in str(refusal.value)


def test_a_prompt_must_leave_room_for_a_response_in_the_model(tmp_path: Path) -> None:
    """google/tunix#222: the model's length was compared with that of a response alone."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    prompts = tmp_path / "a.jsonl"
    rows = [{"prompt": "1+" * n + "1=", "answer": str(n + 1)} for n in (1, 22, 13)]  # 4, 46 and 28 tokens
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--model", str(model), "--prompts", str(prompts), "--rollout.max-new-tokens", "16")
    plan = planned(*words)
    assert plan.max_prompt_tokens + plan.max_new_tokens == plan.max_model_len == 60
    with pytest.raises(BadRows, match=r"a\.jsonl:2: 46 tokens; .* is 44") as caught:
        check_rows(parse(list(words)), plan)
    assert len(caught.value.problems) == 1


@given(
    rollouts=st.integers(2, 20000),
    group_size=st.one_of(st.none(), st.integers(2, 64)),
    minibatches=st.one_of(st.none(), st.integers(1, 64)),
)
def test_a_split_is_whole_or_refused(rollouts: int, group_size: int | None, minibatches: int | None) -> None:
    fits = rollouts % (group_size or min(16, rollouts)) == 0
    fits = fits and (rollouts // (group_size or min(16, rollouts))) % (minibatches or 1) == 0
    if not fits:
        with pytest.raises(PlanError, match="Nearest"):
            split_rollouts(rollouts, group_size, minibatches)
        return
    size, groups, steps = split_rollouts(rollouts, group_size, minibatches)
    assert size * groups == rollouts
    assert groups % steps == 0
    assert size >= 2


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_plan(name: str) -> None:
    plan = planned("--preset", name)
    assert plan.responses_per_round >= 8


def test_a_flag_overrides_the_preset_and_the_file(tmp_path: object) -> None:
    assert parse(["--preset", "r1"]).learner.clip_high == 10.0
    assert parse(["--preset", "r1", "--learner.clip-high", "0.3"]).learner.clip_high == 0.3


def test_the_demo_brings_its_own_learning_rate_and_a_user_model_gets_the_careful_one(tmp_path: object) -> None:
    demo = read_model_facts("demo")
    assert make_plan(Config(), LAPTOP, demo).lr == demo.recommended["learner.lr"]
    other = dataclasses.replace(demo, recommended={})
    assert make_plan(Config(), LAPTOP, other).lr == 1e-6
    assert make_plan(apply_settings(Config(), {"learner.lr": 0.5}), LAPTOP, demo).lr == 0.5


def test_the_plan_shows_the_arithmetic() -> None:
    config = Config()
    text = plan_text(config, make_plan(config, LAPTOP, read_model_facts("demo")), LAPTOP)
    assert "8192 responses = 512 prompts x 16" in text
    assert "16 optimizer steps of 32 groups (512 responses)" in text
    config = parse(["--rollouts", "8", "--rounds", "1"])
    text = plan_text(config, planned("--rollouts", "8", "--rounds", "1"), LAPTOP)
    assert "8 responses = 1 prompt x 8\n" in text
    assert "1 optimizer step of 1 group (8 responses)\n" in text
    assert "run        1 round, 1 optimizer step, 8 responses\n" in text


@pytest.mark.parametrize(
    ("words", "every", "said"),
    [
        ([], 2, "every 2 rounds and"),
        (["--rollouts", "256"], 2, "every 2 rounds and"),
        (["--rollouts", "8"], 64, "every 64 rounds (so that training generates as much) and"),
        (["--preset", "cheap"], 64, "every 64 rounds (so that training generates as much) and"),
        (["--rollouts", "48"], 11, "every 11 rounds (so"),  # 512 / 48 = 10.7
        (["--rollouts", "64", "--eval.samples", "4"], 32, "512 held-out prompts x 4 responses"),
        (["--rollouts", "64", "--learner.inner-updates", "2"], 4, "every 4 rounds (so"),
        (["--rollouts", "8", "--eval.every", "1"], 1, "every round and"),
        (["--rollouts", "8", "--eval.every", "5"], 5, "every 5 rounds and"),
        (["--eval.every", "0"], 0, "evaluation none"),
    ],
)
def test_evaluating_takes_no_more_responses_than_training_unless_asked_to(
    words: list[str], every: int, said: str
) -> None:
    words = [*words, "--rounds", "100"]
    plan = planned(*words)
    assert plan.eval_every == every
    assert said in plan_text(parse(words), plan, LAPTOP)


def test_a_run_that_is_shorter_than_its_interval_is_evaluated_at_its_start_and_its_end() -> None:
    words = ["--rollouts", "8", "--rounds", "12"]
    assert "512 held-out prompts at the start and at the end\n" in plan_text(parse(words), planned(*words), LAPTOP)


def test_a_resumed_run_is_evaluated_in_the_rounds_it_would_have_been(tmp_path: Path) -> None:
    for words in (
        ["--rollouts", "8"],
        ["--rollouts", "8", "--eval.every", "3"],
        ["--rollouts", "8", "--eval.every", "0"],
    ):
        saved = tmp_path / "config.toml"
        saved.write_text(as_toml(parse(words)))
        again = planned("--config", str(saved), "--rounds", "500")
        assert again.eval_every == planned(*words).eval_every
