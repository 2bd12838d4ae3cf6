"""Form and substance: the format reward is being farmed, or the policy is thrown off within the first rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.run.robust import Array, Shift, change_point, find_shift, noise, rolling_mean
from cluster.run.rules import Sign, rule
from cluster.run.series import RunView, went

NEEDS = (("reward/correctness",), ("reward/format",))


@dataclass(frozen=True, slots=True)
class _Aligned:
    """Rounds in which both parts are known."""

    rounds: Array
    correctness: Array
    format: Array
    total: Array


def _aligned(view: RunView) -> _Aligned:
    correctness, form = view.column("reward/correctness"), view.column("reward/format")
    both = ~np.isnan(correctness) & ~np.isnan(form)
    return _Aligned(view.rounds[both].astype(float), correctness[both], form[both], view.column("reward/total")[both])


@rule(
    "format-hacked",
    needs=NEEDS,
    cause="Format is the easier part of the reward and pays whether the answer is right or not, so the policy collects "
    "it and lets correctness go; the mean reward hides this. Where all answers of a group are equally right, dividing "
    "by the group's std gives format full weight however small --reward.format-weight is.",
    cure="(1) --reward.conditional-format: no format reward without a right answer. (2) --learner.advantage no_std or "
    "gdpo, which keep the weights meaningful. (3) Lower --learner.lr and resume from before this round. (4) A smaller "
    "--reward.format-weight alone does not help (see the cause).",
)
def format_hacked(view: RunView) -> Sign | None:
    """Format up or saturated while correctness falls, or stays where it was after format is saturated."""
    both = _aligned(view)
    if len(both.rounds) < (60 if view.single else 6):
        return None
    return _falling(view, both) or _stalled(view, both)


def _falling(view: RunView, both: _Aligned) -> Sign | None:
    fall = None
    scale = max(1.0, float(both.correctness.max()))  # elsewhere a right answer may pay 2
    for widths, z in _tests(view, len(both.rounds)):
        floor = scale * view.reward_floor()
        fall = fall or find_shift(both.correctness, widths, floor, relative=0.2, absolute=0.06 * scale, z=z)
    if fall is None:
        return None
    width = fall.late.stop - fall.late.start
    before = min(float(both.format[fall.early].mean()), float(both.format[:width].mean()))
    after = max(float(both.format[fall.late].mean()), float(both.format[fall.late.start :].mean()))
    error = max(noise(both.format), view.reward_floor() / 2) * np.sqrt(2 / width)
    risen = after - before >= max(0.05, 2 * error)
    # A saturated format has no room to rise: then the sum must stand still, else this is a plain collapse.
    saturated = after >= 0.9 and before >= 0.9 and not _total_fell(both, fall)
    half = 0.5 * min(1.0, float(both.format.max()))  # elsewhere a format part may pay half a point at most
    if not (risen and after >= half) and not saturated:
        return None
    evidence = {"reward/correctness": went(fall.before, fall.after), "reward/format": went(before, after)}
    if not np.isnan(both.total[fall.late]).any():
        totals = float(np.nanmean(both.total[fall.early])), float(np.nanmean(both.total[fall.late]))
        evidence["reward/total"] = went(*totals)
    lasting = view.single or float(both.correctness[-width:].mean()) <= (fall.before + fall.after) / 2
    return Sign("critical" if lasting else "warning", _round_at(both, fall.start), evidence)


def _tests(view: RunView, count: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Window widths and the standard errors asked of each: narrow windows of noisy rounds fall far by chance."""
    if not view.single:
        return ((view.reward_widths(count), 5.0),)
    evals = view.series("eval/correctness").values
    best = np.maximum.accumulate(evals)[:-1] if len(evals) > 3 else np.empty(0)
    drop = best - np.maximum(evals[1:], np.append(evals[2:], np.inf)) if len(best) else best
    witness = bool(np.any(drop >= np.maximum(0.25 * best, 0.1)))  # evaluation says so too: less is asked here
    return (((25, 50), 4.5), ((100, 150, 200), 2.0 if witness else 3.5))


def _total_fell(both: _Aligned, fall: Shift) -> bool:
    before, after = float(np.nanmean(both.total[fall.early])), float(np.nanmean(both.total[fall.late]))
    return not after >= 0.75 * before  # also when the total is not logged


