"""Operations of a round, counted by hand and by torch on small models."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.flops import generation_flops, scoring_flops
from cluster.planner.architecture import architecture_of

TINY = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 6,
    "num_key_value_heads": 1, "intermediate_size": 20, "vocab_size": 50,
}  # fmt: skip
LINEAR = 2 * 8 * (12 + 6 + 6) + 2 * 12 * 8 + 3 * 2 * 8 * 20  # q, k, v; o; gate, up, down of one layer
HEAD = 2 * 8 * 50
TINY_SHAPE = architecture_of(TINY, "here")


def test_three_tokens_by_hand() -> None:
    pairs = 1 + 2 + 3
    assert scoring_flops(TINY_SHAPE, [1], [2]) == 2 * (3 * LINEAR + 4 * 12 * pairs) + 2 * HEAD


def test_a_prompt_is_read_once_for_its_group_and_the_last_token_is_not_continued() -> None:
    read = 2 * (2 * LINEAR + 4 * 12 * (1 + 2))
    # responses of 3 and 1 tokens after 2: positions 3 and 4 of the first are computed, none of the second
    made = 2 * (2 * LINEAR + 4 * 12 * (3 + 4)) + 4 * HEAD
    assert generation_flops(TINY_SHAPE, [2], [3, 1], 2) == read + made


def test_no_responses_need_nothing() -> None:
    assert scoring_flops(TINY_SHAPE, [], []) == 0


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_torch_counts_the_same(kind: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in TINY.items() if key not in ("model_type", "head_dim")}
    config = AutoConfig.for_model(kind, **sizes | {"hidden_size": 16, "head_dim": 8, "max_position_embeddings": 64})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    shape = architecture_of(config.to_dict(), "here")
    length = 7
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, length), dtype=torch.long))
    # eager attention multiplies the masked half too
    masked = 4 * shape.layers * shape.q_size * (length * length - length * (length + 1) / 2)
    assert counter.get_total_flops() == pytest.approx(scoring_flops(shape, [0], [length]) + masked, rel=1e-3)


def test_six_operations_per_weight_and_token_for_a_step_of_a_real_model() -> None:
    qwen = {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    }  # fmt: skip
    weights = 7.07e9  # 7.6 billion without the input embedding, which is looked up and not multiplied
    step = 3 * scoring_flops(architecture_of(qwen, "here"), np.zeros(4), np.full(4, 256))
    assert step == pytest.approx(6 * weights * 4 * 256, rel=0.02)
