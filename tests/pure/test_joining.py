"""What a Ray cluster says about its nodes, and clusters that are not joined."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from cluster import joining
from cluster.errors import PlanError
from cluster.paths_on_nodes import complaints
from cluster.resources import Node
from cluster.run.config import Config
from cluster.run.folder import RunFolder, start_time
from cluster.start import Processes, pids_text
from cluster.survey import as_node

ABOUT = {"NodeID": "ab12", "NodeManagerAddress": "10.0.0.5", "Resources": {"CPU": 8.0, "GPU": 4.0, "memory": 1e9}}


def test_a_gpu_of_which_anybody_holds_a_part_counts_as_held() -> None:
    node = as_node(ABOUT, {"CPU": 6.5, "GPU": 2.5})
    assert node == Node("ab12", cpus=8, gpus=4, memory=10**9, host="10.0.0.5", busy_cpus=1.5, busy_gpus=2)
    assert node.free_gpus == 2


def test_a_node_that_says_nothing_of_what_is_free_has_nothing_free() -> None:
    node = as_node(ABOUT, {})
    assert (node.free_cpus, node.free_gpus) == (0, 0)


def test_a_cluster_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(PlanError, match="anybody who reaches that cluster"):
        joining.resources_at("10.0.0.5:6379")


def test_a_cluster_that_does_not_answer_is_an_error_with_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    def hangs(*words: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("survey", 40)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(PlanError, match=r"no answer within 40 s(.|\n)*ray status(.|\n)*RAY_AUTH_TOKEN"):
        joining.resources_at("auto")


def test_an_address_where_nobody_listens_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(PlanError, match=r"127\.0\.0\.1:9: this Ray cluster cannot be joined .*refused"):
        joining.resources_at("127.0.0.1:9")


def test_nodes_that_do_not_see_the_run_directory_or_the_model_are_named() -> None:
    nodes = [Node(name, 8, 0, 0, host=f"10.0.0.{number}") for number, name in enumerate("abcd")]
    folder, model = Path("/runs/mine"), "/models/qwen"
    well = dict.fromkeys("abcd", (True, True))
    assert complaints(nodes, well, folder, model) == ""
    said = complaints(nodes, well | {"b": (False, True), "c": (True, False), "d": (False, False)}, folder, model)
    assert "/runs/mine is not the same directory on nodes 10.0.0.1, 10.0.0.3, or" in said
    assert "There is no model at /models/qwen on nodes 10.0.0.2, 10.0.0.3:" in said
    silent = complaints(nodes, {name: (True, True) for name in "abc"}, folder, model)
    assert silent.startswith("node 10.0.0.3 started no process within 60 s.")


def test_a_process_on_another_machine_is_written_down_with_that_machine() -> None:
    elsewhere = {"engine-1": {"pid": 7, "host": "box2"}}
    assert pids_text({"learner-0": 5, "engine-0": 4}, elsewhere) == "engine-0 4\nengine-1 7@box2\nlearner-0 5\n"


def test_a_process_of_another_machine_is_not_killed_here_although_both_have_the_same_name(tmp_path: Path) -> None:
    pids: dict[str, int] = {}
    processes = Processes(Config(), None, RunFolder(tmp_path), "digest", tmp_path, pids)  # type: ignore[arg-type]
    processes.actors = {"engine-0": None, "engine-1": None}
    about = {"host": socket.gethostname(), "code": "digest", "pid": os.getpid()}
    processes.register("engine-0", about | {"started": start_time(os.getpid())})
    processes.register("engine-1", about | {"started": "1"})
    assert pids == {"engine-0": os.getpid()}
    assert f"engine-1 {os.getpid()}@{socket.gethostname()}\n" in (tmp_path / "pids.txt").read_text()
