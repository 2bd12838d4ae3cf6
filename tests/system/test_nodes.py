"""Several nodes: real raylets on one machine, joined through --cluster.address."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from cluster.faults import VARIABLE
from tests.faults.runs import Command, differences, events_of, rows_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TWO_OF_EACH = (
    "--rollouts", "32", "--group-size", "8", "--rounds", "8", "--eval.every", "0", "--quiet",
    "--rollout.engines", "2", "--learner.ranks", "2",
)  # fmt: skip
RAYLETS = """
import sys, tempfile
from ray.cluster_utils import Cluster

# Each with a directory of its own, as machines have: raylets that share one pull shipped code away from each other.
temps = [tempfile.TemporaryDirectory(prefix="rn-") for _ in range(6)]

def directory():
    temps.append(temps.pop(0))
    return {"temp_dir": temps[-1].name}

def head(cores):
    return Cluster(
        initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False, **directory()}
    )
"""
CLUSTER = f"""{RAYLETS}
cluster = head(int(sys.argv[1]))
nodes = [cluster.add_node(num_cpus=1, **directory())]
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "lose":
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
    else:
        nodes.append(cluster.add_node(num_cpus=1, **directory()))
    print("done", flush=True)
cluster.shutdown()
"""


@dataclass(frozen=True)
class Nodes:
    """Raylets with one core each, on this machine: a head, and one more that can be lost and added."""

    process: subprocess.Popen[str]
    address: str
    environment: dict[str, str]
    """What has the token of this cluster, beside the environment of this process."""

    def tell(self, word: str) -> None:
        """`lose` or `add` the second node; returns when it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextlib.contextmanager
def two_raylets(head_cores: int = 1, fault: str = "") -> Iterator[Nodes]:
    """`fault` is for the processes on the nodes, which have the environment of their node."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(head_cores)], env=os.environ | token | {VARIABLE: fault},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as cluster:  # fmt: skip
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        words = next((line.split() for line in cluster.stdout if line.startswith("address ")), [])
        assert words, "the cluster did not come up"
        yield Nodes(cluster, words[1], token)
        cluster.stdin.close()
        cluster.wait(60)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_raylets() as both:
        yield both


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on a private Ray of this machine."""
    run = tmp_path_factory.mktemp("runs") / "one"
    ended = Command(*TWO_OF_EACH, "--run", str(run)).end(300)
    assert ended.code == 0, ended.text
    return run


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model/model.safetensors").read_bytes()).hexdigest()


def await_(what: Callable[[], object], command: Command, seconds: float = 240.0) -> None:
    """Wait until something can be seen of a run that goes on."""
    deadline = time.monotonic() + seconds
    while not what():
        assert command.process.poll() is None, command.end().text
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_cluster_without_room_refuses_with_what_there_is(nodes: Nodes) -> None:
    words = ("--cluster.address", nodes.address, "--placement", "separate", "--rollouts", "64")
    refused = Command(*words, environment=nodes.environment).end(120)
    assert refused.code == 2
    assert "need   have" in refused.text
    assert "2 nodes with 0 GPUs and 1 core" in refused.text


def test_a_run_over_two_nodes_ends_with_the_weights_of_the_run_on_one(
    nodes: Nodes, on_one: Path, tmp_path: Path
) -> None:
    run = tmp_path / "two"
    words = (*TWO_OF_EACH, "--run", str(run), "--cluster.address", nodes.address)
    ended = Command(*words, environment=nodes.environment).end(300)
    assert ended.code == 0, ended.text
    seated = [line for line in (run / "plan.txt").read_text().splitlines() if line.startswith("placement")]
    assert [line.split(": ", 1)[1] for line in seated] == ["engine 0, rank 0", "engine 1, rank 1"]
    assert weights(run) == weights(on_one)
    assert differences(rows_of(on_one), rows_of(run)) == []
    assert all(row["sync/receipt_ok"] == 1.0 for row in rows_of(run))


