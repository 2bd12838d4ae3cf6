"""Memory of one engine and of one rank, part by part, in bytes. Exact where it can be; constants are measured.

What a rank keeps for the backward pass follows what transformers' models save for autograd, operation by operation;
what it holds for the optimizer follows DeepSpeed's stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planner.architecture import Architecture

MIB, GIB = 1 << 20, 1 << 30

CPU_ENGINE_LIBRARIES = 690 * MIB
"""Resident memory of a process with vLLM imported and an engine up, without weights and KV cache (measured)."""
CPU_RANK_LIBRARIES = 500 * MIB
"""Resident memory of a process with DeepSpeed and transformers imported and the ranks joined (measured)."""
GPU_ENGINE_LIBRARIES = 3 * GIB
"""CUDA context, captured graphs and the allocator's slack of an engine (an assumption: vLLM logs 1 to 4 GiB)."""
GPU_RANK_LIBRARIES = 2 * GIB
"""CUDA context, NCCL buffers and the allocator's slack of a rank (an assumption)."""
GPU_ENGINE_ASLEEP = 2 * GIB
"""What a sleeping engine keeps of its GPU: context and graphs (an assumption)."""
LOGIT_CELLS = 1 << 24
"""Tokens x V whose logits exist at once in a rank (learner/logprobs.py)."""
LOGIT_COPIES = 4
"""float32 arrays of that size alive at the worst moment: logits, distribution, its exponential, their product."""
REDUCE_BUCKET = 500_000_000
"""Numbers that DeepSpeed reduces at once (its default)."""
LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at most (DeepSpeed's default)."""
ENGINE_BATCH_TOKENS = 16384
"""Tokens of one engine step at most (rollout/engine.py)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The parts of one process's memory."""

    parts: tuple[tuple[str, int], ...]
    """(what, bytes); all of them are there at the worst moment."""
    held: int
    """Bytes that stay between rounds."""

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True)
class RankShape:
    """What decides the memory of a rank."""

    ranks: int
    """Ranks that the state is split over."""
    zero_stage: int
    """0 nothing is split, 1 optimizer, 2 gradients, 3 weights."""
    size: int
    """Bytes of one weight: 4 or 2."""
    microbatch_tokens: int
    """Padded tokens of the largest microbatch."""
    checkpointing: bool
    """Activations are computed again in the backward pass."""
    reference: bool
    """A frozen copy of the model for the KL term."""
    on_gpu: bool
    """On a GPU, else on a CPU."""
    offload: bool = False
    """The optimizer state is in host memory."""
    adapter: int = 0
    """Parameters of a LoRA adapter, when only that is trained; the frozen model is then the reference."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What decides the memory of one device of an engine."""

    tensor_parallel: int
    """Devices of the engine."""
    size: int
    """Bytes of one weight and of one number in the KV cache."""
    responses: int
    """Responses generated at once."""
    kv_tokens: int
    """Tokens the KV cache has room for."""
    on_gpu: bool
    """On a GPU, else on a CPU."""


def rank_memory(model: Architecture, shape: RankShape) -> Memory:
    """Memory of one rank (of its GPU, or of its process on a CPU)."""
    state = state_bytes(model, shape)
    libraries = GPU_RANK_LIBRARIES if shape.on_gpu else CPU_RANK_LIBRARIES
    backward = activation_bytes(model, shape) + state["gradients"] + logit_bytes(model, shape)
    step = state["gradients"] + state["step"]
    fixed = [("libraries", libraries), ("weights", state["weights"])]
    if shape.reference and not shape.adapter:
        fixed.append(("reference", state["weights"]))
    fixed.append(("optimizer", state["optimizer"]))
    if backward >= step:
        worst = [
            ("gradients", state["gradients"]),
            ("activations", activation_bytes(model, shape)),
            ("logits", logit_bytes(model, shape)),
        ]
    else:
        worst = [("gradients", state["gradients"]), ("copies in the step", state["step"])]
    return Memory(tuple(fixed + worst), held=sum(size for _, size in fixed))


