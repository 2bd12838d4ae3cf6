"""What the schedule asks of the other options, and what those left open become under it: part of the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cluster.errors import PlanError
from cluster.run.config import Config
from cluster.schedule import Kind
from learner.config import CorrectionConfig, LearnerConfig
from learner.settings import Objective

WHOLE_ROUND = ("batch_std", "gdpo")
"""Advantages that are normalised over all responses of the round."""

OVERLAP: dict[Kind, str] = {
    "phased": "phased: generate, learn and sync take turns; every response is of the weights it is trained on",
    "streamed": "streamed: a minibatch is trained while later ones are still generated; every response is of the "
    "weights from before the round",
    "async": "async: the next round is generated while one is trained; responses may be up to {lag} weights versions "
    "behind",
}


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The schedule, and the options that follow it."""

    kind: Kind
    """phased, streamed or async."""
    max_lag: int
    """Weights versions a response may be behind; 0 unless async."""
    learner: LearnerConfig
    """As configured, with the old log-probs that were left open."""
    correction: CorrectionConfig
    """As configured, with the kind that was left open."""

    @property
    def text(self) -> str:
        """What overlaps, for people."""
        return OVERLAP[self.kind].format(lag=self.max_lag)


def scheduled(config: Config, *, shared: bool, separate: bool, notes: list[str]) -> Scheduled:
    """Choose the schedule, or raise PlanError for one that cannot be with the other options. Adds to `notes`.

    `shared`: engines and ranks sit on the same GPUs, where only one of them can be awake. `separate`: they have GPUs of
    their own.
    """
    asked = config.cluster.schedule
    against = _against_streaming(config)
    if asked == "auto":
        kind: Kind = "streamed" if separate and not against else "phased"
        if separate and against:
            notes.append(f"schedule phased instead of streamed: {against[0][0]}")
    else:
        kind = asked
    if shared and kind != "phased":
        raise PlanError(
            f"--cluster.schedule {kind} with --cluster.placement colocated: engines and ranks share their GPUs and "
            f"cannot work at the same time.\n  Use --cluster.schedule phased, or --cluster.placement separate."
        )
    if kind == "streamed" and against:
        reason, instead = against[0]
        raise PlanError(
            f"--cluster.schedule streamed: {reason}.\n  Use --cluster.schedule phased or async, or {instead}."
        )
    lag = config.cluster.max_lag
    if kind == "async" and lag < 1:
        raise PlanError(
            f"--cluster.max-lag {lag} with --cluster.schedule async: nothing may be behind, so nothing can overlap.\n"
            f"  Use --cluster.max-lag 1 or more, or --cluster.schedule streamed."
        )
    if kind != "async":
        default: Literal["sampler", "recompute"] = "sampler" if kind == "streamed" else "recompute"
        learner = replace(config.learner, old_logprobs=config.learner.old_logprobs or default)
        return Scheduled(kind, 0, learner, replace(config.correction, kind=config.correction.kind or "none"))
    return _behind(config, lag, notes)


def _against_streaming(config: Config) -> list[tuple[str, str]]:
    """(reason, what to use instead) of everything that needs the whole round before its first step."""
    learner, found = config.learner, []
    if learner.advantage in WHOLE_ROUND:
        found.append(
            (
                f"--learner.advantage {learner.advantage} is normalised over all responses of the round, which are "
                f"not there when the first minibatch is trained",
                f"--learner.advantage {'gdpo_group' if learner.advantage == 'gdpo' else 'group'}",
            )
        )
    if config.filter.dynamic_sampling:
        found.append(
            (
                "--filter.dynamic-sampling draws other prompts for groups without signal when the round is there; "
                "which ones would depend on which minibatch was faster",
                "leave --filter.dynamic-sampling out",
            )
        )
    if learner.old_logprobs == "recompute":
        found.append(
            (
                "--learner.old-logprobs recompute needs all responses before the first step changes the policy",
                "--learner.old-logprobs sampler (the default there: it is of the same weights)",
            )
        )
    if config.correction.kind not in (None, "none"):
        found.append(
            (
                f"--correction.kind {config.correction.kind} corrects from recomputed old log-probs, and streamed "
                f"takes the sampler's",
                "--correction.kind none",
            )
        )
    return found


def _behind(config: Config, lag: int, notes: list[str]) -> Scheduled:
    """Async: importance correction is on, unless it was turned off or the ratio starts at the sampler."""
    old, kind = config.learner.old_logprobs or "recompute", config.correction.kind
    learner, correction = replace(config.learner, old_logprobs=old), config.correction
    if kind == "none":
        notes.append(f"no importance correction, though responses may be {lag} weights versions behind")
    elif kind is None and old == "sampler":
        correction = replace(correction, kind="none")
        notes.append("the ratio starts at the sampler's log-probs and measures the lag itself: no further correction")
    elif kind is None:
        by_response = Objective(loss=learner.loss, ratio_level=learner.ratio_level).sequence_ratio
        correction = replace(
            correction,
            kind="tis_sequence" if by_response else "tis_token",
            # The weight is of the same make as the ratio it stands beside.
            geometric_mean=correction.geometric_mean or (by_response and learner.ratio_level == "sequence_mean"),
        )
        notes.append(
            f"responses may be {lag} weights versions behind: truncated importance weights "
            f"(--correction.kind {correction.kind}, cap {correction.cap:g})"
        )
    return Scheduled("async", lag, learner, correction)
