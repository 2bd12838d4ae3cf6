"""What can be set on the rollout side. The docstring under a field is its `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RolloutConfig:
    """Engines and sampling."""

    engines: int | None = None
    """Number of vLLM engines (default: one per core up to 2 on a CPU, else as the placement gives)."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are scored at the same temperature."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 only with --rollout.allow-unscored-sampling."""
    top_k: int = 0
    """Sample among the k most likely tokens only (0: all); above 0 only with --rollout.allow-unscored-sampling."""
    max_new_tokens: int | None = None
    """Longest response in tokens, end token included (default: what the model directory recommends, else 1024)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the engines (default: float32 on a CPU, bfloat16 on a GPU)."""
    tensor_parallel: int = 1
    """Devices one engine is spread over."""
    max_num_seqs: int = 1024
    """Responses one engine generates at once."""
    gpu_memory: float = 0.85
    """Share of a GPU's memory an engine may take (separate placement; 0.5 is used when colocated)."""
    kv_cache_gib: float = 1.0
    """Memory for the KV cache of one engine on a CPU, GiB."""
    allow_unscored_sampling: bool = False
    """Accept sampling that the learner cannot score exactly (top_p < 1, top_k > 0, or scoring at temperature 1)."""
    score_at_one: bool = False
    """Score log-probs at temperature 1 whatever the sampling temperature was (the book's way; unsound on purpose)."""


@dataclass(frozen=True)
class RewardConfig:
    """Reward parts and their weights."""

    format_weight: float = 0.1
    """Weight of the format reward beside correctness (weight 1)."""
    conditional_format: bool = False
    """Pay the format reward only where the answer is right."""
    one_think_pair: bool = False
    """Format asks for exactly one <think>...</think> pair instead of the first opening before the first closing."""
    overlong_buffer: int = 0
    """Soft punishment over the last N tokens before the length limit (DAPO; 0: off)."""
    custom_weight: float = 1.0
    """Weight of each part of your own reward (--reward)."""
    deadline: float = 5.0
    """Seconds one answer may take to grade; then it is wrong."""
    memory_mb: int = 1024
    """Memory one grading process may take, MiB; beyond it the answer is wrong."""


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from and how they are read."""

    prompt_key: str = "prompt"
    """Column with the question (text, or a chat as a list of messages)."""
    answer_key: str = "answer"
    """Column with the answer; dots go into nested columns (reward_model.ground_truth)."""
    domain_key: str = "domain"
    """Column with the domain of a row, if there is one."""
    mix: str = ""
    """Weights of the domains, as name=weight,name=weight (default: as they come)."""
    chat_template: bool | None = None
    """Wrap prompts in the tokenizer's chat template (default: when it has one)."""
    system_prompt: str = ""
    """System message put before every prompt."""
    max_prompt_tokens: int = 1024
    """Longest prompt; longer rows are problems that are reported before anything starts."""
    shuffle: bool = True
    """Walk through the rows in an order drawn from the seed, anew in each epoch."""
    skip_bad_rows: bool = False
    """Leave out rows with problems, and say how many, instead of stopping."""


@dataclass(frozen=True)
class FilterConfig:
    """Which groups and responses are left out of training (DAPO)."""

    dynamic_sampling: bool = False
    """Replace groups without reward spread by fresh ones until the round is full."""
    max_refills: int = 8
    """How often a round is refilled before the run stops and says why."""
    overlong: bool = False
    """Take responses that were cut by the length limit out of the loss."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    every: int | None = None
    """Rounds between evaluations, besides the first before any update and the last after the last round (0: none;
    default: 2, or as many more as keep evaluations from taking more responses than training)."""
    size: int = 512
    """Held-out prompts used."""
    samples: int = 1
    """Responses per prompt at temperature 1 (above 1: pass@k and maj@k)."""
    prompts: str = ""
    """Held-out prompts, as for --prompts (default: the held-out split of the demo, else rows set aside by hash)."""

    @property
    def wanted(self) -> bool:
        """Whether there is any evaluation, and so anything held out."""
        return self.every != 0
