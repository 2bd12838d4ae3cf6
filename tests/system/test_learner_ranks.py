"""The same batch gives the same update for any number of ranks, any microbatch size and any ZeRO stage."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("learner_rank.py")


def train(out: Path, *how: str, ranks: int = 1, zero: int = 0, tokens: int = 4096) -> tuple[Any, list[Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(ranks), str(port), str(zero), str(tokens), str(out), *how]
    commands = [[sys.executable, str(SCRIPT), str(rank), *words] for rank in range(ranks)]
    processes = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for c in commands]
    for process in processes:
        text, _ = process.communicate(timeout=240)
        assert process.returncode == 0, text.decode(errors="replace")[-3000:]
    return torch.load(out, weights_only=True), json.loads(Path(f"{out}.json").read_text())


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    gap = sum(float((one[name] - other[name]).square().sum()) for name in one)
    size = sum(float(value.square().sum()) for value in one.values())
    return math.sqrt(gap / size)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    return train(tmp_path_factory.mktemp("one") / "weights")


@pytest.mark.system
@pytest.mark.parametrize(
    ("ranks", "zero", "tokens", "how"),
    # computed: the two groups without signal, which are left out otherwise, go through the model too.
    [(1, 0, 64, "computed"), (2, 0, 100, ""), (2, 1, 4096, ""), (2, 2, 64, ""), (2, 3, 100, "computed")],
)
def test_ranks_microbatches_zero_stages_and_work_without_signal_give_the_same_update(
    one_rank: tuple[Any, list[Any]], tmp_path: Path, ranks: int, zero: int, tokens: int, how: str
) -> None:
    weights, steps = one_rank
    split_weights, split_steps = train(tmp_path / "weights", how, ranks=ranks, zero=zero, tokens=tokens)
    assert distance(weights, split_weights) <= 1e-5
    for step, split in zip(steps, split_steps, strict=True):
        # The gradient of one step agrees in norm; later steps start from weights that differ by rounding.
        assert split["policy/grad_norm"] == pytest.approx(step["policy/grad_norm"], rel=1e-5)
        assert split["policy/loss"] == pytest.approx(step["policy/loss"], rel=1e-4, abs=1e-7)
        assert split["policy/tokens"] == step["policy/tokens"]


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks", "zero"),
    [(["packed", "checkpointing"], 1, 0), (["offload", "checkpointing"], 2, 2), (["packed", "offload"], 2, 3)],
)
def test_what_saves_memory_on_a_gpu_changes_no_result(
    one_rank: tuple[Any, list[Any]], tmp_path: Path, how: list[str], ranks: int, zero: int
) -> None:
    weights, steps = one_rank
    saving_weights, saving_steps = train(tmp_path / "weights", *how, ranks=ranks, zero=zero, tokens=100)
    assert distance(weights, saving_weights) <= 1e-5
    for step, saving in zip(steps, saving_steps, strict=True):
        assert saving["policy/grad_norm"] == pytest.approx(step["policy/grad_norm"], rel=1e-5)
        assert saving["policy/loss"] == pytest.approx(step["policy/loss"], rel=1e-4, abs=1e-7)


@pytest.mark.system
@pytest.mark.parametrize("zero", [0, 2])
def test_a_nan_gradient_on_one_rank_is_applied_by_nobody(tmp_path: Path, zero: int) -> None:
    weights, steps = train(tmp_path / "weights", "nan", ranks=2, zero=zero)
    assert [step["skipped"] for step in steps] == [False, True, False]
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


@pytest.mark.system
@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 2)])
def test_minibatches_handed_over_one_by_one_give_the_same_weights_bit_for_bit(
    tmp_path: Path, ranks: int, zero: int
) -> None:
    """Streamed and phased: the same groups, the same old log-probs (the sampler's), other moments."""
    whole, steps = train(tmp_path / "whole", "sampler", ranks=ranks, zero=zero, tokens=100)
    streamed, split = train(tmp_path / "streamed", "sampler", "streamed", ranks=ranks, zero=zero, tokens=100)
    assert [name for name in whole if not torch.equal(whole[name], streamed[name])] == []
    assert steps == split
    assert len(steps) == 3
