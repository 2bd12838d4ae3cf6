"""One row of metrics.jsonl per round, from what the round produced. Pure; the names are those of CONTRACT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from learner.types import StepReport, UpdateReport
from rollout.types import DoubleArray, ScoredGroup

_LARGEST = ("policy/ratio_max", "correction/weight_max", "mismatch/max", "staleness/drift_max")
_DRIFT = {"mismatch/mean": "staleness/drift_mean", "mismatch/max": "staleness/drift_max"}
_ADDED = ("policy/clamped", "policy/kl_clamped", "correction/clamped", "policy/tokens", "policy/effective_tokens")


def rollout_metrics(groups: Sequence[ScoredGroup], advantages: DoubleArray) -> dict[str, float]:
    """Rewards, groups and lengths of the responses that are trained; `advantages` (B,) in the order of the groups."""
    if not groups:
        return {"responses": 0}
    totals = np.concatenate([scored.total for scored in groups])
    lengths = np.concatenate([scored.group.lengths for scored in groups])
    finished = np.concatenate([scored.group.finished for scored in groups])
    signal = np.array([bool(np.any(part)) for part in _split(advantages, groups)])
    metrics: dict[str, float] = {
        "responses": len(totals),
        "tokens/generated": int(lengths.sum()),
        "reward/total": float(totals.mean()),
        "reward/std": float(np.mean([scored.total.std(ddof=1) for scored in groups])),
        "group/zero_signal": float(1.0 - signal.mean()),
        "response/length": float(lengths.mean()),
        "response/truncated": float(1.0 - finished.mean()),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
        "grader/timeouts": sum(scored.timeouts for scored in groups),
    }
    for part in groups[0].parts:
        metrics[f"reward/{part}"] = float(np.concatenate([scored.parts[part] for scored in groups]).mean())
    return metrics


def update_metrics(report: UpdateReport, *, behind: bool = False) -> dict[str, Any]:
    """The steps of a round as one: means over the applied steps, largest values, sums; detail under `steps`.

    Where the responses were `behind`, what differs from the sampler is first of all what the policy has learned since.
    """
    if behind:
        report = replace(report, steps=tuple(replace(s, metrics=_as_drift(s.metrics)) for s in report.steps))
    done = [step for step in report.steps if not step.skipped]
    names = sorted({name for step in done for name in step.metrics})
    metrics: dict[str, Any] = {name: _over_steps(name, done) for name in names}
    if report.mismatch is not None:
        mean, largest = report.mismatch
        metrics["mismatch/mean"] = metrics.get("mismatch/mean", mean)
        metrics["mismatch/max"] = max(metrics.get("mismatch/max", largest), largest)
    metrics["policy/skipped_steps"] = len(report.steps) - len(done)
    metrics["steps"] = [
        {"step": step.step, "minibatch": step.minibatch, "skipped": step.skipped, **step.metrics}
        for step in report.steps
    ]
    return metrics


def version_metrics(round_: int, groups: Sequence[ScoredGroup], *, behind: bool) -> dict[str, float]:
    """The oldest weights version that sampled the round; how far its responses were behind, where they may be."""
    versions = np.repeat([scored.group.weights_version for scored in groups], [len(s.total) for s in groups])
    lags = round_ - 1 - versions
    metrics: dict[str, float] = {"weights_version": int(versions.min())}
    return metrics | ({"staleness/mean": float(lags.mean()), "staleness/max": int(lags.max())} if behind else {})


def dropped_metrics(reasons: Mapping[str, int] | Counter[str]) -> dict[str, int]:
    """Responses that were planned and not trained, by reason."""
    return {f"dropped/{reason}": count for reason, count in sorted(reasons.items())}


def _as_drift(metrics: Mapping[str, float]) -> dict[str, float]:
    return {_DRIFT.get(name, name): value for name, value in metrics.items()}


def _over_steps(name: str, steps: Sequence[StepReport]) -> float:
    values = [step.metrics[name] for step in steps if name in step.metrics]
    if name in _LARGEST:
        return max(values)
    return float(sum(values)) if name in _ADDED else float(np.mean(values))


def _split(values: DoubleArray, groups: Sequence[ScoredGroup]) -> list[DoubleArray]:
    return np.split(values, np.cumsum([len(scored.total) for scored in groups])[:-1])
