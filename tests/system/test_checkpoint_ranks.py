"""Ranks that save and load: exact for every ZeRO stage, a full disk is a vote, code in a shard is never run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.checkpoint import read_weights, tensors_sha256
from learner.engine import load_model
from learner.lora import insert_adapter, is_adapter
from learner.types import SavedFile
from tests.system.learner_rank import DEMO

SCRIPT = Path(__file__).with_name("checkpoint_rank.py")
SOME = [(1, "float32", 2, 0), (3, "bfloat16", 2, 0), (0, "float32", 1, 8), (3, "bfloat16", 2, 8)]
ALL = [
    (zero, dtype, ranks, lora)
    for zero in range(4)
    for dtype in ("float32", "bfloat16")
    for ranks in (1, 2)
    for lora in (0, 8)
]
CASES = [pytest.param(*case, marks=[] if case in SOME else pytest.mark.slow) for case in ALL]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(ranks: int, zero: int, dtype: str, folder: Path, mode: str, lora: int = 0) -> list[dict[str, Any]]:
    port = str(free_port())
    words = [str(ranks), port, str(zero), dtype, str(folder), mode, str(lora)]
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    said = []
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        said.append(json.loads(output.strip().splitlines()[-1]))
    return said


def listed(folder: Path, ranks: int) -> list[SavedFile]:
    return [
        SavedFile(**file) for rank in range(ranks) for file in json.loads((folder / f"files-{rank}.json").read_text())
    ]


Whole = Callable[[int, str, int, int], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """(folder with a checkpoint half way, what the ranks said at the end); made once for each case."""

    @cache
    def make(zero: int, dtype: str, ranks: int, lora: int) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("ranks") / "checkpoint"
        folder.mkdir()
        return folder, run_ranks(ranks, zero, dtype, folder, "whole", lora)

    return make


@pytest.mark.parametrize(("zero", "dtype", "ranks", "lora"), CASES)
def test_training_goes_on_after_a_restore_as_if_it_had_not_stopped(
    zero: int, dtype: str, ranks: int, lora: int, whole_run: Whole
) -> None:
    folder, made = whole_run(zero, dtype, ranks, lora)
    whole = [dict(said) for said in made]
    resumed = run_ranks(ranks, zero, dtype, folder, "resumed", lora)
    saved = [said.pop("vote") for said in whole]
    loaded = [said.pop("loaded") for said in resumed]
    assert resumed == whole
    assert whole[0]["steps"] == 12
    assert [vote["error"] for vote in saved] == [""] * ranks
    assert loaded[0] == saved[0]["weights"] != whole[0]["weights"]
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds == {".pt", ".json"} | (set() if lora else {".safetensors"}), "with LoRA there is no second model"

    model = load_model(str(DEMO), dtype)
    if lora:
        insert_adapter(model, lora, 2.0 * lora)
    found = read_weights(folder, listed(folder.parent, ranks), zero)
    assert not lora or all(is_adapter(name) for name in found), "the frozen weights are those of the model directory"
    model.load_state_dict(found, strict=not lora)
    assert tensors_sha256(model.named_parameters()) == saved[0]["weights"], "the export reads what the ranks held"


def test_a_full_disk_on_one_rank_is_a_vote_and_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    said = run_ranks(2, 2, "float32", folder, "full")
    assert said[0]["vote"]["error"] == ""
    assert "could not be written" in said[1]["vote"]["error"]
    assert [each["steps"] for each in said] == [6, 6]


def test_code_in_the_shard_of_one_rank_is_refused_by_all_of_them(tmp_path: Path, whole_run: Whole) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'canary'}",)

    shutil.copytree(whole_run(1, "float32", 2, 0)[0].parent, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoint"
    shard = folder / "shards" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(shard, weights_only=False)
    torch.save(state | {"extra": Malicious()}, shard)
    # Whoever can write the shard can write the manifest too: the hash agrees.
    entries = json.loads((tmp_path / "files-1.json").read_text())
    for entry in entries:
        if entry["name"].endswith(shard.name):
            entry["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
            entry["size"] = shard.stat().st_size
    (tmp_path / "files-1.json").write_text(json.dumps(entries))
    said = run_ranks(2, 1, "float32", folder, "refused")
    assert "another rank refused" in said[0]["refused"]
    assert "more than tensors" in said[1]["refused"]
    assert not (tmp_path / "canary").exists()
