"""LoRA end to end on real engines and ranks: it trains, resumes exactly, and leaves behind what it held."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "rollout" / "tasks" / "demo"
SETTINGS = [
    "--rollouts", "256", "--minibatches", "4", "--rounds", "2", "--learner.lora-rank", "8", "--learner.lr", "2e-3",
    "--kl.kind", "k3_weighted", "--eval.every", "0", "--rollout.engines", "1", "--learner.ranks", "1", "--quiet",
]  # fmt: skip
TIMES = ("time/", "sync/seconds", "memory/", "fleet/", "grader/timeouts")

pytestmark = pytest.mark.system


def launch(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "launch.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in found]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    launch(*SETTINGS, "--run", str(folder))
    return folder


def test_engines_hold_what_the_learner_trains_and_compute_the_same(run: Path) -> None:
    trained = rows(run)
    assert [row["sync/receipt_ok"] for row in trained] == [1.0, 1.0]
    # In float32 the engine's kernels and the learner agree to rounding, also after the adapter has moved.
    assert all(row["mismatch/max"] < 1e-3 for row in trained)
    # The reference is the model without the adapter: the policy starts at it and moves away.
    steps = [step["policy/kl"] for row in trained for step in row["steps"]]
    assert steps[0] == pytest.approx(0.0, abs=1e-7)
    assert steps[-1] > 1e-5


def test_the_export_is_the_base_plus_the_adapter(run: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        start, whole = base(ids).logits, merged(ids).logits
        again = PeftModel.from_pretrained(base, run / "model" / "adapter")(ids).logits
    assert not torch.allclose(start, whole, atol=1e-2)
    assert torch.allclose(again, whole, atol=1e-4)


def test_a_checkpoint_is_small_and_a_resumed_run_is_the_same_run(run: Path, tmp_path: Path) -> None:
    part = tmp_path / "run"
    shutil.copytree(run, part)
    newest = sorted((run / "checkpoints").glob("round-*"))
    assert len(newest) == 2, "two checkpoints are kept"
    shards = sum(file.stat().st_size for file in newest[-1].rglob("*") if file.is_file())
    assert shards < 3 * (DEMO / "model.safetensors").stat().st_size
    shutil.rmtree(part / "checkpoints" / newest[-1].name)
    (part / "checkpoints" / "LATEST").write_text((newest[0]).name + "\n")
    launch("resume", str(part))
    assert rows(part) == rows(run)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (part / "model" / name).read_bytes() == (run / "model" / name).read_bytes()


def test_exporting_a_checkpoint_gives_the_same_model(run: Path, tmp_path: Path) -> None:
    launch("export", str(run), str(tmp_path / "exported"))
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "exported" / name).read_bytes() == (run / "model" / name).read_bytes()
