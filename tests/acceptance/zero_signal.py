"""What leaving out groups without signal saves: the learner's seconds with and without it, and the weights of both.

.venv/bin/python tests/acceptance/zero_signal.py

One rank of one thread trains the demo on 4,096 responses of random tokens in 16 minibatches. Exits 1 when the weights
differ by more than the order of floating-point sums does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

SHARES = (0.0, 0.5, 0.9)
RESPONSES, GROUP, MINIBATCHES = 4096, 16, 16
LIMIT = 1e-5


def main() -> int:
    """Both ways for every share, in turn."""
    worst = 0.0
    lines = [f"{'without signal':<16}{'left out s':>12}{'computed s':>12}{'ratio':>8}{'||dw||/||w||':>14}"]
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES:
            (fast, left), (slow, whole) = (train(share, how, Path(folder)) for how in ("left-out", "computed"))
            distance = float(np.linalg.norm(left - whole) / np.linalg.norm(whole))
            worst = max(worst, distance)
            lines.append(f"{share:<16.0%}{fast:>12.2f}{slow:>12.2f}{fast / slow:>8.2f}{distance:>14.1e}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if worst > LIMIT else 0


def train(share: float, how: str, folder: Path) -> tuple[float, np.ndarray]:
    """Seconds of the update and all weights after it, from a process of its own."""
    out = folder / f"{share}-{how}.npy"
    words = [sys.executable, str(Path(__file__)), "rank", str(share), how, str(out)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return float(json.loads(done.stdout.splitlines()[-1])), np.load(out)


def rank(share: float, how: str, out: str) -> None:
    """The process: one update."""
    from learner.engine import LearnerEngine, LearnerSettings
    from learner.settings import Objective
    from learner.types import UpdateReport
    from learner.update import Update
    from tests.system.learner_rank import DEMO, fixed_batch

    settings = LearnerSettings(
        model=str(DEMO), rank=0, ranks=1, device="cpu", dtype="float32", zero_stage=0, lr=1e-4, warmup_steps=0,
        weight_decay=0.0, grad_clip=1.0, microbatch_tokens=4096, objective=Objective(), score_temperature=1.0,
        old_logprobs="recompute", ref_refresh_steps=0, gradient_checkpointing=False, offload=False, sentinel_rows=0,
        mismatch_limit=1e9, collective_timeout=60.0, seed=0,
    )  # fmt: skip
    groups = np.arange(RESPONSES) // GROUP
    draw = np.random.default_rng(0)
    advantages = draw.standard_normal(RESPONSES)
    advantages[np.isin(groups, draw.permutation(groups.max() + 1)[: round(share * (groups.max() + 1))])] = 0.0
    batch = dataclasses.replace(
        fixed_batch(RESPONSES),
        groups=groups.astype(np.int32),
        minibatches=(groups * MINIBATCHES // (groups.max() + 1)).astype(np.int32),
        advantages=advantages,
    )
    engine = LearnerEngine(settings, "127.0.0.1", 29_481)
    update = Update(engine, None, batch)
    if how == "computed":
        update.signal = batch.counted
    began = time.perf_counter()
    *_, report = update.run()
    seconds = time.perf_counter() - began
    assert isinstance(report, UpdateReport)
    weights = [tensor.double().flatten().numpy() for bucket in engine.gathered(1 << 30) for _, tensor in bucket]
    np.save(out, np.concatenate(weights))
    sys.stdout.write(f"\n{json.dumps(seconds)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(float(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        sys.exit(main())
