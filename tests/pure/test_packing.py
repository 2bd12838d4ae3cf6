"""Rows laid end to end give what rows padded below one another give: log-probs, entropies and gradients, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner import logprobs
from learner.batching import LaidOut, pack_rows, pad_rows, plan_microbatches
from learner.engine import can_be_packed, load_model
from learner.logprobs import PolicyModel
from tests.pure.small_models import byte_level_bpe, save_model
from tests.system.learner_rank import fixed_batch


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_level_bpe()
    return {
        kind: save_model(folder / kind, tokenizer, rows=300, tied=True, architecture=kind)
        for kind in ("llama", "qwen3")
    }


def policy(directory: Path, *, checkpointing: bool = False) -> PolicyModel:
    hf = load_model(str(directory), "float64")
    if checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(hf)


def scored(model: PolicyModel, laid_out: LaidOut) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Log-probs and entropies in the order of the batch, and gradients of a loss that weighs every token otherwise."""
    packed = {} if laid_out.position_ids is None else {"position_ids": torch.from_numpy(laid_out.position_ids)}
    arrays = [torch.from_numpy(a) for a in (laid_out.input_ids, laid_out.positions, laid_out.targets)]
    values, entropy = model(*arrays, 1.3, **packed)
    weights = torch.from_numpy(np.sin(laid_out.flat.astype(float)))
    grads = torch.autograd.grad((values * weights).sum(), list(model.parameters()))
    order = torch.from_numpy(np.argsort(laid_out.flat))
    return values.detach()[order], entropy[order], list(grads)


ROWS = np.array([5, 0, 17, 3, 40, 11])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_packed_rows_score_and_learn_as_padded_ones(models: dict[str, Path], kind: str) -> None:
    model, batch = policy(models[kind]), fixed_batch()
    padded, packed = scored(model, pad_rows(batch, ROWS)), scored(model, pack_rows(batch, ROWS))
    assert padded[0].dtype == torch.float64
    assert torch.allclose(packed[0], padded[0], rtol=0, atol=1e-12)
    assert torch.allclose(packed[1], padded[1], rtol=0, atol=1e-12)
    for one, other in zip(packed[2], padded[2], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


def test_without_position_ids_packed_rows_would_see_one_another(models: dict[str, Path]) -> None:
    """The check above can fail: this is the mistake it looks for."""
    model, batch = policy(models["qwen3"]), fixed_batch()
    packed = pack_rows(batch, ROWS)
    arrays = [torch.from_numpy(a) for a in (packed.input_ids, packed.positions, packed.targets)]
    with torch.no_grad():
        mixed = model(*arrays, 1.3)[0][torch.from_numpy(np.argsort(packed.flat))]
    assert not torch.allclose(mixed, scored(model, pad_rows(batch, ROWS))[0], atol=1e-3)


def test_recomputed_activations_and_small_pieces_of_the_vocabulary_change_nothing(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = fixed_batch()
    whole = scored(policy(models["qwen3"]), pack_rows(batch, ROWS))
    monkeypatch.setattr(logprobs, "CHUNK_CELLS", 7 * 300)
    pieces = scored(policy(models["qwen3"], checkpointing=True), pack_rows(batch, ROWS))
    assert torch.allclose(pieces[0], whole[0], rtol=0, atol=1e-12)
    for one, other in zip(pieces[2], whole[2], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


def test_logits_of_all_tokens_never_stand_in_memory_at_once(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(logprobs, "CHUNK_CELLS", 7 * 300)
    model, laid_out = policy(models["qwen3"]), pack_rows(fixed_batch(), ROWS)
    model.hf.get_output_embeddings().register_forward_hook(lambda *args: seen.append(args[2].shape[0]))
    scored(model, laid_out)
    assert len(laid_out.targets) > 40
    assert max(seen) == 7, "neither forward nor backward takes more than a piece"


def test_a_packed_row_holds_the_tokens_of_its_rows_and_no_padding() -> None:
    batch = fixed_batch()
    packed, lengths = pack_rows(batch, ROWS), (batch.prompt_lengths + batch.response_lengths)[ROWS]
    assert packed.input_ids.shape == (1, lengths.sum())
    assert packed.position_ids is not None
    assert (packed.position_ids[0] == np.concatenate([np.arange(n) for n in lengths])).all()
    padded = pad_rows(batch, ROWS)
    assert (packed.targets == padded.targets).all()
    assert (packed.flat == padded.flat).all()
    assert (packed.response_mask == padded.response_mask).all()


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 3)])
def test_packed_microbatches_keep_the_budget_and_need_fewer_passes(rank: int, ranks: int) -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 64)
    rows = np.arange(64)
    packed = plan_microbatches(rows, lengths, rank, ranks, 128, packed=True)
    padded = plan_microbatches(rows, lengths, rank, ranks, 128)
    assert sorted(np.concatenate(packed)) == sorted(np.concatenate(padded))
    assert all(lengths[each].sum() <= 128 for each in packed)
    assert len(packed) < len(padded)
    long = plan_microbatches(np.arange(3), np.array([300, 4, 4]), 0, 1, 128, packed=True)
    assert [list(each) for each in long] == [[0], [1, 2]], "a row above the budget goes alone"


def test_recurrent_layers_are_not_packed() -> None:
    class Config:
        def __init__(self, kinds: list[str] | None) -> None:
            self.layer_types = kinds

    class Model:
        def __init__(self, kinds: list[str] | None, stateful: bool = False) -> None:
            self.config, self._is_stateful = Config(kinds), stateful

    cases: list[tuple[Any, bool]] = [
        (Model(None), True),
        (Model(["full_attention", "sliding_attention"]), True),
        (Model(["full_attention", "linear_attention"]), False),
        (Model(None, stateful=True), False),
    ]
    assert [can_be_packed(model) for model, _ in cases] == [wanted for _, wanted in cases]
