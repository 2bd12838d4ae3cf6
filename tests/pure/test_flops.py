"""Operations of a model, counted by hand and by torch on small ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.flops import forward_flops, generation_flops, model_shape, scoring_flops

TINY = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 6,
    "num_key_value_heads": 1, "intermediate_size": 20, "vocab_size": 50,
}  # fmt: skip
LINEAR = 2 * 8 * (12 + 6 + 6) + 2 * 12 * 8 + 3 * 2 * 8 * 20  # q, k, v; o; gate, up, down of one layer
HEAD = 2 * 8 * 50


def test_three_tokens_by_hand() -> None:
    shape = model_shape(TINY)
    assert shape is not None
    pairs = 1 + 2 + 3
    assert forward_flops(shape, [0], [3], 3) == 2 * (3 * LINEAR + 4 * 12 * pairs) + 3 * HEAD
    assert scoring_flops(shape, [1], [2]) == 2 * (3 * LINEAR + 4 * 12 * pairs) + 2 * HEAD


def test_a_prompt_is_read_once_for_its_group_and_the_last_token_is_not_continued() -> None:
    shape = model_shape(TINY)
    assert shape is not None
    read = 2 * (2 * LINEAR + 4 * 12 * (1 + 2))
    # responses of 3 and 1 tokens after 2: positions 3 and 4 of the first are computed, none of the second
    made = 2 * (2 * LINEAR + 4 * 12 * (3 + 4)) + 4 * HEAD
    assert generation_flops(shape, [2], [3, 1], 2) == read + made


def test_a_window_bounds_what_a_position_looks_back_on() -> None:
    shape = model_shape(TINY | {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]})
    assert shape is not None
    assert shape.windows == (2, 0)
    assert forward_flops(shape, [0], [4], 0) == 2 * 4 * LINEAR + 4 * 12 * ((1 + 2 + 2 + 2) + (1 + 2 + 3 + 4))
    switched_off = model_shape(TINY | {"sliding_window": 2, "use_sliding_window": False})
    assert switched_off is not None
    assert switched_off.windows == (0, 0)


def test_only_the_experts_that_a_token_goes_through_count() -> None:
    mixture = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 5, "mlp_only_layers": [0]}
    shape = model_shape(TINY | mixture)
    assert shape is not None
    assert shape.widths == (20, 20)
    assert shape.routers == (0, 16)
    assert shape.layer_flops == 2 * LINEAR + 2 * 8 * 16


@pytest.mark.parametrize(
    "config",
    [{}, {"hidden_size": 8}, TINY | {"kv_lora_rank": 4}, TINY | {"layer_types": ["linear_attention"] * 2}],
)
def test_what_is_not_known_is_not_guessed(config: dict[str, Any]) -> None:
    assert model_shape(config) is None


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_torch_counts_the_same(kind: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in TINY.items() if key not in ("model_type", "head_dim")}
    config = AutoConfig.for_model(kind, **sizes | {"hidden_size": 16, "head_dim": 8, "max_position_embeddings": 64})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    shape = model_shape(config.to_dict())
    assert shape is not None
    length = 7
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, length), dtype=torch.long))
    # eager attention multiplies the masked half too
    masked = 4 * 2 * shape.attention * (length * length - length * (length + 1) / 2)
    assert counter.get_total_flops() == pytest.approx(forward_flops(shape, [0], [length], length) + masked, rel=1e-3)


def test_six_operations_per_weight_and_token_for_a_step_of_a_real_model() -> None:
    qwen = {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "use_sliding_window": False,
    }  # fmt: skip
    shape = model_shape(qwen)
    assert shape is not None
    weights = 7.07e9  # 7.6 billion without the input embedding, which is looked up and not multiplied
    step = 3 * scoring_flops(shape, np.zeros(4), np.full(4, 256))
    assert step == pytest.approx(6 * weights * 4 * 256, rel=0.02)
