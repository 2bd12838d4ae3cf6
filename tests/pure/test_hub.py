"""A model named by its id on the hub, found in a cache that stands in for the hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.actors import _look_around
from cluster.errors import PlanError
from cluster.model_facts import read_model_facts
from cluster.run.cli import parse
from cluster.run.inputs import model_directory
from rollout.hub import on_this_machine
from rollout.tasks import DEMO_MODEL
from rollout.types import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo as the hub's cache would hold it, for a machine without a network; gives its directory."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    home = tmp_path / "models--somebody--demo"
    shutil.copytree(DEMO_MODEL, home / "snapshots" / COMMIT)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    return home / "snapshots" / COMMIT


def test_a_hub_id_becomes_a_directory_of_this_machine(snapshot: Path) -> None:
    assert on_this_machine("somebody/demo") == str(snapshot)


def test_a_directory_stays_what_it_is(snapshot: Path) -> None:
    assert on_this_machine(str(snapshot)) == str(snapshot)


def test_a_model_that_cannot_be_had_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"--model somebody/else: .* cannot be fetched(.|\n)*HF_TOKEN"):
        on_this_machine("somebody/else")


def test_a_model_without_safetensors_is_refused_before_any_process_looks_for_them(snapshot: Path) -> None:
    for file in snapshot.glob("*.safetensors"):
        file.rename(file.with_name("pytorch_model.bin"))
    with pytest.raises(UserError, match=r"somebody/demo: .* holds no \*\.safetensors"):
        on_this_machine("somebody/demo")


def test_a_network_that_fails_in_a_way_of_its_own_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class ProxyError(Exception):
        """Not an OSError, and without a text."""

    def fails(*_: object, **__: object) -> None:
        raise ProxyError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(UserError, match=r"cannot be fetched from the hub\. ProxyError"):
        on_this_machine("somebody/demo")


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B"])
def test_a_point_in_a_hub_id_is_no_suffix_of_a_file(model: str) -> None:
    assert read_model_facts(model).path == model


@pytest.mark.parametrize("path", ["models/model.safetensors", "./Qwen/Qwen3-8B", "a/b/c"])
def test_a_path_is_no_hub_id(path: str) -> None:
    with pytest.raises(PlanError, match="there is no such directory"):
        read_model_facts(path)


def test_a_node_looks_for_a_directory_and_fetches_a_hub_id_for_itself(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    assert _look_around(str(tmp_path / "mark"), "somebody/demo") == (True, True)
    assert _look_around(str(tmp_path / "mark"), str(DEMO_MODEL)) == (True, True)
    assert _look_around(str(tmp_path / "none"), str(tmp_path / "nothing")) == (False, False)


def test_nodes_of_a_cluster_that_was_joined_fetch_for_themselves(snapshot: Path) -> None:
    assert model_directory(parse(["--cluster.address", "box1:6379"]), "somebody/demo") == "somebody/demo"
    assert model_directory(parse([]), "somebody/demo") == str(snapshot)
