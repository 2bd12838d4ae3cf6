"""One rank on a GPU: packing, recomputed activations, log-probs in pieces, and optimizer state in host memory."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.batching import pack_rows, pad_rows
from learner.settings import Objective
from tests.pure.small_models import byte_level_bpe, save_model
from tests.system.learner_rank import fixed_batch

Figure = Callable[[str, float, str], None]
ROWS = np.array([5, 0, 17, 3, 40, 11])


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A rank with a model of 60 million parameters in bfloat16 under ZeRO 1."""
    from learner.device import environment
    from learner.engine import LearnerEngine, LearnerSettings

    os.environ.update(environment("cuda"))
    directory = save_model(
        tmp_path_factory.mktemp("model"), byte_level_bpe(), rows=32000, tied=True, architecture="qwen3",
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    settings = LearnerSettings(
        model=str(directory), rank=0, ranks=1, device="cuda", dtype="bfloat16", zero_stage=1, lr=1e-5, warmup_steps=0,
        weight_decay=0.0, grad_clip=1.0, microbatch_tokens=16384, objective=Objective(), score_temperature=1.0,
        old_logprobs="recompute", ref_refresh_steps=0, gradient_checkpointing=True, offload=False, sentinel_rows=2,
        mismatch_limit=1e9, collective_timeout=60.0, seed=0,
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = LearnerEngine(settings, "127.0.0.1", port)
    yield engine
    engine.close()


def on_gpu(laid_out: Any) -> dict[str, torch.Tensor]:
    names = ("input_ids", "positions", "targets", "position_ids")
    arrays = {name: getattr(laid_out, name) for name in names}
    return {name: torch.from_numpy(array).cuda() for name, array in arrays.items() if array is not None}


def test_packed_rows_score_as_padded_ones(rank: Any, figure: Figure) -> None:
    figure(f"attention is {rank.attention}, packed is", float(rank.packs), "(1 yes, 0 no)")
    batch = fixed_batch()
    with torch.no_grad():
        scores = [rank.score(on_gpu(layout(batch, ROWS)))[0].cpu() for layout in (pad_rows, pack_rows)]
    gap = float((scores[0] - scores[1]).abs().max())
    figure("packed and padded rows differ in bfloat16 by at most", gap, "")
    assert gap < 0.1


def test_logits_of_all_tokens_never_stand_in_memory_at_once(rank: Any, figure: Figure) -> None:
    tokens, vocabulary = 8192, 32000
    ids = torch.randint(5, 300, (8, 1024), device="cuda")
    positions = torch.arange(tokens - 1, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values, _ = rank.score({"input_ids": ids, "positions": positions, "targets": ids.reshape(-1)[1:]})
    rank.backward(values.sum() * 0.0)
    rank.drop_gradients()
    peak = torch.cuda.max_memory_allocated() - before
    figure("peak of 8192 tokens, forward and backward", peak / 2**30, "GiB")
    figure("their logits in float32 alone would be", tokens * vocabulary * 4 / 2**30, "GiB")
    assert peak < 2 * tokens * vocabulary * 4, "logits, log-softmax and their gradients would be three of them"


def test_a_round_of_learning_and_its_speed(rank: Any, figure: Figure) -> None:
    from learner.types import UpdateReport
    from learner.update import Update

    batch = long_batch()
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        *_, report = Update(rank, None, batch).run()
        seconds.append(time.monotonic() - began)
        assert isinstance(report, UpdateReport)
        assert not any(step.skipped for step in report.steps)
    figure("one rank, 60 M parameters, old log-probs included", len(batch.token_ids) / min(seconds), "tokens/s")


def test_optimizer_state_leaves_the_gpu_and_comes_back(rank: Any, figure: Figure) -> None:
    from learner.update import Update

    list(Update(rank, None, fixed_batch()).run())
    before = torch.cuda.memory_allocated()
    began = time.monotonic()
    rank.park()
    freed = before - torch.cuda.memory_allocated()
    figure("optimizer state in host memory frees", freed / 2**20, "MiB")
    figure("parking it takes", time.monotonic() - began, "s")
    parameters = sum(parameter.numel() for parameter in rank.policy.parameters())
    assert freed > 8 * parameters, "two moments in float32"
    rank.unpark()
    list(Update(rank, None, fixed_batch()).run())


def long_batch() -> Any:
    """64 responses of 300 to 1000 tokens in 2 minibatches."""
    small = fixed_batch()
    draw = np.random.default_rng(0)
    prompts, lengths = np.full(64, 20, dtype=np.int32), draw.integers(300, 1000, 64).astype(np.int32)
    return dataclasses.replace(
        small,
        token_ids=draw.integers(5, 300, int(prompts.sum() + lengths.sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=lengths,
        sampler_logprobs=np.full(int(lengths.sum()), -1.0, dtype=np.float32),
        advantages=draw.standard_normal(64),
        groups=(np.arange(64) // 8).astype(np.int32),
        minibatches=(np.arange(64) // 32).astype(np.int32),
        kl_coefs=np.zeros(64),
        counted=np.ones(64, dtype=bool),
    )


def test_the_directory_of_this_file_is_only_for_gpus() -> None:
    assert torch.cuda.is_available()
    assert Path(__file__).parent.name == "gpu"
