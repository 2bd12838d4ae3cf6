"""How many floating-point operations a model needs, from its Hugging Face configuration. Pure arithmetic.

Only what the model itself needs counts (matrix products, forward; the backward pass is twice that): not what is
computed again for memory, not the optimizer. A multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_ATTENDING = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that the operations of a decoder follow from."""

    hidden: int
    """Width of the residual stream."""
    attention: int
    """Heads times head size."""
    kv: int
    """Key-value heads times head size."""
    widths: tuple[int, ...]
    """(layers,) width of the feed-forward part that one token goes through, experts added up."""
    gated: bool
    """The feed-forward part has a gate: three matrices instead of two."""
    routers: tuple[int, ...]
    """(layers,) experts that a router chooses from; 0 without."""
    windows: tuple[int, ...]
    """(layers,) tokens a position looks back on; 0: all."""
    vocabulary: int
    """V."""

    @property
    def layer_flops(self) -> float:
        """Operations per token of all layers, attention over the context left out."""
        projections = 2 * self.hidden * (2 * self.attention + 2 * self.kv)
        feed = 2 * self.hidden * (3 if self.gated else 2)
        return float(
            sum(
                projections + feed * width + 2 * self.hidden * router
                for width, router in zip(self.widths, self.routers, strict=True)
            )
        )


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Shape of a decoder from its config.json; None for a kind of model whose operations this does not know."""
    config = config.get("text_config") or config
    try:
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
        dense = int(config.get("intermediate_size") or 4 * hidden)
    except (KeyError, TypeError, ValueError):
        return None
    named = config.get("layer_types") or []
    kinds = named or ["full_attention"] * layers
    if config.get("kv_lora_rank") or set(kinds) - _ATTENDING or len(kinds) != layers:
        return None  # latent or linear attention: other products than these
    size = int(config.get("head_dim") or hidden // heads)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0)
    sparse = [bool(experts) and not _is_dense(config, layer) for layer in range(layers)]
    width = int(config.get("moe_intermediate_size") or dense) * int(config.get("num_experts_per_tok") or 1)
    width += int(config.get("shared_expert_intermediate_size") or 0)
    width += int(config.get("n_shared_experts") or 0) * int(config.get("moe_intermediate_size") or 0)
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    return ModelShape(
        hidden=hidden,
        attention=heads * size,
        kv=int(config.get("num_key_value_heads") or heads) * size,
        widths=tuple(width if each else dense for each in sparse),
        gated=str(config.get("model_type")) not in ("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "falcon", "phi"),
        routers=tuple(experts if each else 0 for each in sparse),
        # without a list of kinds, the window is that of every layer
        windows=tuple(window if kind == "sliding_attention" or not named else 0 for kind in kinds),
        vocabulary=vocabulary,
    )


def forward_flops(shape: ModelShape, begins: npt.ArrayLike, ends: npt.ArrayLike, scored: float) -> float:
    """One forward pass over positions begins..ends of sequences (a decode continues at `begins`), causal.

    `begins`, `ends` (n,): how many tokens stand before the first position, and before the one after the last;
    `scored`: positions whose logits are computed.
    """
    first, last = np.asarray(begins, dtype=np.float64), np.asarray(ends, dtype=np.float64)
    total = shape.layer_flops * float((last - first).sum()) + 2.0 * shape.hidden * shape.vocabulary * scored
    for window in sorted(set(shape.windows)):
        pairs = float((_pairs(last, window) - _pairs(first, window)).sum())
        total += shape.windows.count(window) * 4.0 * shape.attention * pairs
    return total


def generation_flops(shape: ModelShape, prompts: npt.ArrayLike, responses: npt.ArrayLike, group_size: int) -> float:
    """Answering: `prompts` (P,) tokens, each read once; `responses` (P x G,) tokens, group after group.

    The last prompt token's logits give the first token of every response, a response's last token is not continued.
    """
    lengths = np.asarray(prompts, dtype=np.float64)
    made = np.asarray(responses, dtype=np.float64)
    before = np.repeat(lengths, group_size)
    read = forward_flops(shape, np.zeros_like(lengths), lengths, 0.0)
    return read + forward_flops(shape, before, before + made - 1, float(made.sum()))


def scoring_flops(shape: ModelShape, prompts: npt.ArrayLike, responses: npt.ArrayLike) -> float:
    """One forward pass of the learner over responses, each behind its prompt: (B,) tokens of either."""
    lengths, made = np.asarray(prompts, dtype=np.float64), np.asarray(responses, dtype=np.float64)
    return forward_flops(shape, np.zeros_like(lengths), lengths + made, float(made.sum()))


def _pairs(length: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Query-key pairs of the first `length` positions, each position with itself and those before it."""
    if not window:
        return length * (length + 1) / 2
    inside = np.minimum(length, window)
    return np.asarray(inside * (inside + 1) / 2 + (length - inside) * window)


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    every = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    return (
        layer < int(config.get("first_k_dense_replace") or 0)
        or layer in (config.get("mlp_only_layers") or [])
        or (layer + 1) % every != 0
    )
