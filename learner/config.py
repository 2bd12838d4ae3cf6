"""What can be set on the learner side. The docstring under a field is its `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossName = str
RatioLevel = Literal["token", "sequence_sum", "sequence_mean"]
AdvantageKind = Literal["group", "no_std", "batch_std", "population_std", "gdpo", "gdpo_group"]
Aggregate = Literal["sequence_sum", "sequence_mean", "token_mean", "constant"]
KLKind = Literal["none", "k1", "k1_book", "k2", "k3", "k3_weighted", "book_weighted"]
CorrectionKind = Literal["none", "tis_token", "tis_sequence", "mask_token", "mask_sequence"]


@dataclass(frozen=True)
class LearnerConfig:
    """Model, optimizer and objective."""

    ranks: int | None = None
    """Learner processes (default: one per core up to 2 on a CPU, else as the placement gives)."""
    lr: float | None = None
    """Learning rate of AdamW (default: what the model directory recommends, else 1e-6)."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: what is split over the ranks (0 nothing, 1 optimizer, 2 gradients, 3 weights)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the learner (default: float32 on a CPU, bfloat16 on a GPU)."""
    microbatch_tokens: int | None = None
    """Tokens, padding included, that one rank puts through the model at once; changes memory and speed, no result
    (default: 4096 on a CPU, where they stay in its cache, 16384 on a GPU)."""
    loss: LossName = "ppo"
    """Policy loss: reinforce, ppo, book, cispo, or a path to your own file."""
    ratio_level: RatioLevel = "token"
    """What a ratio belongs to: a token, a response (sum of its log-probs), or a response (mean, GSPO)."""
    clip_low: float = 0.2
    """Ratios below 1 - this are clipped."""
    clip_high: float = 0.28
    """Ratios above 1 + this are clipped."""
    dual_clip: float | None = None
    """Bound c of the loss for negative advantages (-c * advantage); at least 1 + clip-high."""
    cispo_cap: float = 5.0
    """Absolute cap of the CISPO weight."""
    advantage: AdvantageKind = "group"
    """How rewards become advantages."""
    aggregate: Aggregate | None = None
    """How token losses become one number per step (default: token_mean; sequence_mean beside a sequence ratio)."""
    constant_length: int | None = None
    """Divisor L of the constant aggregate (default: the longest response allowed)."""
    old_logprobs: Literal["recompute", "sampler"] | None = None
    """Where the ratio is anchored: the learner's own log-probs at the start of the round, or the engine's (default:
    recompute; sampler under the streamed schedule)."""
    inner_updates: int = 1
    """Sets of responses per round, each from the same frozen old policy, one update each (the book's inner loop)."""
    grad_clip: float = 1.0
    """Largest gradient norm (0: no clipping)."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises to its value."""
    lora_rank: int = 0
    """Train an adapter of this rank on every linear layer instead of all weights (LoRA; 0: all weights)."""
    lora_alpha: float | None = None
    """The adapter's output is multiplied by alpha / rank (default: twice the rank)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    offload: bool = False
    """Keep the optimizer state in host memory (GPU)."""


@dataclass(frozen=True)
class KLConfig:
    """Distance to a frozen reference, as a term of the loss."""

    kind: KLKind = "none"
    """Estimator; none keeps no reference model in memory."""
    coef: float | None = None
    """Weight of the term (default: 0.001 when kind is not none)."""
    ref_refresh_steps: int = 0
    """Replace the reference by the current policy every N optimizer steps (R1: 400; 0: never)."""
    length_normalise: bool = False
    """Divide each response's summed difference by its length (book remedy 1; for k1_book and book_weighted)."""
    domains: str = ""
    """Coefficient by domain, as name=value,name=value (others use --kl.coef)."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Importance correction for the difference between engine and learner."""

    kind: CorrectionKind | None = None
    """Truncate (tis) or mask the weight old/sampler, by token or by sequence (default: none; under the async schedule
    tis_token, or tis_sequence beside a sequence ratio)."""
    cap: float = 2.0
    """Largest weight."""
    floor: float = 0.0
    """Smallest weight that is not masked."""
    geometric_mean: bool = False
    """The weight of a response is the geometric mean over its tokens instead of their product."""
    off_policy_delta: float | None = None
    """Leave out responses with negative advantage whose mean log(anchor/new) exceeds this (DeepSeek-V3.2)."""
    off_policy_anchor: Literal["sampler", "old"] = "sampler"
    """Which policy that is measured from."""
