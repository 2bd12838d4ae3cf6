"""One table of metric names: ours, TRL's, and what other systems call the same thing.

It is read in both directions. `ours_from(columns)` finds our metrics in the columns of another system's log (TRL,
verl, OpenRLHF, SkyRL, the book's CSV, exports of trackers). `to_trl(row)` writes one of our rows under TRL's names, so
that dashboards made for TRL show our runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Alias:
    """One metric under its names."""

    ours: str
    trl: str = ""
    """TRL's name; empty where TRL has no such metric (our name is kept when writing)."""
    others: tuple[str, ...] = ()
    """Names of other systems, the one that fits best first."""


ROUND_NAMES: Final = (
    *("round", "step", "global_step", "train/global_step", "trainer/global_step", "training/global_step"),
    *("_step", "iteration", "steps"),
)
"""Where the number of a row stands; the first that is there counts."""

ALIASES: Final[tuple[Alias, ...]] = (
    Alias("reward/total", "reward", ("reward_avg", "critic/score/mean", "critic/rewards/mean", "reward/avg_raw_reward",
                                     "reward/mean", "rewards/mean", "mean_reward", "reward_mean", "avg_reward")),
    Alias("reward/std", "reward_std", ("reward/std", "rewards/std", "critic/score/std", "std_reward")),
    Alias("group/zero_signal", "frac_reward_zero_std", ("zero_signal", "reward/zero_std_group_fraction",
                                                        "zero_std_ratio", "frac_zero_std")),
    Alias("response/length", "completions/mean_length", ("avg_response_len", "response_length/mean", "response_length",
                                                         "generate/avg_num_tokens", "completion_length", "gen_len",
                                                         "mean_response_length")),
    Alias("response/truncated", "completions/clipped_ratio", ("response_length/clip_ratio", "truncated_ratio",
                                                              "truncation_rate", "truncated_rate",
                                                              "response_clip_ratio")),
    Alias("policy/loss", "loss", ("policy_loss", "actor/pg_loss", "policy/policy_loss", "act_loss")),
    Alias("policy/entropy", "entropy", ("entropy_avg", "actor/entropy", "policy/policy_entropy", "policy_entropy",
                                        "actor/entropy_loss", "entropy_loss")),
    Alias("policy/ratio_mean", "", ("policy_ratio", "ratio_mean", "actor/ratio_mean", "mean_ratio")),
    Alias("policy/ratio_max", "", ("ratio_max", "actor/ratio_max", "max_ratio")),
    Alias("policy/clip_fraction_low", "clip_ratio/low_mean", ("clipfrac_low",)),
    Alias("policy/clip_fraction_high", "clip_ratio/high_mean", ("clip_ratio/region_mean", "clip_ratio",
                                                                "actor/pg_clipfrac", "policy/ppo_clip_ratio",
                                                                "ppo_clip_ratio", "clipfrac")),
    Alias("policy/clip_fraction_dual", "", ("actor/pg_clipfrac_lower",)),
    Alias("policy/kl", "kl", ("actor/kl_loss", "policy/policy_kl", "policy_kl", "critic/kl", "objective/kl")),
    Alias("policy/kl_loss", "", ("kl_loss",)),
    Alias("policy/grad_norm", "grad_norm", ("policy/raw_grad_norm", "actor/grad_norm", "actor_grad_norm")),
    Alias("policy/lr", "learning_rate", ("lr", "actor/lr", "actor_lr", "policy/policy_lr")),
    Alias("advantage/mean", "", ("adv_avg", "critic/advantages/mean", "advantages_mean")),
    Alias("advantage/std", "", ("adv_std", "critic/advantages/std", "advantages_std")),
    Alias("correction/weight_mean", "sampling/importance_sampling_ratio/mean", ("rollout_corr/rollout_is_mean",)),
    Alias("correction/weight_max", "sampling/importance_sampling_ratio/max", ("rollout_corr/rollout_is_max",)),
    Alias("mismatch/mean", "sampling/sampling_logp_difference/mean", ("policy/rollout_train_logprobs_abs_diff_mean",
                                                                      "training/rollout_probs_diff_mean", "vllm_kl",
                                                                      "rollout_corr/kl")),
    Alias("mismatch/max", "sampling/sampling_logp_difference/max", ("policy/rollout_train_logprobs_abs_diff_max",
                                                                    "training/rollout_probs_diff_max")),
    Alias("eval/correctness", "eval_rewards/correctness/mean", ("eval_acc", "eval_accuracy", "eval/accuracy",
                                                                "eval/acc", "eval/all/avg_score", "test/accuracy",
                                                                "eval_reward", "eval/reward", "eval/score")),
    Alias("time/round", "step_time", ("timing_s/step", "timing/step", "perf/time_per_step")),
    Alias("time/generate", "", ("timing_s/gen", "timing/generate")),
    Alias("time/learn", "", ("timing_s/update_actor", "timing/policy_train")),
    Alias("time/old_logprobs", "", ("timing_s/old_log_prob",)),
)  # fmt: skip
"""Metrics with one fixed name on each side; parts of the reward follow a pattern, see `_part_of`."""