def _stalled(view: RunView, both: _Aligned) -> Sign | None:
    """Format went from partly to always right, and correctness has not moved since."""
    count = len(both.rounds)
    width = 25 if view.single else 3
    smooth = rolling_mean(both.format, width)
    start = float(smooth[0])
    full = np.flatnonzero(smooth >= max(0.85, start + 0.25))
    if not len(full):
        return None
    since = int(full[0])
    rest = count - since
    if rest < max(100 if view.single else 8, count // 4):
        return None
    early, late = float(both.correctness[: max(width, since)].mean()), float(both.correctness[-(rest // 2) :].mean())
    error = max(noise(both.correctness), view.reward_floor() / 2) * np.sqrt(4 / rest)
    if (
        float(both.format[since:].mean()) < 0.8
        or late >= 0.6
        or late - early > max(0.03, 2 * error)
        or not _format_pays(both, rest // 2)
    ):
        return None
    evidence = {
        "reward/format": went(start, float(smooth[-1])),
        "reward/correctness": f"{went(early, late)} although format is there since round {_round_at(both, since)}",
    }
    return Sign("warning", _round_at(both, since), evidence)


def _format_pays(both: _Aligned, rest: int) -> bool:
    """Whether a good part of the reward does not come from correctness (True also when the total is not logged)."""
    total, correctness = float(np.mean(both.total[-rest:])), float(np.mean(both.correctness[-rest:]))
    return np.isnan(total) or total - correctness >= 0.25 * total


def _round_at(both: _Aligned, index: int) -> int:
    return int(both.rounds[min(index, len(both.rounds) - 1)])


@rule(
    "lr-too-high",
    needs=NEEDS,
    cause="Within the first rounds correctness falls while format rises: the steps are so large that the policy learns "
    "the easiest pattern and forgets the task before correctness can teach anything.",
    cure="(1) Start again with a --learner.lr three to ten times lower (1e-6 is usual for a model of billions of "
    "parameters). (2) --learner.warmup-steps. (3) More responses per step (--rollouts up or --minibatches down). "
    "(4) Bound the ratio: --learner.clip-low 0.2 --learner.clip-high 0.28.",
)
def lr_too_high(view: RunView) -> Sign | None:
    """Correctness falls by a third, and format rises, in the opening of the run."""
    both = _aligned(view)
    found = _fall_in_noise(both) if view.single else _fall_at_once(view, both)
    if found is None:
        return None
    early, late = found
    old, new = float(both.correctness[early].mean()), float(both.correctness[late].mean())
    before, after = float(both.format[early].mean()), float(both.format[late].mean())
    if after - before < 0.1:
        return None
    evidence = {"reward/correctness": went(old, new), "reward/format": went(before, after)}
    rate = view.series("policy/lr")
    if len(rate):
        evidence["policy/lr"] = f"{float(rate.values.max()):.1e}"
    start = early.start + change_point(both.correctness[early.start : late.stop])
    return Sign("critical", _round_at(both, start), evidence)


def _fall_at_once(view: RunView, both: _Aligned) -> tuple[slice, slice] | None:
    """Many prompts per round: a clear fall within the first dozen rounds, from a level of the first four."""
    fall = find_shift(both.correctness[:12], (1, 2, 3), view.reward_floor(), relative=0.3, absolute=0.05, z=4.0)
    return None if fall is None or fall.early.start > 3 else (fall.early, fall.late)


def _fall_in_noise(both: _Aligned) -> tuple[slice, slice] | None:
    """One prompt per round: the first 15 rounds against rounds 31 to 60, where both parts must have moved."""
    early, late = slice(0, 15), slice(30, 60)
    if len(both.rounds) < 50:
        return None
    moves = []
    for part, sign in ((both.correctness, 1.0), (both.format, -1.0)):
        error = np.sqrt(max(0.04, part[early].var()) / 15 + max(0.01, part[late].var()) / len(part[late]))
        moves.append(sign * (part[early].mean() - part[late].mean()) / error)
    fell = both.correctness[late].mean() <= 0.5 * both.correctness[early].mean()
    return (early, late) if fell and min(moves) >= 2.2 and sum(moves) >= 6.0 else None
