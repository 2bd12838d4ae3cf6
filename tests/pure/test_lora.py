"""LoRA without engines or ranks: what is trained, what is sent, what is exported, what the plan refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.adapter_plan import adapter_settings
from cluster.errors import PlanError
from cluster.run.cli import apply_settings
from cluster.run.config import Config
from learner.engine import load_model
from learner.lora import FOLDER, as_sent, insert_adapter, is_adapter, merged, public_name, without_adapter
from learner.weights import write_model
from rollout.engine import lora_capacity
from tests.pure.small_models import byte_level_bpe, save_model

RANK, ALPHA = 4, 12.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return save_model(folder, byte_level_bpe(), rows=300, tied=True, architecture="qwen3")


@pytest.fixture
def adapted(directory: Path) -> Any:
    """The model with an adapter that does something."""
    model = load_model(str(directory), "float32")
    insert_adapter(model, RANK, ALPHA)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.1)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


def test_only_the_adapter_is_trained_and_it_sits_on_every_linear_layer_but_the_head(adapted: Any) -> None:
    trained = {public_name(name) for name, p in adapted.named_parameters() if p.requires_grad}
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(is_adapter(name) for name in trained)


def test_names_without_the_adapter_are_those_of_the_checkpoint(directory: Path, adapted: Any) -> None:
    plain = dict(load_model(str(directory), "float32").named_parameters())
    shown = {public_name(name) for name, _ in adapted.named_parameters()}
    assert {name for name in shown if not is_adapter(name)} == set(plain)


def test_an_untrained_adapter_changes_nothing_and_is_the_same_whatever_the_seed(directory: Path) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(load_model(str(directory), "float32"))
        insert_adapter(models[-1], RANK, ALPHA)
        assert torch.rand(1).item() == _first_random(seed), "the random state is left as it was"
    assert torch.equal(logits(models[0]), logits(load_model(str(directory), "float32")))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def _first_random(seed: int) -> float:
    return float(torch.rand(1, generator=torch.Generator().manual_seed(seed)).item())


def test_switched_off_it_is_the_frozen_model_and_switched_on_again_it_still_trains(
    directory: Path, adapted: Any
) -> None:
    base = logits(load_model(str(directory), "float32"))
    with_adapter = logits(adapted)
    with without_adapter(adapted):
        assert torch.equal(logits(adapted), base)
    assert torch.equal(logits(adapted), with_adapter)
    assert not torch.allclose(with_adapter, base, atol=1e-3)
    assert {p.requires_grad for name, p in adapted.named_parameters() if is_adapter(name)} == {True}


def test_what_is_sent_computes_the_same_without_a_scaling(adapted: Any) -> None:
    sent = {public_name(n): as_sent(n, p.detach(), ALPHA / RANK) for n, p in adapted.named_parameters()}
    layer = "model.layers.0.mlp.up_proj"
    x = torch.randn(5, sent[f"{layer}.weight"].shape[1])
    by_engine = (
        x @ sent[f"{layer}.weight"].T + (x @ sent[f"{layer}.lora_A.weight"].T) @ sent[f"{layer}.lora_B.weight"].T
    )
    assert torch.allclose(by_engine, adapted.model.layers[0].mlp.up_proj(x), atol=1e-5)


def test_the_merged_export_computes_the_same_and_the_adapter_loads_into_the_base(
    directory: Path, adapted: Any, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write_model(adapted, dict(adapted.named_parameters()), RANK, ALPHA, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {name for name, _ in whole.named_parameters()} == {
        name for name, _ in load_model(str(directory), "float32").named_parameters()
    }
    assert torch.allclose(logits(whole), logits(adapted), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    again = PeftModel.from_pretrained(base, tmp_path / FOLDER)
    assert torch.allclose(logits(again), logits(adapted), atol=1e-6)


def test_merging_adds_the_product_and_nothing_else(adapted: Any) -> None:
    named = dict(adapted.named_parameters())
    whole = merged(named.items(), ALPHA / RANK)
    prefix = "model.layers.0.self_attn.q_proj"
    base = named[f"{prefix}.base_layer.weight"]
    product = named[f"{prefix}.lora_B.default.weight"] @ named[f"{prefix}.lora_A.default.weight"]
    assert torch.allclose(whole[f"{prefix}.weight"], base + 3.0 * product, atol=1e-6)
    assert whole["model.norm.weight"] is named["model.norm.weight"]


def config(**settings: Any) -> Config:
    return apply_settings(Config(), {name.replace("__", "."): value for name, value in settings.items()})


def test_the_plan_gives_an_adapter_twice_its_rank_as_alpha() -> None:
    notes: list[str] = []
    assert adapter_settings(config(), notes) == (0, 0.0)
    assert not notes
    assert adapter_settings(config(learner__lora_rank=16), notes) == (16, 32.0)
    assert "learning rate" in notes[0]
    assert adapter_settings(config(learner__lora_rank=16, learner__lora_alpha=8.0), []) == (16, 8.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"learner__lora_rank": -1}, "must be 1 to 512"),
        ({"learner__lora_rank": 513}, "must be 1 to 512"),
        ({"learner__lora_alpha": 8.0}, "no effect"),
        ({"learner__lora_rank": 8, "learner__lora_alpha": 0.0}, "above 0"),
        ({"learner__lora_rank": 8, "kl__kind": "k3_weighted", "kl__ref_refresh_steps": 400}, "cannot follow"),
    ],
)
def test_the_plan_refuses_what_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        adapter_settings(config(**settings), [])


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (65, 128), (512, 512)])
def test_the_engine_makes_room_for_the_rank(rank: int, room: int) -> None:
    assert lora_capacity(rank) == room