STALENESS: Final = ("async/staleness_max", "staleness/max", "rollout/staleness_steps")
"""Weights versions a response is behind; turned into `weights_version` when read."""

_EXACT: Final = {
    name: (alias.ours, place)
    for alias in ALIASES
    for place, name in enumerate((alias.ours, alias.trl, *alias.others))
    if name
}
TRL_NAMES: Final[Mapping[str, str]] = {alias.ours: alias.trl for alias in ALIASES if alias.trl} | {
    f"reward/{part}": f"rewards/{part}/mean" for part in ("correctness", "format", "overlong")
}
"""Our name -> TRL's, for the metrics that every run may have; `trl_name` also knows the parts of a user's reward."""
_PART = re.compile(r"^(?:rewards?|critic/score)/(?P<name>[^/]+)/(?:mean|avg)$|^(?P<book>\w+?)_reward_(?:avg|mean)$")
_EVAL_PART = re.compile(r"^eval_rewards?/(?P<name>[^/]+)/mean$")
_EVAL_SCORE = re.compile(
    r"^val-core/.+/(?:acc|score|reward)/mean@\d+$|^val(?:idation)?[/_].*(?:acc|score)|^eval/[^/]+_pass1$"
)
_SUBSTANCE = re.compile(r"acc|correct|answer|math|verif|exact", re.IGNORECASE)
_SPLITS = ("train/", "training/")
_NO_PART = {"total", "std", "max", "min", "sum", "mean", "avg"}


def _part_name(name: str) -> str:
    """Our name for a part of the reward: correctness and format are recognised, others keep their name."""
    if "format" in name.lower():
        return "format"
    return "correctness" if _SUBSTANCE.search(name) else name


def _part_of(column: str) -> str | None:
    match = _PART.match(column)
    name: str | None = (match["name"] or match["book"]) if match else None
    return f"reward/{_part_name(name)}" if name and name not in _NO_PART else None


def _meaning(column: str) -> tuple[str, int] | None:
    """Our metric for a column and how well the name fits (0 best); None where we have no such metric."""
    if column in _EXACT:
        return _EXACT[column]
    evaluated = _EVAL_PART.match(column)
    if evaluated:
        part = _part_name(evaluated["name"])
        return (f"eval/{part}", 2) if part in ("correctness", "format") else None
    if _EVAL_SCORE.match(column):
        return "eval/correctness", 50
    trained = _part_of(column)
    return (trained, 3) if trained else None


def plain_name(column: str) -> str:
    """A column name without what a tracker's export puts before it (`run name - train/reward`, `train/`)."""
    name = column.rsplit(" - ", 1)[-1].strip()
    if _meaning(name) is None:
        for split in _SPLITS:
            if name.startswith(split):
                return name.removeprefix(split)
    return name


def ours_from(columns: Iterable[str]) -> dict[str, str]:
    """Their column -> our metric, each metric once (from the column whose name fits best).

    Of several parts of the reward that are called correctness or format, the others keep their own names.
    """
    best: dict[str, tuple[int, str]] = {}
    # exports of W&B carry these beside every column
    given = [column for column in columns if not column.endswith(("__MIN", "__MAX"))]
    for column in given:
        meaning = _meaning(plain_name(column))
        if meaning is not None and (meaning[0] not in best or meaning[1] < best[meaning[0]][0]):
            best[meaning[0]] = (meaning[1], column)
    chosen = {column: ours for ours, (_, column) in best.items()}
    for column in given:
        part = _PART.match(plain_name(column))
        name = f"reward/{part['name'] or part['book']}" if part else ""
        if name and column not in chosen and _part_of(plain_name(column)) and name not in chosen.values():
            chosen[column] = name
    return chosen


def trl_name(ours: str) -> str:
    """TRL's name of one of our metrics; our own where TRL has none."""
    if ours in TRL_NAMES:
        return TRL_NAMES[ours]
    stage, _, part = ours.partition("/")
    if stage == "reward" and part and part not in _NO_PART:
        return f"rewards/{part}/mean"
    return "step" if ours == "round" else ours


def to_trl(row: Mapping[str, Any]) -> dict[str, float]:
    """One of our rows under TRL's names; numbers only (`steps` and other detail stays in metrics.jsonl)."""
    renamed = {
        trl_name(name): float(value) if isinstance(value, bool) else value
        for name, value in row.items()
        if isinstance(value, int | float)
    }
    if "clip_ratio/low_mean" in renamed and "clip_ratio/high_mean" in renamed:
        # TRL logs the share clipped on either side too
        renamed["clip_ratio/region_mean"] = renamed["clip_ratio/low_mean"] + renamed["clip_ratio/high_mean"]
    if "loss" in renamed and "policy/kl_loss" in renamed:
        renamed["loss"] += renamed["policy/kl_loss"]  # TRL's loss includes the KL term, ours does not
    return renamed
