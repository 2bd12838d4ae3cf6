"""The named recipes, on one screen: what each sets, beyond the defaults. Every value can be overridden by its flag.

A preset sets the objective and, where the recipe depends on them, sampling and rewards. It never sets the learning rate
(that belongs to the model) nor how a round is cut (R1's 8192 rollouts in 16 minibatches are the defaults), except for
the book's runs and `cheap`, whose point is the size: 8 responses to one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Variant:
    """One recipe."""

    summary: str
    """What it is, in one line."""
    fixes: str
    """Which weakness it answers, in one line."""
    source: str
    """Where it comes from."""
    settings: Mapping[str, Value]
    """Dotted configuration name -> value."""


# The book samples at temperature 0.8 and top-p 0.9 and scores at temperature 1: unsound, and set to be seen as such.
_BOOK_RUN: dict[str, Value] = {
    "rollouts": 8,
    "rollout.temperature": 0.8,
    "rollout.top_p": 0.9,
    "rollout.score_at_one": True,
    "rollout.allow_unscored_sampling": True,
    "reward.format_weight": 0.0,
}
_BOOK_CLIP: dict[str, Value] = _BOOK_RUN | {
    "learner.loss": "book",
    "learner.ratio_level": "sequence_sum",
    "learner.clip_high": 10.0,
    "learner.aggregate": "sequence_mean",
    "learner.inner_updates": 2,
}

PRESETS: dict[str, Variant] = {
    "grpo": Variant(
        "the default: token ratio, clip 0.2/0.28, group advantages, token mean, no KL",
        "PPO's need for a value model",
        "DeepSeekMath (arXiv 2402.03300), with the clip and the token mean of DAPO",
        {
            "learner.loss": "ppo",
            "learner.ratio_level": "token",
            "learner.clip_low": 0.2,
            "learner.clip_high": 0.28,
            "learner.advantage": "group",
            "learner.aggregate": "token_mean",
            "kl.kind": "none",
            "rollout.temperature": 1.0,
            "rollout.top_p": 1.0,
            "reward.format_weight": 0.1,
        },
    ),
    "r1": Variant(
        "DeepSeek-R1: ratio of the whole response, clip 10, k3 to a reference replaced every 400 steps",
        "value model and reward model; the reference follows, so that long training is not held back",
        "DeepSeek-R1 (arXiv 2501.12948; Nature, eqs. 1-3)",
        {
            "learner.loss": "ppo",
            "learner.ratio_level": "sequence_sum",
            "learner.clip_low": 10.0,
            "learner.clip_high": 10.0,
            "learner.aggregate": "sequence_mean",
            "kl.kind": "k3",
            "kl.coef": 0.001,
            "kl.ref_refresh_steps": 400,
            "reward.format_weight": 1.0,
        },
    ),
    "book-reinforce": Variant(
        "summed log-probs times group advantages; no ratio, no clip, no KL",
        "nothing yet: where the walk-through begins",
        "rasbt/reasoning-from-scratch, chapter 6 and 7.3",
        _BOOK_RUN | {"learner.loss": "reinforce", "learner.aggregate": "sequence_sum"},
    ),
    "book-clip": Variant(
        "ratio of the whole response, the book's clip at 10, two inner updates",
        "updates too large when responses are used more than once",
        "rasbt/reasoning-from-scratch, 7.4",
        _BOOK_CLIP,
    ),
    "book-kl": Variant(
        "book-clip with the summed k1 term",
        "meant to hold the policy near the reference; collapses (lesson kl-collapse)",
        "rasbt/reasoning-from-scratch, 7.5",
        _BOOK_CLIP | {"kl.kind": "k1_book", "kl.coef": 0.02},
    ),
    "book-format": Variant(
        "book-clip with a format reward as large as correctness, one inner update",
        "missing <think> tags; invites reward hacking (lesson format-hack)",
        "rasbt/reasoning-from-scratch, 7.6",
        _BOOK_CLIP | {"learner.inner_updates": 1, "reward.format_weight": 1.0},
    ),
    "dapo": Variant(
        "clip-higher, token mean, groups without signal refilled, cut-off responses left out",
        "entropy collapse, long responses weighing too little, groups that teach nothing",
        "DAPO (arXiv 2503.14476)",
        {
            "learner.loss": "ppo",
            "learner.clip_low": 0.2,
            "learner.clip_high": 0.28,
            "learner.aggregate": "token_mean",
            "kl.kind": "none",
            "filter.dynamic_sampling": True,
            "filter.overlong": True,
        },
    ),
    "dr-grpo": Variant(
        "no std in the advantage, a constant divisor instead of lengths",
        "bias towards long wrong answers and towards very easy or very hard prompts",
        "Dr. GRPO (arXiv 2503.20783)",
        {
            "learner.loss": "ppo",
            "learner.clip_low": 0.2,
            "learner.clip_high": 0.2,
            "learner.advantage": "no_std",
            "learner.aggregate": "constant",
            "kl.kind": "none",
        },
    ),
    "deepseek-v3.2": Variant(
        "ratio-weighted k3, negative responses far off the policy left out",
        "the biased gradient of k3 off-policy; unstable pushes from stale negative responses",
        "DeepSeek-V3.2 (arXiv 2512.02556); the threshold is not published",
        {
            "learner.loss": "ppo",
            "learner.aggregate": "sequence_mean",
            "kl.kind": "k3_weighted",
            "kl.coef": 0.001,
            "correction.off_policy_delta": 0.5,
        },
    ),
    "tis": Variant(
        "grpo with truncated importance weights between engine and learner",
        "a sampler whose probabilities differ from the learner's (precision, kernels, lag)",
        "truncated importance sampling, as in verl, slime and open-instruct",
        {
            "learner.old_logprobs": "recompute",
            "correction.kind": "tis_token",
            "correction.cap": 2.0,
        },
    ),
    "gdpo": Variant(
        "each reward part normalised in its group before the weights, then over the batch",
        "weights of reward parts that the std divides away",
        "GDPO (arXiv 2601.05242)",
        {"learner.advantage": "gdpo"},
    ),
    "gspo": Variant(
        "one ratio per response, the mean over its tokens, with a very narrow clip",
        "noise of token ratios in long responses and mixtures of experts",
        "GSPO (arXiv 2507.18071)",
        {
            "learner.loss": "ppo",
            "learner.ratio_level": "sequence_mean",
            "learner.clip_low": 3e-4,
            "learner.clip_high": 4e-4,
            "learner.aggregate": "sequence_mean",
            "kl.kind": "none",
        },
    ),
    "cispo": Variant(
        "REINFORCE weighed by the capped ratio; no token loses its gradient",
        "rare, decisive tokens that a clip silences",
        "MiniMax-M1 (arXiv 2506.13585); absolute cap 5 as in TRL",
        {
            "learner.loss": "cispo",
            "learner.ratio_level": "token",
            "learner.cispo_cap": 5.0,
            "learner.aggregate": "token_mean",
            "kl.kind": "none",
        },
    ),
    "cheap": Variant(
        "8 responses to one prompt, one step per round; the rest as grpo",
        "the cost of a round, for a first look",
        "rasbt/reasoning-from-scratch, 7.4 (with --learner.inner-updates 2 the book's way)",
        {"rollouts": 8},
    ),
}
