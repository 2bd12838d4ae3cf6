"""Evaluation against training: what is learned does not carry over."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cluster.run.findings import Severity
from cluster.run.robust import Array, rolling_mean
from cluster.run.rules import Sign, rule
from cluster.run.series import RunView, went

TRAINING = ("reward/total", "reward/correctness")


@rule(
    "eval-gap",
    needs=(("eval/correctness",), TRAINING),
    cause="Accuracy on held-out prompts falls while the training reward holds or rises: the policy earns its reward in "
    "a way that does not carry over (format, memorised prompts, a hole in the checker, answers that leak).",
    cure="(1) Take the checkpoint of the best evaluation. (2) Read responses of the last rounds in launch.py report: "
    "what is rewarded? (3) --reward.conditional-format if format rose. (4) Other prompts, lower --learner.lr, fewer "
    "--rounds.",
)
def eval_gap(view: RunView) -> Sign | None:
    """Evaluations well below the best one, lasting, with a training reward that did not fall along."""
    evals = view.series("eval/correctness")
    count = len(evals)
    if count < 3 or not len(view.series(*TRAINING)):
        return None
    late = 1 if count <= 5 else max(2, count // 10)
    early = 1 if count <= 12 else late
    levels, after = rolling_mean(evals.values, early), rolling_mean(evals.values, late)
    error = _eval_error(view, evals.values) * math.sqrt(1 / early + 1 / late)
    worst: Sign | None = None
    for at in range(early, count - late + 1):
        best_at = int(np.argmax(levels[: at - early + 1]))
        best, now = float(levels[best_at]), float(after[at])
        drop = best - now
        if drop < max(0.05, 0.15 * best, (5 if late == 1 else 4) * error):
            continue
        before, trained, training_error = _training_around(view, evals.rounds, best_at, (at, at + late - 1))
        held = trained >= before - max(0.1 * abs(before), 1.5 * training_error, 0.02)
        # What falls in training just as much is no gap, however noisy the training reward is.
        if np.isnan(trained) or not held or before - trained > 0.5 * abs(before) * drop / best:
            continue
        severity: Severity = "critical" if now <= 0.7 * best and drop >= 0.1 else "warning"
        if worst is None or (severity == "critical" and worst.severity != "critical"):
            evidence = {evals.key: went(best, now), view.series(*TRAINING).key: went(before, trained)}
            fallen = best_at + early + np.flatnonzero(evals.values[best_at + early :] <= best - drop / 2)
            worst = Sign(severity, int(evals.rounds[fallen[0]]), evidence)
        if severity == "critical":
            break
    return worst


def _training_around(
    view: RunView, rounds: npt.NDArray[np.int64], best_at: int, late: tuple[int, int]
) -> tuple[float, float, float]:
    """Training reward around the best evaluation and around the late ones, and the error of the difference."""
    training = view.series(*TRAINING)
    gap = max(1, int(rounds[late[1]] - rounds[late[1] - 1]))
    half = max(gap, 50 if view.single else 2) // 2
    best_round, first, last = int(rounds[best_at]), int(rounds[late[0]]), int(rounds[late[1]])
    before, error_before = view.mean_near(training, best_round - half, best_round + half)
    after, error_after = view.mean_near(training, first - gap // 4, last + gap // 2)
    return before, after, float(np.hypot(error_before, error_after))


def _eval_error(view: RunView, values: Array) -> float:
    """Standard error of one evaluation.

    Our own logs have its interval. Elsewhere, shares of a number of prompts tell that number: the smallest of which
    all values are whole shares. Where none fits, second differences tell the noise (they do not see a trend).
    """
    interval = view.series("eval/correctness_high"), view.series("eval/correctness_low")
    if len(interval[0]) and len(interval[0]) == len(interval[1]):
        return float(np.median(interval[0].values - interval[1].values)) / (2 * 1.96)
    sizes = np.arange(16, 1025)
    counts = values[None, :] * sizes[:, None]
    whole = np.flatnonzero((np.abs(counts - np.round(counts)) <= 1e-6 * sizes[:, None]).all(axis=1))
    level = float(np.clip(np.median(values), 0.05, 0.95))
    if len(whole):
        return math.sqrt(level * (1 - level) / float(sizes[whole[0]]))
    if len(values) < 6:
        return 0.025
    return min(0.05, max(0.015, float(np.median(np.abs(np.diff(values, 2)))) * 1.4826 / math.sqrt(6)))
