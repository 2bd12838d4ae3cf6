"""Rewards: never any, gone, standing still."""

from __future__ import annotations

import math

import numpy as np

from cluster.run.findings import Severity
from cluster.run.robust import find_shift, longest_runs, noise
from cluster.run.rules import Sign, rule
from cluster.run.series import SPREAD_KEYS, RunView, Series, number, went


@rule(
    "reward-zero",
    needs=(("reward/total", "reward/correctness"),),
    cause="No response has earned anything since the first round: the checker rejects everything (wrong answer column, "
    "an extraction that never matches), the format that gates the reward is out of reach, or the task is far too hard.",
    cure="(1) launch.py check-reward on your prompts: it shows what the checker makes of right answers. (2) Read a few "
    "responses in launch.py report: is there an answer where the checker looks? (3) A prompt that asks for "
    "the form in which the checker looks for it. (4) Easier prompts, or a larger --rollout.max-new-tokens.",
)
def reward_zero(view: RunView) -> Sign | None:
    """Nothing but zeros over enough responses to exclude hard prompts and bad luck."""
    for key in ("reward/total", "reward/correctness"):
        rewards = view.series(key)
        first = _zero_since_start(view, rewards, key)
        if first is not None:
            return first
    return _dead_part(view)


def _zero_since_start(view: RunView, rewards: Series, key: str) -> Sign | None:
    # Where a wrong answer costs something, nobody has earned anything as long as everybody pays exactly that.
    base = min(0.0, float(rewards.values[0])) if len(rewards) else 0.0
    nonzero = np.flatnonzero(np.abs(rewards.values - base) > 1e-9)
    rounds = int(nonzero[0]) if len(nonzero) else len(rewards)
    weak = len(nonzero) > 0 and len(rewards) >= 3 and not view.single and float(np.abs(rewards.values).max()) <= 0.002
    rounds = len(rewards) if weak else rounds
    sizes = view.series("responses").values
    responses = rounds * (float(np.median(sizes)) if len(sizes) else 8.0 if view.single else 256.0)
    if rounds < 2 or responses < 64 or (len(nonzero) and not weak and rounds < len(rewards)):
        return None  # a slow start that ended is no broken checker
    severity: Severity = "critical" if rounds >= 3 and responses >= 200 else "warning"
    seen = f"{number(float(rewards.values.max()))} at most in {rounds} rounds, {responses:.0f} responses"
    return Sign(severity, int(rewards.rounds[0]), {key: seen})


def _dead_part(view: RunView) -> Sign | None:
    """One part of the reward that is 0 for every response of two rounds running, although others are not."""
    parts = sorted({key for row in view.rows[-3:] for key in row if key.startswith("reward/")})
    for key in parts:
        if key in ("reward/total", "reward/std", "reward/correctness", "reward/overlong"):
            continue  # a punishment that nobody has earned is fine
        part = view.series(key)
        alive = np.flatnonzero(part.values)
        silent = len(part) - (int(alive[-1]) + 1 if len(alive) else 0)
        # Of a part that was paid before, two rounds without it may be chance.
        if silent >= 2 and (not len(alive) or silent > 2 * (len(part) - len(alive) - silent) + 3):
            return Sign(
                "warning",
                int(part.rounds[-silent]),
                {key: f"0 for every response in {silent} rounds running"},
                cause=f"The part {key.removeprefix('reward/')!r} of the reward is 0 for every response, so it teaches "
                "nothing: it looks for something the responses cannot contain (a tag that is already in the prompt, a "
                "wrong token) or that the prompt never asks for.",
                cure="(1) launch.py check-reward shows the part on real responses. (2) Ask for it in the prompt. (3) "
                "If it is not wanted, take it out of the reward (--reward.format-weight 0).",
            )
    return None


@rule(
    "reward-collapse",
    needs=(("reward/total", "reward/correctness"),),
    cause="The policy has lost what it could do: an update was too large, the engines sample with wrong weights, or "
    "responses have turned into noise. Look at which other metric moved first.",
    cure="(1) Resume from a checkpoint before this round with a lower --learner.lr. (2) Bound the ratio "
    "(--learner.clip-high 0.28, --learner.dual-clip 3) and sample as you score (--rollout.temperature 1 "
    "--rollout.top-p 1). (3) If entropy rises too, --kl.kind k3 with a small --kl.coef. (4) If mismatch/mean rises, it "
    "is the engines: see mismatch-growing.",
)
def reward_collapse(view: RunView) -> Sign | None:
    """A lasting fall to a small part of the best level."""
    signs = []
    for key in ("reward/total", "reward/correctness"):
        rewards = view.series(key)
        # Of rewards with a minus, parts can only be told from a share of right answers.
        if not len(rewards) or (rewards.values.min() < 0 and view.has("reward/correctness")):
            continue
        sign = _nothing_any_more(rewards) or _lasting_fall(view, rewards)
        if sign is not None:
            signs.append(sign)
    if (sign := _held_out_gone(view.series("eval/correctness"))) is not None:
        signs.append(sign)
    return max(signs, key=lambda sign: (sign.severity == "critical", -sign.since_round), default=None)


