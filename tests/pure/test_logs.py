"""Reading metric rows of ours and of other systems."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.run.aliases import ALIASES, TRL_NAMES, ours_from, plain_name, to_trl, trl_name
from cluster.run.doctor import diagnose
from cluster.run.logs import read_log
from cluster.run.metric_table import metric_doc
from cluster.run.metrics import encode_row
from rollout.types import UserError
from tests.pure.synthetic_runs import failing

BOOK_LOGS = Path(__file__).parents[1] / "data" / "book_logs"


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_books_log_is_read_under_our_names_and_percent_becomes_a_share() -> None:
    log = read_log(BOOK_LOGS / "kl_term_run.csv")
    first = log.rows[0]
    assert len(log.rows) == 500
    assert first["round"] == 1
    assert first["reward/total"] == 0.125
    assert first["response/length"] == 38.375
    assert first["policy/ratio_mean"] == 0.282757
    assert first["policy/entropy"] == 1.268579
    assert first["advantage/std"] == 0.999717
    assert first["eval/correctness"] == pytest.approx(0.156)
    assert "eval/correctness" not in log.rows[1]
    assert set(log.unmapped) == {"total_steps", "tokens_per_sec"}


def test_the_books_loss_contains_its_kl_term_and_ours_does_not() -> None:
    first = read_log(BOOK_LOGS / "kl_term_run.csv").rows[0]
    assert first["policy/kl_loss"] == -0.09671
    assert first["policy/loss"] == pytest.approx(-0.78737 + 0.09671)


def test_a_run_directory_is_read_as_it_is(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"round": 0, "eval/correctness": 0.4},
        {"round": 1, "reward/total": 0.5, "steps": [{"step": 1}]},
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert list(read_log(tmp_path).rows) == rows


def test_values_that_are_not_finite_come_back_from_our_own_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(encode_row({"round": 1, "policy/grad_norm": math.nan}))
    assert math.isnan(read_log(tmp_path).rows[0]["policy/grad_norm"])


def test_a_cut_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", [{"round": n, "reward/total": 0.1 * n} for n in range(1, 4)])
    path.write_text(path.read_text()[:-12])
    log = read_log(path)
    assert [row["round"] for row in log.rows] == [1, 2]
    assert "last line (3) is cut off" in log.notes[0]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "reward": 0.1}\n{"step": 2, "rew\n{"step": 3, "reward": 0.1}\n')
    with pytest.raises(UserError, match=r"log\.jsonl, line 2"):
        read_log(path)


TRL_HISTORY = [
    {
        "step": 10, "loss": 0.01, "grad_norm": 0.4, "learning_rate": 1e-6, "reward": 0.55, "reward_std": 0.2,
        "frac_reward_zero_std": 0.3, "completions/mean_length": 210.0, "completions/clipped_ratio": 0.05,
        "rewards/accuracy_reward/mean": 0.5, "rewards/accuracy_reward/std": 0.5, "rewards/format_reward/mean": 0.5,
        "kl": 0.01, "entropy": 0.7, "clip_ratio/low_mean": 0.01, "clip_ratio/high_mean": 0.02,
        "clip_ratio/region_mean": 0.03, "sampling/sampling_logp_difference/mean": 0.004, "num_tokens": 1e5,
        "step_time": 12.0,
    },
    {"step": 10, "eval_reward": 0.5, "eval_rewards/accuracy_reward/mean": 0.45},
    {"step": 20, "reward": 0.6, "rewards/accuracy_reward/mean": 0.55},
    {"step": 20, "train_runtime": 100.0},
]  # fmt: skip


def test_trls_trainer_state_is_read_with_its_evaluations_joined_to_the_steps(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": TRL_HISTORY}))
    rows = read_log(tmp_path).rows
    assert [row["round"] for row in rows] == [10, 20]
    assert rows[0] == {
        "round": 10, "policy/loss": 0.01, "policy/grad_norm": 0.4, "policy/lr": 1e-6, "reward/total": 0.55,
        "reward/std": 0.2, "group/zero_signal": 0.3, "response/length": 210.0, "response/truncated": 0.05,
        "reward/correctness": 0.5, "reward/format": 0.5, "policy/kl": 0.01, "policy/entropy": 0.7,
        "policy/clip_fraction_low": 0.01, "policy/clip_fraction_high": 0.02, "mismatch/mean": 0.004,
        "time/round": 12.0, "eval/correctness": 0.45,
    }  # fmt: skip


def test_verls_file_log_is_read_from_inside_its_wrapping(tmp_path: Path) -> None:
    data = {
        "actor/entropy": 0.6, "actor/kl_loss": 0.02, "actor/pg_loss": 0.1, "actor/pg_clipfrac": 0.05,
        "actor/pg_clipfrac_lower": 0.001, "actor/grad_norm": 0.3, "actor/lr": 1e-6, "critic/score/mean": 0.4,
        "critic/rewards/mean": 0.38, "response_length/mean": 500.0, "response_length/clip_ratio": 0.1,
        "val-core/openai/gsm8k/acc/mean@1": 0.7, "training/rollout_probs_diff_mean": 0.003, "timing_s/step": 30.0,
    }  # fmt: skip
    log = read_log(write_lines(tmp_path / "verl.jsonl", [{"step": 3, "data": data}]))
    assert log.rows[0] == {
        "round": 3, "policy/entropy": 0.6, "policy/kl": 0.02, "policy/loss": 0.1, "policy/clip_fraction_high": 0.05,
        "policy/clip_fraction_dual": 0.001, "policy/grad_norm": 0.3, "policy/lr": 1e-6, "reward/total": 0.4,
        "response/length": 500.0, "response/truncated": 0.1, "eval/correctness": 0.7, "mismatch/mean": 0.003,
        "time/round": 30.0,
    }  # fmt: skip
    assert log.unmapped == ("critic/rewards/mean",)


def test_an_export_of_openrlhf_from_a_tracker_is_read(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_text(
        "train/global_step,run 1 - train/reward,run 1 - train/reward__MIN,run 1 - train/response_length,"
        "run 1 - train/ppo_clip_ratio,run 1 - train/policy_loss,run 1 - eval/math_pass1\n"
        "1,0.1,0.1,300,0.01,0.2,\n2,0.2,0.2,310,,0.1,0.31\n"
    )
    rows = read_log(path).rows
    assert rows[0] == {
        "round": 1, "reward/total": 0.1, "response/length": 300.0, "policy/clip_fraction_high": 0.01, "policy/loss": 0.2
    }  # fmt: skip
    assert rows[1]["eval/correctness"] == 0.31


def test_skyrls_log_is_read_and_its_staleness_becomes_a_weights_version(tmp_path: Path) -> None:
    row = {
        "trainer/global_step": 7, "reward/avg_raw_reward": 0.5, "policy/policy_entropy": 0.4, "policy/policy_loss": 0.1,
        "policy/raw_grad_norm": 1.5, "policy/ppo_clip_ratio": 0.02, "generate/avg_num_tokens": 900.0,
        "policy/rollout_train_logprobs_abs_diff_mean": 0.01, "async/staleness_max": 2, "eval/all/avg_score": 0.3,
    }  # fmt: skip
    log = read_log(write_lines(tmp_path / "skyrl.jsonl", [row]))
    assert log.rows[0] == {
        "round": 7, "reward/total": 0.5, "policy/entropy": 0.4, "policy/loss": 0.1, "policy/grad_norm": 1.5,
        "policy/clip_fraction_high": 0.02, "response/length": 900.0, "mismatch/mean": 0.01, "weights_version": 4,
        "eval/correctness": 0.3,
    }  # fmt: skip
    assert log.unmapped == ()


@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_correctness_is_derived_where_only_the_total_and_format_are_logged(tmp_path: Path, weight: float) -> None:
    rng = np.random.default_rng(0)
    correct, form = rng.integers(0, 9, 40) / 8, rng.integers(3, 9, 40) / 8
    lines = ["step,reward_avg,format_reward_avg,adv_std,adv_avg"]
    lines += [
        f"{at + 1},{c + weight * f:.6f},{f:.6f},1.0,0.0" for at, (c, f) in enumerate(zip(correct, form, strict=True))
    ]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(lines))
    log = read_log(path)
    assert [row["reward/correctness"] for row in log.rows] == pytest.approx(list(correct), abs=1e-5)
    assert [row["reward/format"] for row in log.rows] == pytest.approx(list(form))
    assert f"{weight:g} * format" in log.notes[-1]


def test_correctness_is_not_guessed_where_several_weights_would_fit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"step": at, "reward": 0.5 + rng.uniform(0, 0.1), "format_reward_avg": rng.uniform(0.3, 0.5)} for at in range(9)
    ]
    assert all("reward/correctness" not in row for row in read_log(write_lines(tmp_path / "a.jsonl", rows)).rows)


def test_rows_without_a_step_column_are_numbered_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("reward,entropy\n0.1,0.5\n0.2,0.4\n")
    log = read_log(path)
    assert [row["round"] for row in log.rows] == [1, 2]
    assert "numbered" in log.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "colour,height\n1,2\n", "none of its columns is a metric I know"),
        ("a.csv", "", "is empty"),
        ("a.csv", "reward,step\n", "no rows"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", '"text"', "no list of rows"),
        ("a.jsonl", "[1, 2]\n{}\n", "line 1"),
        ("a.parquet", "x", "not a kind of log"),
        ("a", "x", "without an ending"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        read_log(tmp_path / name)


def test_a_folder_without_metrics_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        read_log(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read_log(tmp_path / "gone.csv")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="not a text file"):
        read_log(tmp_path / "a.csv")


def test_no_name_of_another_system_stands_for_two_of_our_metrics() -> None:
    names = [name for alias in ALIASES for name in (alias.trl, *alias.others) if name]
    doubled = {name for name in names if names.count(name) > 1}
    assert doubled == set()


def test_only_documented_metrics_have_aliases() -> None:
    assert [alias.ours for alias in ALIASES if metric_doc(alias.ours) is None] == []
    assert [name for name in TRL_NAMES if metric_doc(name) is None] == []


written = st.sampled_from(sorted({alias.ours for alias in ALIASES} | {"reward/correctness", "reward/format"}))


@given(st.dictionaries(written, st.floats(0.01, 1), min_size=1))
def test_what_is_written_under_trls_names_is_read_back_as_it_was(row: dict[str, float]) -> None:
    theirs = to_trl(row)
    back = {ours: theirs[name] for name, ours in ours_from(theirs).items()}
    if "policy/loss" in row and "policy/kl_loss" in row:
        back["policy/loss"] -= row["policy/kl_loss"]
    assert back == pytest.approx(row)


def test_parts_of_a_users_reward_keep_their_names_in_both_directions() -> None:
    assert trl_name("reward/brevity") == "rewards/brevity/mean"
    assert ours_from(["rewards/brevity/mean", "reward/style/mean"]) == {
        "rewards/brevity/mean": "reward/brevity",
        "reward/style/mean": "reward/style",
    }


def test_detail_that_is_no_number_is_not_written_for_trackers() -> None:
    theirs = to_trl({"round": 3, "steps": [{"step": 1}], "sync/receipt_ok": True, "reward/total": 0.5})
    assert theirs == {"step": 3, "sync/receipt_ok": 1.0, "reward": 0.5}


def test_prefixes_of_trackers_are_taken_off() -> None:
    assert plain_name("my - run - train/reward") == "reward"
    assert plain_name("training/rollout_probs_diff_mean") == "training/rollout_probs_diff_mean"
    assert plain_name("policy/entropy") == "policy/entropy"


def test_rldoctor_reads_our_rows_under_trls_names_and_we_find_what_it_misses() -> None:
    rl_doctor = pytest.importorskip("rl_doctor", reason="rldoctor is not installed: no independent reader of our log")
    rows, _ = failing("kl-takeover", 1)
    run = rl_doctor.run_from_records([to_trl(row) for row in rows])
    assert {
        "reward_mean", "reward_std", "zero_var_group_frac", "kl", "entropy", "grad_norm", "response_len_mean",
        "response_len_clip_ratio", "pg_clipfrac", "lr", "eval_score",
    } <= set(run.series)  # fmt: skip
    assert set(run.reward_components) == {"correctness", "format"}
    theirs = {finding.detector: finding.severity.name for finding in rl_doctor.diagnose(run).findings}
    assert theirs["advantage_collapse"] == "CRITICAL"
    assert theirs["entropy_collapse"] == theirs["gradient_pathology"] == "OK"
    ours = {finding.id for finding in diagnose(rows)}
    assert {"kl-takeover", "reward-collapse", "entropy-explosion", "grad-growth"} <= ours


def test_what_trl_prints_is_read_whatever_stands_around_it(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(
        "Loading weights: 100%|####| 3/3\n"
        "{'loss': 0.0, 'grad_norm': 0.25, 'learning_rate': 9.9e-07, 'reward': 0.5, 'reward_std': 0.1, 'epoch': 0.01}\n"
        "  2%|#  | 2/100\r{'loss': '1e-05', 'grad_norm': 'nan', 'reward': '0.625', 'kl': '0.002', 'epoch': '0.02'}\n"
        "{'not': 'metrics'}\n"
    )
    log = read_log(path)
    assert [row["round"] for row in log.rows] == [1, 2]
    assert [row["reward/total"] for row in log.rows] == [0.5, 0.625]
    assert log.rows[0]["policy/lr"] == 9.9e-07
    assert math.isnan(log.rows[1]["policy/grad_norm"])


def test_what_verl_prints_is_read_with_its_step(tmp_path: Path) -> None:
    path = tmp_path / "verl.txt"
    path.write_text(
        "(TaskRunner pid=77) step:4 - actor/entropy:0.35 - actor/grad_norm:np.float64(0.2) - critic/score/mean:0.5 - "
        "response_length/mean:212.5 - val-core/openai/gsm8k/reward/mean@1:0.71\n"
        "(TaskRunner pid=77) step:5 - actor/entropy:3.4e-01 - critic/score/mean:0.53 - odd:words here\n"
    )
    log = read_log(path)
    assert [row["round"] for row in log.rows] == [4, 5]
    assert log.rows[0]["policy/grad_norm"] == 0.2
    assert log.rows[0]["eval/correctness"] == 0.71
    assert [row["policy/entropy"] for row in log.rows] == [0.35, 0.34]


def test_a_text_without_any_metric_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here\n")
    with pytest.raises(UserError, match="has no rows"):
        read_log(tmp_path / "notes.txt")
