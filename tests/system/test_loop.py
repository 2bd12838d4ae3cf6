"""The whole system as its users run it: the command line, real vLLM, Ray and DeepSpeed, real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system


def launch(*words: object, timeout: float = 400.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def living(run: Path) -> list[int]:
    pids = [int(line.split()[1]) for line in (run / "pids.txt").read_text().splitlines()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_every_round_has_a_row_and_the_first_is_before_any_update(demo_run: Path) -> None:
    rows = rows_of(demo_run)
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert 0.0 < rows[0]["eval/correctness"] < 0.5
    assert "policy/loss" not in rows[0]
    for row in rows[1:]:
        assert row["responses"] == 128
        assert len(row["steps"]) == 4
        assert row["weights_version"] == row["round"] - 1
        assert row["sync/receipt_ok"] == 1.0
        assert row["policy/skipped_steps"] == 0


def test_engine_and_learner_agree_in_every_round(demo_run: Path) -> None:
    assert all(row["mismatch/max"] < 1e-4 for row in rows_of(demo_run)[1:])


def test_what_everybody_did_in_a_round_is_in_its_trace(demo_run: Path) -> None:
    events = json.loads((demo_run / "trace-round-2.json").read_text())["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(tracks.values()) == ["driver", "engine-0", "engine-1", "scorer", "learner-0", "learner-1"]
    seconds = rows_of(demo_run)[2]["time/round"]
    done = {name: [event for event in events if tracks[event["pid"]] == name] for name in tracks.values()}

    def spans(track: str, name: str) -> list[tuple[float, float]]:
        found = [event for event in done[track] if event["name"] == name]
        return [(event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6) for event in found]

    for name in ("generate", "train", "sync", "evaluate", "checkpoint", "doctor"):
        assert len(spans("driver", name)) == 1, name
    groups = [event for name in ("engine-0", "engine-1") for event in done[name] if event["name"] == "group done"]
    assert len(groups) == 8 + 64
    assert len(spans("scorer", "score")) == 8 + 64
    for rank in ("learner-0", "learner-1"):
        assert len(spans(rank, "minibatch")) == len(spans(rank, "step")) == 4
        assert len(spans(rank, "old log-probs")) == 1
        assert len(spans(rank, "backward")) >= 4
        ((began, ended),) = spans(rank, "update")
        (learning,) = spans("driver", "train")
        # one clock: the driver sees the whole update, and the engines are done before it begins
        assert learning[0] <= began < ended <= learning[1] + 0.1
        assert max(until for _, until in spans("engine-0", "generate")[:1]) <= began
    assert -1 <= spans("driver", "generate")[0][0] <= spans("driver", "checkpoint")[0][0] <= seconds + 30


def test_idle_time_and_the_price_of_watching_are_told(demo_run: Path) -> None:
    for row in rows_of(demo_run)[1:]:
        assert 0 < row["time/engines_idle"] < 1
        assert 0 < row["time/ranks_idle"] < 1
        assert row["time/generate_tokens_per_s"] > 0
        assert "time/learn_mfu" not in row  # nobody knows the peak of a CPU
        assert 0 < row["time/watch"] < row["time/round"]


def test_the_first_step_of_a_round_has_ratio_one(demo_run: Path) -> None:
    for row in rows_of(demo_run)[1:]:
        assert row["steps"][0]["policy/ratio_max"] == 1.0
        assert row["steps"][-1]["policy/ratio_max"] > 1.0


def test_every_scored_response_is_kept(demo_run: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(demo_run / "groups" / "round-00002.parquet")
    assert table.num_rows == 128
    names = ("row_id", "occurrence", "k")
    assert len(set(zip(*(table[name].to_pylist() for name in names), strict=True))) == 128


def test_the_trained_model_loads_in_transformers_and_differs_from_the_start(demo_run: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(demo_run / "model")
    start = AutoModelForCausalLM.from_pretrained(ROOT / "rollout" / "tasks" / "demo")
    gaps = [float((a - b).abs().max()) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert min(gaps) > 0
    assert max(gaps) < 0.1
    assert AutoTokenizer.from_pretrained(demo_run / "model").encode("1+1=")
    assert all(bool(torch.isfinite(p).all()) for p in trained.parameters())


def test_no_process_of_the_run_is_left(demo_run: Path) -> None:
    assert living(demo_run) == []


def test_a_run_directory_is_used_once(demo_run: Path) -> None:
    done = launch("--rollouts", 8, "--run", demo_run, timeout=60)
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def user_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with untied embeddings and the demo's tokenizer, as a user might bring one."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model") / "llama"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "rollout" / "tasks" / "demo").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory, user_model: Path) -> Path:
    """The user's own model, prompts and reward, on ZeRO 3 with broadcast weights and the cheap scheme."""
    folder = tmp_path_factory.mktemp("own")
    prompts = folder / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(20)))
    reward = folder / "mine.py"
    reward.write_text(
        "def brevity(response, final_answer, answer):\n"
        "    right = final_answer == answer\n"
        "    return {'correctness': float(right), 'brevity': right / (1 + len(response))}\n"
    )
    done = launch(
        "--model", user_model, "--prompts", prompts, "--reward", f"{reward}:brevity", "--rollouts", 64, "--rounds", 2,
        "--rollout.max-new-tokens", 12, "--learner.zero-stage", 3, "--learner.lr", "1e-3", "--cluster.transport",
        "broadcast", "--kl.kind", "k3", "--learner.ratio-level", "sequence_sum", "--run", folder / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_a_users_own_model_prompts_and_reward_train(own_run: Path) -> None:
    rows = [row for row in rows_of(own_run) if row["round"] > 0]
    assert all(0 <= row["reward/brevity"] <= row["reward/correctness"] for row in rows)
    assert all(row["mismatch/max"] < 1e-4 for row in rows)
    assert all("policy/kl" in row for row in rows)


def test_the_result_loads_in_transformers_with_its_own_output_layer(own_run: Path) -> None:
    from safetensors import safe_open

    with safe_open(own_run / "model" / "model.safetensors", "pt") as tensors:
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(tensors.keys())


@pytest.mark.parametrize("schedule", ["phased", pytest.param("async", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_run_within_its_grace_and_leaves_nothing_behind(schedule: str, tmp_path: Path) -> None:
    run = tmp_path / "stopped"
    words = ["--rollouts", "64", "--rounds", "1000", "--cluster.schedule", schedule, "--run", str(run)]
    command = [sys.executable, str(ROOT / "launch.py"), *words]
    short = tempfile.mkdtemp(prefix="t", dir="/tmp")  # Ray's sockets need a short path
    environment = os.environ | {"TMPDIR": short}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len(rows_of(run)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    second = launch("--rollouts", 8, "--run", run, timeout=60)
    assert second.returncode == 2
    assert "in use" in second.stderr
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert time.monotonic() - asked < 15
    assert "Traceback" not in text
    assert living(run) == []
    assert [row["round"] for row in rows_of(run)][:3] == [0, 1, 2]
    assert not list(Path(short).iterdir()), "the private directory of Ray was left behind"
    os.rmdir(short)
