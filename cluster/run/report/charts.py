"""Which curves there are, and what to look for in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Scale = Literal["auto", "share", "zero"]


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture; metrics that no run has are left out, and so is a chart without any."""

    id: str
    title: str
    note: str
    """What a healthy curve looks like."""
    keys: tuple[str, ...]
    """Metrics, in order; one that ends in `/` means all further metrics of that stage."""
    scale: Scale = "auto"
    """auto: logarithmic when the values span decades; share: 0 to 1; zero: from 0."""
    stacked: bool = False
    unit: str = ""


CHARTS = (
    Chart("reward", "Reward", "Parts before their weights, and the weighted total.",
          ("reward/total", "reward/correctness", "reward/format", "reward/"), "zero"),
    Chart("accuracy", "Accuracy", "Share of right answers in training and on held-out prompts, with 95 % bands.",
          ("reward/correctness", "eval/correctness", "eval/"), "share"),
    Chart("format", "Format", "Share that keeps the format. Up while accuracy falls means that format is being hacked.",
          ("reward/format", "eval/format"), "share"),
    Chart("length", "Response length", "Mean tokens per response, end token included.",
          ("response/length",), "zero", unit="tokens"),
    Chart("truncated", "Cut by the length limit", "Share of responses that never finished.",
          ("response/truncated",), "share"),
    Chart("entropy", "Entropy", "Should fall slowly. Towards 0 nothing is explored; rising towards ln V is decay.",
          ("policy/entropy",), "zero", unit="nats per token"),
    Chart("kl", "KL", "Distance to the reference. Its own pull must stay small beside the reward's.",
          ("policy/kl", "policy/kl_loss"), unit="nats per token"),
    Chart("signal", "Signal", "Spread of rewards within groups. A group without spread teaches nothing.",
          ("reward/std", "group/zero_signal"), "zero"),
    Chart("ratio", "Ratio new / old", "Mean near 1. A large maximum alone is harmless; a moving mean is not.",
          ("policy/ratio_mean", "policy/ratio_max")),
    Chart("clip", "Clip fractions", "Share of tokens whose ratio was clipped. A few percent at most.",
          ("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/clip_fraction_dual"), "zero"),
    Chart("grad", "Gradient norm", "Before clipping. Single spikes are usual, a steady rise is not.",
          ("policy/grad_norm",)),
    Chart("loss", "Policy loss", "Near 0 by construction; it says little about progress.",
          ("policy/loss",)),
    Chart("advantage", "Advantages", "Mean near 0 within groups; std 0 means that no group had any spread.",
          ("advantage/mean", "advantage/std")),
    Chart("mismatch", "Engine against learner", "Difference of log-probs of the same tokens. Must not grow.",
          ("mismatch/mean", "mismatch/max"), unit="nats"),
    Chart("correction", "Importance correction", "Weights that make up for that difference. Near 1.",
          ("correction/weight_mean", "correction/weight_max", "correction/")),
    Chart("staleness", "Behind", "Async: weights versions between sampling and training, and what they change.",
          ("staleness/mean", "staleness/max", "staleness/drift_mean", "staleness/drift_max"), "zero"),
    Chart("time", "Time of a round", "Seconds by phase, stacked.",
          ("time/generate", "time/score", "time/old_logprobs", "time/learn", "sync/seconds", "time/eval", "time/other"),
          "zero", stacked=True, unit="seconds"),
    Chart("throughput", "Throughput", "Tokens generated per second of generation, trained per second of learning.",
          ("time/generate_tokens_per_s", "time/learn_tokens_per_s", "time/tokens_per_s"), "zero",
          unit="tokens per second"),
    Chart("idle", "Idle and utilisation", "Share of the time without work, and of the devices' peak where it is known.",
          ("time/engines_idle", "time/ranks_idle", "time/generate_mfu", "time/learn_mfu"), "share"),
    Chart("dropped", "Dropped, restarted, out of time", "Responses left out by reason, and processes replaced.",
          ("dropped/", "grader/", "fleet/", "policy/skipped_steps"), "zero"),
    Chart("lr", "Learning rate", "As scheduled.",
          ("policy/lr",), "zero"),
    Chart("memory", "Memory", "Per process. Flat over hundreds of rounds.",
          ("memory/",), "zero", unit="bytes"),
)  # fmt: skip
_UNPLOTTED = {
    "weights_version", "responses", "tokens/generated", "sync/receipt_ok", "time/round", "time/watch", "policy/tokens",
    "policy/effective_tokens", "policy/clamped", "policy/kl_clamped", "correction/clamped",
}  # fmt: skip
"""Constant or of interest only when something else is wrong; the numbers stand in metrics.jsonl."""
_MOST_LINES = 12


def charts_for(metrics: Iterable[str]) -> list[dict[str, Any]]:
    """The charts that have something to show, metrics spelled out; unknown metrics get charts of their own."""
    known = list(dict.fromkeys(metrics))
    named = {key for chart in CHARTS for key in chart.keys if not key.endswith("/")}
    chosen: list[dict[str, Any]] = []
    taken = set(_UNPLOTTED)
    for chart in CHARTS:
        keys: list[str] = []
        for key in chart.keys:
            if key.endswith("/"):
                keys += [each for each in known if each.startswith(key) and each not in named and each not in taken]
            elif key in known:
                keys.append(key)
        taken.update(keys)
        if keys:
            chosen.append(asdict(chart) | {"keys": keys[:_MOST_LINES]})
    further: dict[str, list[str]] = {}
    for key in known:
        if key not in taken and key not in named:
            further.setdefault(key.split("/")[0], []).append(key)
    for stage, keys in sorted(further.items()):
        shown = tuple(keys[:_MOST_LINES])
        chosen.append(asdict(Chart(f"further-{stage}", f"Further: {stage}", "Metrics without a description.", shown)))
    return chosen
