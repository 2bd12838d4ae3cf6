"""Several nodes: real raylets on one machine, joined through --cluster.address."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TWO_OF_EACH = (
    "--rollouts", "32", "--group-size", "8", "--rounds", "1", "--eval.every", "0", "--quiet",
    "--rollout.engines", "2", "--learner.ranks", "2",
)  # fmt: skip
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a cluster of two raylets with one core each, and the environment that has its token."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    environment = os.environ | token
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as cluster:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        words = next((line.split() for line in cluster.stdout if line.startswith("address ")), [])
        assert words, "the cluster did not come up"
        yield words[1], environment
        cluster.stdin.close()
        cluster.wait(60)


def launch(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model/model.safetensors").read_bytes()).hexdigest()


def test_a_run_over_two_nodes_ends_with_the_weights_of_the_run_on_one(
    two_nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = two_nodes
    over_two = launch(environment, *TWO_OF_EACH, "--run", str(tmp_path / "two"), "--cluster.address", address)
    assert over_two.returncode == 0, over_two.stderr
    seated = [line for line in (tmp_path / "two/plan.txt").read_text().splitlines() if line.startswith("placement")]
    assert [line.split(": ", 1)[1] for line in seated] == ["engine 0, rank 0", "engine 1, rank 1"]
    on_one = launch(dict(os.environ), *TWO_OF_EACH, "--run", str(tmp_path / "one"))
    assert on_one.returncode == 0, on_one.stderr
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    rows = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["sync/receipt_ok"] == 1.0


def test_a_cluster_without_room_refuses_with_what_there_is(two_nodes: tuple[str, dict[str, str]]) -> None:
    address, environment = two_nodes
    refused = launch(environment, "--cluster.address", address, "--placement", "separate", "--rollouts", "64")
    assert refused.returncode == 2
    assert "need   have" in refused.stderr
    assert "2 nodes with 0 GPUs and 1 core" in refused.stderr
