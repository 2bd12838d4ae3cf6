"""One rank's files of a checkpoint: loading them runs nothing, and what was changed is refused."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.checkpoint import CheckpointRefused, check, rng_state, scan, set_rng_state, sha256_of
from learner.types import SavedFile
from tests.pure.checkpoint_makers import flip, swap_for_link, truncate


class Malicious:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def test_code_in_a_shard_is_refused_before_it_runs(tmp_path: Path) -> None:
    canary, shard = tmp_path / "canary", tmp_path / "shard.pt"
    torch.save({"module": {"w": torch.ones(3)}, "extra": Malicious(canary)}, shard)
    torch.load(shard, weights_only=False)
    assert canary.exists(), "the attack itself works"
    canary.unlink()
    with pytest.raises(CheckpointRefused, match="more than tensors"):
        scan(shard, [])
    listed = SavedFile("shard.pt", 0, shard.stat().st_size, sha256_of(shard))
    with pytest.raises(CheckpointRefused, match="more than tensors"):
        check([listed], tmp_path, [])
    assert not canary.exists()


def test_a_bare_pickle_is_refused_too(tmp_path: Path) -> None:
    canary, shard = tmp_path / "canary", tmp_path / "shard.pt"
    shard.write_bytes(pickle.dumps(Malicious(canary)))
    with pytest.raises(CheckpointRefused, match="more than tensors"):
        scan(shard, [])
    assert not canary.exists()


def test_plain_tensors_pass(tmp_path: Path) -> None:
    shard = tmp_path / "shard.pt"
    torch.save({"w": torch.ones(3), "step": 4, "shape": torch.Size([3])}, shard)
    check([SavedFile("shard.pt", 0, shard.stat().st_size, sha256_of(shard))], tmp_path, [])


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, swap_for_link])
def test_a_shard_that_changed_is_refused_by_its_rank(damage: Callable[[Path], None], tmp_path: Path) -> None:
    shard = tmp_path / "shard.pt"
    torch.save({"w": torch.arange(10000.0)}, shard)
    listed = SavedFile("shard.pt", 0, shard.stat().st_size, sha256_of(shard))
    damage(shard)
    with pytest.raises(CheckpointRefused, match=r"shard\.pt"):
        check([listed], tmp_path, [])


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = tmp_path / "shard.pt"
    torch.save({"w": torch.ones(3)}, shard)
    monkeypatch.setattr(os, "geteuid", lambda: shard.stat().st_uid + 1)
    with pytest.raises(CheckpointRefused, match="belongs to user"):
        check([SavedFile("shard.pt", 0, shard.stat().st_size, sha256_of(shard))], tmp_path, [])


def test_random_states_come_back() -> None:
    random.gauss(0, 1)
    np.random.normal()
    saved = rng_state("cpu")
    first = (torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), random.random())
    set_rng_state(saved)
    assert (torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), random.random()) == first