def _held_out_gone(held_out: Series) -> Sign | None:
    """Three evaluations and all after them are below a quarter of the one before training.

    A policy that is lost in the first rounds leaves no level of training rewards to compare with.
    """
    if len(held_out) < 4:
        return None
    before = float(held_out.values[0])
    gone = held_out.values < 0.25 * before
    since = len(gone) if not gone[-1] else int(np.flatnonzero(~gone)[-1]) + 1
    if len(gone) - since < 3 or before - float(held_out.values[since:].max()) < 0.15:
        return None
    after = float(held_out.values[since:].mean())
    return Sign("critical", int(held_out.rounds[since]), {held_out.key: went(before, after)})


def _lasting_fall(view: RunView, rewards: Series) -> Sign | None:
    base = min(0.0, float(rewards.values.min()))
    floor = view.reward_floor(max(1.0, float(np.abs(rewards.values).max())))
    steps: tuple[tuple[float, Severity], ...] = ((0.6, "critical"), (0.4, "warning"))
    for relative, severity in steps:
        widths = view.reward_widths(len(rewards))
        fall = find_shift(rewards.values - base, widths, floor, relative=relative, absolute=0.1, z=5.0)
        if fall is not None:
            since = int(rewards.rounds[min(fall.start, len(rewards) - 1)])
            width = fall.late.stop - fall.late.start
            if width < 10 and float(rewards.values[-width:].mean()) - base > (fall.before + fall.after) / 2:
                severity = "warning"  # a dip of a few rounds that is over
            seen = f"{went(fall.before + base, fall.after + base)} ({fall.z:.0f} sigma)"
            return Sign(severity, since, {rewards.key: seen})
    return None


def _nothing_any_more(rewards: Series) -> Sign | None:
    """Zeros in a row, too many to be chance given how often single rounds earned nothing before."""
    base = min(0.0, float(rewards.values.min()))
    earned = rewards.values - base
    nothing = earned <= 0.02 * float(earned.max())
    for start, stop in longest_runs(nothing):
        before = earned[:start]
        if stop - start < 4 or start < 4 or float(before.mean()) < 0.1:
            continue
        chance = max((float(nothing[:start].sum()) + 1) / (start + 2), 0.05)
        if (stop - start) * math.log(chance) <= math.log(1e-6):
            seen = f"{went(float(before.mean()) + base, base)} in {stop - start} rounds in a row"
            return Sign("critical", int(rewards.rounds[start]), {rewards.key: seen})
    return None


@rule(
    "plateau",
    needs=(("reward/correctness", "reward/total"),),
    cause="Accuracy has stopped rising well below what is possible, although there is still signal: the prompts that "
    "are left are out of reach, the steps are too small, or exploration is used up.",
    cure="(1) Other prompts: harder ones if most groups are all right, easier ones if most are all wrong. (2) More "
    "responses per prompt (--group-size). (3) If entropy is low, raise --learner.clip-high. (4) Raise --learner.lr "
    "a little, or stop: the run may be done.",
)
def plateau(view: RunView) -> Sign | None:
    """The last third is flat, below 0.7, and not flat for want of signal."""
    accuracy = view.accuracy
    count = len(accuracy)
    stretch = max(100 if view.single else 12, count // 3)
    if count < stretch * (1.2 if view.single else 1.5):
        return None
    late = accuracy.values[-stretch:]
    level = float(late.mean())
    spread = view.series(*SPREAD_KEYS).values[-stretch:]
    if level >= 0.7 or level <= 0.02 or (len(spread) and spread.mean() == 0):
        return None
    half = stretch // 2
    gain = float(late[half:].mean() - late[:half].mean())
    error = max(noise(late), view.reward_floor() / 4) * math.sqrt(4 / stretch)
    if abs(gain) > max(0.02, 2 * error):
        return None
    start = count - stretch
    while start > 0 and abs(accuracy.values[max(0, start - half) : start].mean() - level) <= max(0.02, 2 * error):
        start = max(0, start - half)
    span = f"{number(level)}, changing by {gain:+.3f} in the last {stretch} rounds"
    return Sign("info", int(accuracy.rounds[start]), {accuracy.key: span})
