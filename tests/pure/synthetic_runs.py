"""Synthetic metric rows: healthy runs of several shapes, and one generator per failure mode of the doctor.

Every run is drawn from its seed: length, noise, levels and the round in which a failure begins all vary. Two schemes:
`multi` (R1's: hundreds of prompts per round, a few percent of noise) and `single` (one prompt, eight responses: the
reward is 0 or 1 most of the time and two thirds of the rounds have no spread).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Rows = list[dict[str, Any]]


@dataclass
class Curves:
    """The smooth course of a run, one value per round; failures bend these before noise is added."""

    rounds: int
    single: bool
    kl: bool
    bfloat: bool
    accuracy: np.ndarray = field(init=False)
    form: np.ndarray = field(init=False)
    entropy: np.ndarray = field(init=False)
    length: np.ndarray = field(init=False)
    cut: np.ndarray = field(init=False)
    kl_level: np.ndarray = field(init=False)
    grad: np.ndarray = field(init=False)
    ratio_mean: np.ndarray = field(init=False)
    ratio_max: np.ndarray = field(init=False)
    clip: np.ndarray = field(init=False)
    mismatch: np.ndarray = field(init=False)
    silent_extra: np.ndarray = field(init=False)
    eval_shift: np.ndarray = field(init=False)
    loss: np.ndarray | None = None
    format_weight: float = 0.1
    lag: np.ndarray = field(init=False)


def ramp(rounds: int, start: int, width: float) -> np.ndarray:
    """0 before `start`, then to 1 within about `width` rounds."""
    return np.clip((np.arange(rounds) - start) / max(1e-9, width), 0, 1)


def healthy_curves(rng: np.random.Generator, rounds: int, single: bool) -> Curves:
    """A run that learns: accuracy rises along an S, format first, entropy falls moderately."""
    run = Curves(rounds, single, kl=bool(rng.random() < 0.4), bfloat=bool(rng.random() < 0.5))
    t = np.arange(rounds)
    low, high = rng.uniform(0.1, 0.45), rng.uniform(0.55, 0.95)
    if rng.random() < 0.15:
        low, high = rng.uniform(0.55, 0.7), rng.uniform(0.7, 0.8)  # a good model that improves little
    middle, pace = rng.uniform(0.1, 0.6) * rounds, rng.uniform(0.08, 0.25) * rounds
    run.accuracy = low + (high - low) / (1 + np.exp(-(t - middle) / pace))
    if rng.random() < 0.3:  # format already known
        run.form = np.full(rounds, rng.uniform(0.85, 0.99))
    else:
        begin = rng.uniform(0.1, 0.7)
        run.form = begin + (0.98 - begin) * (1 - np.exp(-t / (0.15 * rounds + 1)))
    start = rng.uniform(0.3, 1.5)
    run.entropy = start * (1 - rng.uniform(0.1, 0.7) * (1 - np.exp(-t / (0.4 * rounds))))
    tokens = rng.choice([12, 60, 300, 2000])
    run.length = tokens * (1 + rng.uniform(-0.4, 1.5) * t / rounds)
    run.cut = np.full(rounds, rng.uniform(0, 0.1)) + rng.uniform(0, 0.08) * t / rounds
    run.kl_level = rng.uniform(0.005, 0.15) * (1 - np.exp(-t / (0.5 * rounds))) + 1e-4
    run.grad = np.full(rounds, 10 ** rng.uniform(-1.5, 0.5)) * (1 + rng.uniform(-0.6, 1.0) * t / rounds)
    run.ratio_mean = np.full(rounds, 1.0)
    run.ratio_max = np.full(rounds, rng.uniform(1.5, 8))
    run.clip = np.full(rounds, rng.uniform(0.0005, 0.03))
    run.mismatch = np.full(rounds, rng.uniform(0.005, 0.02) if run.bfloat else 10 ** rng.uniform(-6, -4.5))
    run.silent_extra = np.zeros(rounds)
    run.eval_shift = np.zeros(rounds)
    run.lag = np.zeros(rounds)
    return run


def observe(rng: np.random.Generator, run: Curves) -> Rows:
    """Noise on the curves: what would be logged."""
    groups, size = (1, 8) if run.single else (int(rng.choice([64, 128, 512])), 16)
    correct, form = scores(rng, run, groups, size)
    within = correct * (1 - correct) + run.format_weight**2 * form * (1 - form)
    silent = np.mean(within < 1e-12, axis=1)
    some = silent < 1

    def noisy(level: np.ndarray, multi: float, single: float) -> np.ndarray:
        return level * rng.lognormal(0, single if run.single else multi, run.rounds)

    clip, mismatch = run.clip, run.mismatch
    columns: dict[str, Any] = {
        "weights_version": np.maximum(0, np.arange(run.rounds) - run.lag).astype(int),
        "responses": np.full(run.rounds, groups * size),
        "reward/correctness": correct.mean(axis=1),
        "reward/format": form.mean(axis=1),
        "reward/total": correct.mean(axis=1) + run.format_weight * form.mean(axis=1),
        "reward/std": np.sqrt(within).mean(axis=1),
        "group/zero_signal": silent,
        "response/length": noisy(run.length, 0.04, 0.5),
        "response/truncated": rng.binomial(size * groups, np.clip(run.cut, 0, 1)) / (size * groups),
        "policy/loss": (rng.normal(0, 0.02, run.rounds) if run.loss is None else run.loss) * some,
        "policy/entropy": noisy(run.entropy, 0.12, 0.5),
        "policy/ratio_mean": noisy(run.ratio_mean, 0.01, 0.3),
        "policy/ratio_max": 1 + noisy(run.ratio_max - 1, 0.6, 0.6),
        "policy/clip_fraction_low": noisy(clip, 0.3, 0.3),
        "policy/clip_fraction_high": noisy(clip, 0.3, 0.3),
        "policy/grad_norm": noisy(run.grad, 0.2, 0.45) * (some | run.kl),
        "policy/lr": np.full(run.rounds, 1e-6),
        "policy/skipped_steps": np.zeros(run.rounds, dtype=int),
        "advantage/mean": np.zeros(run.rounds),
        "advantage/std": np.sqrt(1 - silent) * 0.9997,
        "mismatch/mean": noisy(mismatch, 0.15, 0.15),
        "mismatch/max": noisy(mismatch * 20, 0.4, 0.4),
        "sync/receipt_ok": np.ones(run.rounds),
        "time/round": rng.uniform(50, 60, run.rounds),
    }
    if run.kl:
        columns["policy/kl"] = noisy(run.kl_level, 0.12, 0.5)
        columns["policy/kl_loss"] = 0.001 * columns["policy/kl"]
    names = list(columns)
    rows: Rows = [evaluation(rng, run, 0) | {"round": 0, "weights_version": 0}]
    every = int(rng.choice([2, 4])) if not run.single else max(2, run.rounds // 10)
    for t, values in enumerate(zip(*(columns[name].tolist() for name in names), strict=True)):
        rows.append({"round": t + 1} | dict(zip(names, values, strict=True)))
        if (t + 1) % every == 0 or t + 1 == run.rounds:
            rows[-1] |= evaluation(rng, run, t)
    return rows


def scores(rng: np.random.Generator, run: Curves, groups: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(rounds, groups) shares of right and of well-formed responses; prompts differ in difficulty."""
    spread = rng.uniform(0.25, 0.6)
    concentration = (1 - spread) / spread * 2
    p = np.clip(run.accuracy, 0, 1)[:, None]
    shape = (run.rounds, groups)
    chances = rng.beta(np.maximum(1e-3, p * concentration), np.maximum(1e-3, (1 - p) * concentration), shape)
    correct = rng.binomial(size, np.where(p > 0, chances, 0.0)) / size
    formed = np.clip(rng.normal(run.form[:, None], 0.05, shape), 0, 1)
    form = rng.binomial(size, np.where(run.form[:, None] > 0, formed, 0.0)) / size
    hide = rng.random(shape) < run.silent_extra[:, None]
    return np.where(hide, np.round(correct), correct), np.where(hide, np.round(form), form)