def state_bytes(model: Architecture, shape: RankShape) -> dict[str, int]:
    """Weights, gradients, optimizer and what a step needs beside them, of one rank.

    Stage 0 in float32 is torch's AdamW on the weights themselves: 4 + 4 + 8 bytes per parameter. Every other way keeps
    float32 master weights beside the model's (4 more) and casts the gradient for the step.
    """
    p, n, size = model.parameters + shape.adapter, shape.ranks, shape.size
    trained = shape.adapter or p
    share = -(-trained // n)
    own = share if shape.zero_stage else trained
    plain = shape.zero_stage == 0 and size == 4
    live = min(p, LIVE_PARAMETERS)
    weights = size * -(-p // n) + size * live if shape.zero_stage == 3 and n > 1 else size * p
    gradients = size * (share if shape.zero_stage >= 2 else trained)
    if shape.zero_stage >= 2 and n > 1:
        gradients += size * min(trained, REDUCE_BUCKET)
    optimizer = 0 if shape.offload else (8 if plain else 12) * own
    reduced = size * min(trained, REDUCE_BUCKET) if n > 1 and shape.zero_stage <= 1 else 0
    cast = 0 if plain or shape.offload else 4 * own
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "step": max(reduced, cast)}


def host_bytes(model: Architecture, shape: RankShape) -> int:
    """Host memory of one rank that off-loads its optimizer: master weights, moments and the gradient, float32."""
    trained = shape.adapter or model.parameters
    own = -(-trained // shape.ranks) if shape.zero_stage else trained
    return 16 * own if shape.offload else 0


def layer_activation_bytes(model: Architecture, size: int) -> int:
    """Bytes per token that one layer keeps for its backward pass.

    Two RMS norms (their input in float32, the normalised and the scaled vector, one float), queries, keys, values, the
    attention's output and log-sum-exp, four vectors of the gated MLP, and Qwen3's norms of queries and keys.
    """
    norms = 2 * (model.hidden * (4 + 2 * size) + 4)
    attention = size * (2 * model.q_size + 2 * model.kv_size) + 4 * model.heads
    head_norms = (model.q_size + model.kv_size) * (4 + size) + 4 * (model.heads + model.kv_heads)
    return norms + attention + size * 4 * model.intermediate + (head_norms if model.qk_norm else 0)


def activation_bytes(model: Architecture, shape: RankShape) -> int:
    """Bytes that a microbatch keeps for the backward pass, and the gradients on their way through one layer."""
    size = shape.size
    layer = layer_activation_bytes(model, size)
    kept = model.layers * size * model.hidden + layer if shape.checkpointing else model.layers * layer
    passing = size * (2 * model.intermediate + 2 * model.hidden)
    end = model.hidden * (4 + 2 * size) + 4 + 16  # the last norm, the rows picked for scoring, two int64 each
    return shape.microbatch_tokens * (kept + passing + end)


def logit_bytes(model: Architecture, shape: RankShape) -> int:
    """Bytes of logits at the worst moment of the loss: never more than LOGIT_CELLS of them exist at once."""
    cells = min(shape.microbatch_tokens * model.vocab, max(LOGIT_CELLS, model.vocab))
    return cells * (4 * LOGIT_COPIES + (shape.size if shape.size != 4 else 0))


def engine_memory(model: Architecture, shape: EngineShape) -> Memory:
    """Memory of one device of an engine."""
    weights = shape.size * -(-model.parameters // shape.tensor_parallel)
    if not shape.on_gpu and model.tied:
        weights += shape.size * model.embedding  # the output layer is packed apart from the embedding
    fixed = [
        ("libraries", GPU_ENGINE_LIBRARIES if shape.on_gpu else CPU_ENGINE_LIBRARIES),
        ("weights", weights),
        ("KV cache", shape.kv_tokens * kv_bytes_per_device(model, shape)),
    ]
    work = [("activations", engine_activation_bytes(model, shape)), ("logits", engine_logit_bytes(model, shape))]
    held = sum(size for _, size in fixed) + (sum(size for _, size in work) if shape.on_gpu else 0)
    return Memory(tuple(fixed + work), held=held)


def kv_bytes_per_device(model: Architecture, shape: EngineShape) -> int:
    """Bytes of KV cache per token on one device; key/value heads are split, and copied when there are too few."""
    heads = max(1, model.kv_heads // shape.tensor_parallel)
    return 2 * model.layers * heads * model.head_dim * shape.size


def engine_activation_bytes(model: Architecture, shape: EngineShape) -> int:
    """Bytes of the largest engine step: two vectors of the MLP and four of the residual stream per token."""
    tokens = ENGINE_BATCH_TOKENS if shape.on_gpu else shape.responses
    split = shape.tensor_parallel
    return tokens * shape.size * (3 * -(-model.intermediate // split) + 4 * model.hidden)


def engine_logit_bytes(model: Architecture, shape: EngineShape) -> int:
    """Bytes of sampling: logits of every response in float32, their log-probs and probabilities."""
    return shape.responses * model.vocab * 4 * 3


def kv_room(model: Architecture, shape: EngineShape, available: int) -> int:
    """Tokens of KV cache that fit a device of which the engine may take `available` bytes; 0 when nothing is left."""
    without = engine_memory(model, EngineShape(shape.tensor_parallel, shape.size, shape.responses, 0, shape.on_gpu))
    return max(0, (available - without.peak) // kv_bytes_per_device(model, shape))
