"""The shape of a model as its config.json gives it, and what follows from it exactly: parameters, bytes, FLOPs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import PlanError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder with grouped-query attention and a gated MLP (Llama, Mistral, Qwen2, Qwen3)."""

    family: str
    """model_type of the config."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the MLP."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head."""
    vocab: int
    """V."""
    tied: bool
    """The output layer is the embedding."""
    qk_norm: bool
    """Queries and keys are normalised per head (Qwen3)."""
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    output_bias: bool
    """Bias on the attention's output projection."""
    mlp_bias: bool
    """Biases on the three MLP projections."""

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrix(self) -> int:
        """Parameters of one layer's matrices, each used once per token."""
        attention = self.hidden * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        biases = (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.hidden * self.output_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        return self.layer_matrix + 2 * self.hidden + 2 * self.head_dim * self.qk_norm + biases

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; an untied output layer has as many again."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, a tied output layer counted once."""
        return self.layers * self.layer_parameters + self.hidden + self.embedding * (1 if self.tied else 2)

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA adapter on every linear layer but the output layer."""
        attention = 2 * (self.hidden + self.q_size) + 2 * (self.hidden + self.kv_size)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    def kv_bytes(self, size: int) -> int:
        """Bytes of KV cache per token, `size` bytes per number."""
        return 2 * self.layers * self.kv_size * size

    def forward_flops(self, tokens: int, context: float, scored: int | None = None) -> float:
        """FLOPs of a forward pass over `tokens` that attend to `context` tokens each on average.

        2 per parameter of a matrix and token, 4 per attended token and query channel (scores, then values); the output
        layer is applied to `scored` of the tokens (default: all).
        """
        matrices = 2.0 * self.layers * self.layer_matrix * tokens
        attention = 4.0 * self.layers * self.q_size * context * tokens
        return matrices + attention + 2.0 * self.embedding * (tokens if scored is None else scored)


def read_architecture(directory: str) -> Architecture:
    """The architecture of a model directory, or of a hub id that was downloaded before; PlanError otherwise."""
    path = _config_file(directory)
    if path is None:
        raise PlanError(
            f"--model {directory}: its config.json is not on this machine, so memory and time cannot be worked out.\n"
            f"  Download it (hf download {directory} config.json) or give a directory that has it."
        )
    return architecture_of(json.loads(path.read_text()), str(path))


def architecture_of(config: dict[str, Any], source: str) -> Architecture:
    """The architecture that a config.json describes; PlanError for one whose arithmetic is not known here."""
    family = str(config.get("model_type", ""))
    experts = [key for key in EXPERTS if config.get(key)]
    if experts or "moe" in family:
        raise PlanError(
            f"{source}: a mixture of experts ({', '.join(experts) or family}), which is not planned: which experts a "
            f"token meets decides its memory and time.\n  Plan a dense model ({', '.join(FAMILIES)}) instead."
        )
    if family not in FAMILIES:
        raise PlanError(
            f"{source}: model_type {family or 'missing'} is not one whose arithmetic is known "
            f"({', '.join(FAMILIES)}).\n  Plan a model of one of those families with the same layers and widths."
        )
    try:
        return _dense(config, family)
    except KeyError as missing:
        raise PlanError(f"{source}: {missing.args[0]} is missing; give a complete config.json.") from None


def _dense(config: dict[str, Any], family: str) -> Architecture:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        family=family,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _config_file(directory: str) -> Path | None:
    here = Path(directory) / "config.json"
    if here.is_file():
        return here
    import os

    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface"), "hub"
    )
    snapshots = Path(cache) / f"models--{directory.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return found[-1] if found else None
