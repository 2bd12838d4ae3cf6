"""The hand-over of a shared device, with real engines and ranks that share a CPU: nothing of it changes a result.

vLLM's sleep does nothing on a CPU; handles are of shared host memory instead of a GPU's. All else is what a GPU runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "--rollouts", "64", "--minibatches", "2", "--rounds", "2", "--learner.zero-stage", "1", "--eval.every", "0",
    "--rollout.engines", "2", "--learner.ranks", "2", "--quiet",
]  # fmt: skip
AS_COLOCATED = f"""
import sys
import cluster.run.opening, cluster.transport, launch

cluster.transport.choose = lambda asked, placement: "cuda_ipc"
private_ray = cluster.run.opening.private_ray

def then_share(address):
    temp = private_ray(address)  # turns.py imports Ray, which must find the environment made here
    import cluster.turns
    handing_over, fetch_all = cluster.turns.Turns.__init__, cluster.turns.fetch_all
    cluster.turns.Turns.__init__ = lambda self, shared, seconds: handing_over(self, True, seconds)

    def said(refs, seconds, what):
        print("TURN", what, *sorted(refs), flush=True)
        return fetch_all(refs, seconds, what)

    cluster.turns.fetch_all = said
    return temp

cluster.run.opening.private_ray = then_share
sys.exit(launch.main({SETTINGS!r} + sys.argv[1:]))
"""
TIMES = ("time/", "sync/seconds", "memory/", "fleet/", "grader/timeouts", "speed/", "idle/")

pytestmark = [pytest.mark.system, pytest.mark.slow]


def run(folder: Path, *command: str) -> tuple[list[dict[str, Any]], str]:
    """Rows without times, and what was printed."""
    done = subprocess.run(
        [sys.executable, *command, "--run", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows], done.stdout


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors of a nest of dicts and lists."""
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


def test_shared_memory_sleep_and_parking_give_what_a_broadcast_gives(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain", "launch.py", *SETTINGS, "--cluster.transport", "broadcast")
    colocated, printed = run(tmp_path / "colocated", "-c", AS_COLOCATED)
    assert [row["sync/receipt_ok"] for row in plain] == [1.0, 1.0]
    same = plain[0].keys() & colocated[0].keys()
    assert {"policy/loss", "reward/total", "policy/grad_norm", "mismatch/max", "steps"} <= same
    for one, other in zip(plain, colocated, strict=True):
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    assert (tmp_path / "plain" / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "colocated" / "model" / "model.safetensors"
    ).read_bytes()

    # The commit of a round is written while optimizer state is in host memory: it holds the same.
    for mine in sorted((tmp_path / "plain" / "checkpoints").glob("round-*/shards/*.pt")):
        theirs = tmp_path / "colocated" / mine.relative_to(tmp_path / "plain")
        found, wanted = tensors(torch.load(theirs, weights_only=False)), tensors(torch.load(mine, weights_only=False))
        assert len(found) == len(wanted) > 0
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))

    turns = re.findall(r"TURN (\w+).*?((?: engine-\d| learner-\d)+)?$", printed, re.M)
    verbs = [verb for verb, members in turns if members]
    a_round = ["taking", "moving", "waking", "waking"]
    assert verbs == ["putting", "moving", "waking", "waking", *(["putting", *a_round] * 2)]