def test_an_evaluation_uses_the_cluster_it_is_given(nodes: Nodes, on_one: Path, tmp_path: Path) -> None:
    numbers = {}
    for where, words in {"here": (), "cluster": ("--cluster.address", nodes.address)}.items():
        out = tmp_path / f"{where}.json"
        asked = ("eval", str(on_one), "--size", "16", "--json", str(out), *words)
        ended = Command(*asked, environment=nodes.environment if words else None).end(300)
        assert ended.code == 0, ended.text
        numbers[where] = {k: v for k, v in json.loads(out.read_text()).items() if not k.startswith("time/")}
    assert numbers["here"] == numbers["cluster"]


def test_a_node_lost_and_a_node_added_in_mid_run_change_nothing(nodes: Nodes, on_one: Path, tmp_path: Path) -> None:
    """Row 24: rank 1 goes to the node that is left, engine 1 waits until the new one is there and works on it."""
    run = tmp_path / "moved"
    words = (*TWO_OF_EACH, "--run", str(run), "--cluster.address", nodes.address)
    command = Command(*words, environment=nodes.environment)
    await_(lambda: (run / "metrics.jsonl").exists() and len(rows_of(run)) >= 2, command)
    nodes.tell("lose")
    await_(lambda: events_of(run, "node_lost"), command)
    nodes.tell("add")
    ended = command.end(300)
    assert ended.code == 0, ended.text
    assert weights(run) == weights(on_one)
    assert differences(rows_of(on_one), rows_of(run)) == []

    kinds = ("node_lost", "unseated", "ranks_back", "node_joined", "seated")
    assert [len(events_of(run, kind)) for kind in kinds] == [1] * 5
    [lost] = events_of(run, "node_lost")
    assert "learner-1 goes to" in lost["text"]
    assert "no room for engine-1" in lost["text"]
    assert events_of(run, "seated")[0]["names"] == ["engine-1"]
    last = parquet.read_table(max((run / "groups").glob("*.parquet")))
    assert set(last["engine"].to_pylist()) == {0, 1}, "the engine on the new node is not used"


def test_who_loses_a_node_in_mid_generation_goes_to_one_that_joined_before(on_one: Path, tmp_path: Path) -> None:
    """Engine 0 sleeps for 20 s in round 3, so that the node is lost in the middle of a generation."""
    run = tmp_path / "moved"
    with two_raylets(fault="gen.before:0:3:sleep:once") as nodes:
        words = (*TWO_OF_EACH, "--run", str(run), "--cluster.address", nodes.address)
        command = Command(*words, environment=nodes.environment)
        await_(lambda: (run / "pids.txt").exists(), command)
        nodes.tell("add")
        await_(lambda: (run / "metrics.jsonl").exists() and len(rows_of(run)) >= 2, command)
        nodes.tell("lose")
        ended = command.end(300)
    assert ended.code == 0, ended.text
    assert weights(run) == weights(on_one)
    assert differences(rows_of(on_one), rows_of(run)) == []
    [joined], [lost] = events_of(run, "node_joined"), events_of(run, "node_lost")
    assert joined["text"].endswith("all engines of the plan have a seat, so nothing is started on it")
    assert lost["names"] == ["engine-1", "learner-1"]
    assert events_of(run, "unseated") == []


def test_a_run_whose_ranks_have_no_room_left_ends_within_seconds(tmp_path: Path) -> None:
    """All its processes are on the node that is lost, and the one with the driver has no core to offer."""
    run = tmp_path / "over"
    with two_raylets(head_cores=0) as nodes:
        words = (*TWO_OF_EACH[:-4], "--rollout.engines", "1", "--learner.ranks", "1", "--run", str(run))
        command = Command(*words, "--cluster.address", nodes.address, environment=nodes.environment)
        await_(lambda: (run / "metrics.jsonl").exists() and rows_of(run), command)
        nodes.tell("lose")
        asked = time.monotonic()
        ended = command.end(120)
    assert ended.code == 3, ended.text
    assert time.monotonic() - asked < 60
    assert "a run needs all its ranks and an engine" in ended.text
    assert "need" in ended.text
    assert "processes, 8 per core" in ended.text
    assert f"continue with: python launch.py resume {run}" in ended.text
    assert "Traceback" not in ended.text