def evaluation(rng: np.random.Generator, run: Curves, t: int) -> dict[str, float]:
    """An evaluation on 512 held-out prompts."""
    chance = float(np.clip(run.accuracy[t] * 0.95 + run.eval_shift[t], 0, 1))
    return {"eval/correctness": rng.binomial(512, chance) / 512, "eval/format": float(run.form[t])}


def healthy(seed: int, single: bool = False, rounds: int | None = None) -> Rows:
    """A healthy run, by default 8 to 100 rounds of many prompts, or 12 to 500 of one."""
    rng = np.random.default_rng([seed, 1 + single])
    length = rounds or int(rng.choice([12, 40, 150, 500] if single else [8, 12, 25, 50, 100]))
    return observe(rng, healthy_curves(rng, length, single))


Bend = Callable[[np.random.Generator, Curves, int], None]


def _kl_takeover(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.kl, run.format_weight = True, 0.0
    r = ramp(run.rounds, at, max(1, 0.05 * run.rounds))
    run.accuracy = run.accuracy * (1 - r)
    run.silent_extra = r
    top = rng.uniform(5, 11)
    late = ramp(run.rounds, at, max(2, 0.25 * run.rounds))
    run.entropy = run.entropy + (top - run.entropy) * late
    run.kl_level = run.kl_level + rng.uniform(1, 8) * late
    run.grad = run.grad * (1 + rng.uniform(10, 60) * late)
    run.form = run.form * (1 - r)
    run.cut = np.maximum(run.cut, late)


def _kl_runaway(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.kl = True
    run.kl_level = run.kl_level + rng.uniform(2, 20) * ramp(run.rounds, at, 0.4 * run.rounds) ** 2


def _reward_collapse(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.accuracy = np.maximum(run.accuracy, rng.uniform(0.4, 0.5))
    run.accuracy = run.accuracy * (1 - rng.uniform(0.9, 1) * ramp(run.rounds, at, 0.08 * run.rounds))
    run.form = run.form * (1 - rng.uniform(0.7, 1) * ramp(run.rounds, at, 0.08 * run.rounds))


def _reward_zero(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.accuracy = np.zeros(run.rounds)
    run.form = np.zeros(run.rounds)


def _entropy_explosion(rng: np.random.Generator, run: Curves, at: int) -> None:
    rise = ramp(run.rounds, at, rng.uniform(0.2, 0.5) * run.rounds)
    run.entropy = run.entropy + (rng.uniform(3, 11) - run.entropy) * rise
    run.accuracy = run.accuracy * (1 - 0.8 * rise)


def _entropy_collapse(rng: np.random.Generator, run: Curves, at: int) -> None:
    fall = ramp(run.rounds, at, 0.25 * run.rounds)
    run.entropy = run.entropy * (1 - fall) + rng.uniform(0.002, 0.02) * fall
    run.accuracy = np.minimum(run.accuracy, rng.uniform(0.3, 0.5))
    run.silent_extra = 0.9 * fall


def _format_hacked(rng: np.random.Generator, run: Curves, at: int) -> None:
    up = ramp(run.rounds, at, 0.2 * run.rounds)
    start = rng.uniform(0.4, 0.7)
    run.form = start + (0.97 - start) * up
    level = rng.uniform(0.5, 0.65)
    run.accuracy = level * (1 - rng.uniform(0.45, 0.9) * ramp(run.rounds, at, 0.3 * run.rounds))
    run.format_weight = float(rng.choice([0.5, 1.0]))


def _length_explosion(rng: np.random.Generator, run: Curves, at: int) -> None:
    up = ramp(run.rounds, at, 0.3 * run.rounds)
    run.length = run.length[0] * (1 + rng.uniform(2, 5) * up)
    run.cut = 0.03 + rng.uniform(0.5, 0.9) * up
    run.accuracy = run.accuracy[0] * (1 - rng.uniform(0, 0.7) * up)


def _length_collapse(rng: np.random.Generator, run: Curves, at: int) -> None:
    down = ramp(run.rounds, at, 0.2 * run.rounds)
    run.length = 300 * (1 - rng.uniform(0.85, 0.98) * down)
    run.accuracy = rng.uniform(0.3, 0.6) * (1 - rng.uniform(0.2, 0.9) * down)


def _all_truncated(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.cut = np.full(run.rounds, rng.uniform(0.985, 1))
    run.length = np.full(run.rounds, 256.0)
    run.accuracy = np.full(run.rounds, rng.uniform(0, 0.01))


def _no_signal(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.accuracy = np.full(run.rounds, rng.choice([0.01, 0.02]))
    run.silent_extra = np.full(run.rounds, rng.uniform(0.9, 1.0))
    run.format_weight = 0.0


def _clip_saturation(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.clip = run.clip + rng.uniform(0.2, 0.4) * ramp(run.rounds, at, 0.2 * run.rounds)


def _ratio_explosion(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.ratio_mean = run.ratio_mean * 10 ** (rng.uniform(1, 3) * ramp(run.rounds, at, 0.3 * run.rounds))
    run.ratio_max = run.ratio_max * 10 ** (rng.uniform(3, 6) * ramp(run.rounds, at, 0.3 * run.rounds))


def _grad_spike(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.grad = np.full(run.rounds, run.grad[0])
    places = rng.choice(np.arange(10, run.rounds - 1), size=min(4, max(1, run.rounds // 15)), replace=False)
    run.grad[places] *= rng.uniform(40, 300, len(places))
    if run.single:  # every round has a gradient, else a spike may fall into a round that has none
        run.kl = True


def _grad_growth(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.grad = run.grad * (1 + rng.uniform(12, 60) * ramp(run.rounds, at, 0.3 * run.rounds))


def _lr_too_high(rng: np.random.Generator, run: Curves, at: int) -> None:
    t = np.arange(run.rounds)
    pace = 12.0 if run.single else 1.2
    run.accuracy = rng.uniform(0.45, 0.7) * np.exp(-t / pace) + rng.uniform(0, 0.05)
    run.form = 0.3 + 0.68 * (1 - np.exp(-t / pace))


def _mismatch_growing(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.mismatch = run.mismatch + rng.uniform(0.08, 0.4) * ramp(run.rounds, at, 0.5 * run.rounds)


def _stale(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.lag = np.maximum(0, np.arange(run.rounds) - at)


def _eval_gap(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.accuracy = 0.4 + 0.4 * ramp(run.rounds, 0, run.rounds)
    run.eval_shift = 0.05 - rng.uniform(0.35, 0.6) * ramp(run.rounds, at, 0.4 * run.rounds)


def _plateau(rng: np.random.Generator, run: Curves, at: int) -> None:
    level = rng.uniform(0.2, 0.6)
    run.accuracy = level - 0.15 * np.exp(-np.arange(run.rounds) / (0.06 * run.rounds))


def _loss_zero(rng: np.random.Generator, run: Curves, at: int) -> None:
    run.loss = rng.normal(0, 1e-7, run.rounds)


@dataclass(frozen=True)
class Failure:
    """How one failure mode is drawn."""

    bend: Bend
    multi: tuple[int, ...] = (20, 40, 80)
    single: tuple[int, ...] = (120, 300)
    begins: tuple[float, float] = (0.25, 0.5)


FAILURES: dict[str, Failure] = {
    "kl-takeover": Failure(_kl_takeover),
    "kl-runaway": Failure(_kl_runaway),
    "reward-collapse": Failure(_reward_collapse),
    "reward-zero": Failure(_reward_zero, multi=(5, 12), single=(12, 60)),
    "entropy-explosion": Failure(_entropy_explosion),
    "entropy-collapse": Failure(_entropy_collapse),
    "format-hacked": Failure(_format_hacked, single=(300, 500)),
    "length-explosion": Failure(_length_explosion),
    "length-collapse": Failure(_length_collapse),
    "all-truncated": Failure(_all_truncated, multi=(4, 12), single=(12, 60)),
    "no-signal": Failure(_no_signal, multi=(6, 12, 30), single=(40, 120)),
    "clip-saturation": Failure(_clip_saturation),
    "ratio-explosion": Failure(_ratio_explosion),
    "grad-spike": Failure(_grad_spike),
    "grad-growth": Failure(_grad_growth),
    "lr-too-high": Failure(_lr_too_high, multi=(8, 12, 20), single=(80, 150)),
    "mismatch-growing": Failure(_mismatch_growing),
    "stale": Failure(_stale),
    "eval-gap": Failure(_eval_gap, single=(300, 500)),
    "plateau": Failure(_plateau, multi=(40, 80), single=(300, 500)),
    "loss-zero-by-construction": Failure(_loss_zero, multi=(8, 20), single=(20, 100)),
}


def failing(name: str, seed: int, single: bool = False) -> tuple[Rows, int]:
    """A run with one failure mode, and the round in which it begins."""
    failure = FAILURES[name]
    rng = np.random.default_rng([seed, 7, sorted(FAILURES).index(name), int(single)])
    rounds = int(rng.choice(failure.single if single else failure.multi))
    run = healthy_curves(rng, rounds, single)
    at = int(rng.uniform(*failure.begins) * rounds)
    failure.bend(rng, run, at)
    return observe(rng, run), at + 1


def book_like(seed: int, rounds: int, accuracy: np.ndarray, entropy: np.ndarray, **more: Any) -> Rows:
    """A run as the book logs them, already under our names: one prompt, few keys, evaluation every 50 rounds."""
    rng = np.random.default_rng([seed, 13])
    form, weight, conditional = more.get("form"), more.get("weight", 1.0), more.get("conditional", False)
    rows: Rows = []
    for t in range(rounds):
        kind = rng.random()
        p = float(np.clip(accuracy[t], 0, 1))
        chance = rng.beta(max(1e-3, 0.6 * p), max(1e-3, 0.6 * (1 - p)))
        right = rng.random(8) < chance
        shaped = rng.random(8) < form[t] if form is not None else np.zeros(8, bool)
        if conditional:
            shaped = right
        reward = right + weight * shaped
        spread = reward.max() > reward.min()
        row = {
            "round": t + 1,
            "policy/loss": float(rng.normal(0, 0.4)) * spread,
            "reward/total": float(reward.mean()),
            "advantage/mean": 0.0,
            "advantage/std": 0.9998 if spread else 0.0,
            "response/length": float(np.clip(350 * rng.lognormal(0, 0.5), 20, 1024)),
            "policy/entropy": float(entropy[t] * rng.lognormal(0, 0.6 + 0.4 * (kind < 0.1))),
        }
        if form is not None:
            row |= {"reward/format": float(shaped.mean()), "reward/correctness": float(right.mean())}
        if "evals" in more and ((t + 1) % 50 == 0 or t == 0):
            row["eval/correctness"] = more["evals"][(t + 1) // 50]
        rows.append(row)
    return rows


def blocks(levels: list[float], width: int) -> np.ndarray:
    """Piecewise constant levels of `width` rounds each."""
    return np.repeat(np.array(levels), width)