SEATS = f"""{RAYLETS}
from pathlib import Path
import ray
from cluster.paths_on_nodes import Sight
from cluster.placement import Demand, lay_out
from cluster.seats import Seats
from cluster.survey import ray_nodes

cluster = head(1)
workers = [cluster.add_node(num_cpus=8, num_gpus=2, **directory()) for _ in range(3)]
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
seats = Seats(lay_out("separate", Demand(4, 2, 1), ray_nodes()), 1)
seats.reserve(Sight(Path(sys.argv[1]), sys.argv[2]))

@ray.remote(max_restarts=0)
class Sitting:
    def where(self):
        return ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids())

def sit(name):
    actor = Sitting.options(**dict(seats.options(name), num_gpus=1)).remote()
    return actor, *ray.get(actor.where.remote(), timeout=60)

names = ["engine-0", "engine-1", "engine-2", "engine-3", "learner-0", "learner-1"]
first = dict((name, sit(name)) for name in names)
assert all(gpus == 1 for _, _, gpus in first.values())
assert seats.follow() is None
lost = first["learner-0"][1]
assert first["learner-1"][1] == lost
cluster.remove_node(next(node for node in workers if node.node_id == lost), allow_graceful=False)
change = seats.follow()
print(change.text())
assert (change.given_up, change.unseated) == (("engine-3", "engine-2"), ())
places = [first[name][1] for name in change.given_up]
for name in change.given_up:
    ray.kill(first[name][0])
moved = [sit(name) for name in ("learner-0", "learner-1")]
assert [(node, gpus) for _, node, gpus in moved] == [(place, 1) for place in places]
assert seats.find_room("engine-2") is None
added = cluster.add_node(num_cpus=8, num_gpus=1, **directory())
print(seats.newcomers()[0])
assert seats.find_room("engine-2") is not None
assert sit("engine-2")[1:] == (added.node_id, 1)
assert seats.find_room("engine-3") is None
ray.shutdown()
cluster.shutdown()
"""


def test_ranks_that_lose_their_gpus_take_those_of_engines(tmp_path: Path) -> None:
    """Raylets that claim to have GPUs, and actors that do nothing: what Ray gives is what was decided."""
    words = [sys.executable, "-c", SEATS, str(tmp_path), str(ROOT / "rollout" / "tasks" / "demo")]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | token, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "engine-3, engine-2 given up for ranks" in done.stdout


HIDING = 'mount -t tmpfs none "$1" && exec "$2" start --address "$3" --num-cpus 1 --block'


def test_a_node_that_does_not_see_the_run_directory_or_the_model_is_named(nodes: Nodes, tmp_path: Path) -> None:
    """A third raylet sees an empty directory where the others see the run and the model."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not give a process file systems of its own (unshare -m)")
    model = tmp_path / "model"
    shutil.copytree(ROOT / "rollout" / "tasks" / "demo", model)
    ray = str(Path(sys.executable).with_name("ray"))
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", HIDING, "sh", str(tmp_path), ray, nodes.address],
        env=os.environ | nodes.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as third:  # fmt: skip
        words = ("--cluster.address", nodes.address, "--model", str(model), "--rollouts", "32", "--group-size", "8")
        three = ("--rollout.engines", "3", "--learner.ranks", "3", "--eval.every", "0", "--minibatches", "1")
        deadline = time.monotonic() + 60
        while "3 cores" not in Command("plan", *words, environment=nodes.environment).end(60).text:
            assert time.monotonic() < deadline, "the third node did not join"
        refused = Command(*words, *three, "--run", str(tmp_path / "run"), environment=nodes.environment).end(120)
        third.terminate()
    assert refused.code == 2, refused.text
    assert f"{tmp_path / 'run'} is not the same directory on node " in refused.text
    assert f"There is no model at {model} on node " in refused.text
    assert "Traceback" not in refused.text
