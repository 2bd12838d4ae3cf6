"""The settings of one objective, and which of them make sense together. Imports no heavy library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from learner import losses
from learner.config import (
    Aggregate,
    CorrectionConfig,
    CorrectionKind,
    KLConfig,
    KLKind,
    LearnerConfig,
    LossName,
    RatioLevel,
)
from rollout.types import UserError

LENGTH_NORMALISED: tuple[KLKind, ...] = ("k1_book", "book_weighted")


@dataclass(frozen=True)
class Objective:
    """What one optimizer step minimises; the defaults are those of the preset grpo.

    A combination that makes no sense raises UserError (a ValueError) with the reason.
    """

    loss: LossName = "ppo"
    """reinforce, ppo, book, cispo, or the path of a file with a policy_loss."""
    ratio_level: RatioLevel = "token"
    """What a ratio belongs to: token, sequence_sum (whole response, as in R1 and the book), sequence_mean (GSPO).
    With a sequence ratio the policy term is one number per response and its loss the mean over responses."""
    clip_low: float = 0.2
    """Ratios below 1 - this are clipped."""
    clip_high: float = 0.28
    """Ratios above 1 + this are clipped."""
    dual_clip: float | None = None
    """Bound c: the loss of a negative advantage is at most -c * advantage; at least 1 + clip_high."""
    cispo_cap: float = 5.0
    """Absolute cap of the CISPO weight."""
    aggregate: Aggregate | None = None
    """How token values become one number; None: token_mean, or sequence_mean beside a sequence ratio."""
    constant_length: float | None = None
    """Divisor L of the constant aggregate, fixed for the run."""
    kl: KLKind = "none"
    """Estimator of the KL term."""
    kl_coef: float = 0.001
    """Weight of the KL term (where no coefficients per response are given)."""
    kl_length_normalise: bool = False
    """Divide a response's summed differences by its length (k1_book and book_weighted only)."""
    correction: CorrectionKind = "none"
    """Importance weight old/sampler on the policy term: truncated (tis) or masked."""
    correction_cap: float = 2.0
    """Largest weight."""
    correction_floor: float = 0.0
    """Smallest weight that the masked kinds keep."""
    correction_geometric_mean: bool = False
    """A response's weight is the geometric mean over its tokens instead of the product."""
    off_policy_delta: float | None = None
    """Leave out responses with negative advantage and mean log(anchor/policy) above this."""
    off_policy_anchor: Literal["sampler", "old"] = "sampler"
    """Which policy that is measured from; the sampler falls back to old where its log-probs are not given."""

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything."""
        for field, values in _CHOICES.items():
            _one_of(field, getattr(self, field), values)
        _check_numbers(self)
        _check_ratio(self)
        _check_correction(self)
        if self.kl_length_normalise and self.kl not in LENGTH_NORMALISED:
            raise UserError(
                f"kl length_normalise divides a summed difference, and kl {self.kl} sums nothing over a response. Use "
                f"it with k1_book or book_weighted; for other kinds --learner.aggregate sequence_mean does the same."
            )

    @property
    def policy_loss(self) -> losses.PolicyLoss:
        """The loss that `loss` names."""
        return losses.load(self.loss)

    @property
    def sequence_ratio(self) -> bool:
        """True when the policy term is one number per response."""
        return self.ratio_level != "token" and bool(self.policy_loss.levels)

    @property
    def reduction(self) -> Aggregate:
        """The aggregate in force for token values."""
        return self.aggregate or ("sequence_mean" if self.sequence_ratio else "token_mean")

    @property
    def sequence_weight(self) -> bool:
        """True when the correction is one number per response."""
        return self.correction.endswith("_sequence")


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "ratio_level": get_args(RatioLevel),
    "aggregate": (*get_args(Aggregate), None),
    "kl": get_args(KLKind),
    "correction": get_args(CorrectionKind),
    "off_policy_anchor": ("sampler", "old"),
}


def objective_settings(
    learner: LearnerConfig, kl: KLConfig, correction: CorrectionConfig, default_constant_length: float
) -> Objective:
    """The objective that the configuration asks for; `default_constant_length` is the longest response allowed.

    The coefficient per domain is data of the batch (`kl_coefs`), not of the objective.
    """
    if learner.old_logprobs == "sampler" and correction.kind not in (None, "none"):
        raise UserError(
            f"--correction.kind {correction.kind} corrects the ratio from the learner's old log-probs back to the "
            f"sampler's, but with --learner.old-logprobs sampler the ratio starts at the sampler already: the weight "
            f"would count the same difference twice. Use --learner.old-logprobs recompute, or --correction.kind none."
        )
    # None leaves the coefficient to the default: a coefficient that was given beside kl none can then be told apart.
    coef = kl.coef if kl.coef is not None else Objective.kl_coef
    constant = learner.constant_length if learner.constant_length is not None else default_constant_length
    return Objective(
        loss=learner.loss,
        ratio_level=learner.ratio_level,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        dual_clip=learner.dual_clip,
        cispo_cap=learner.cispo_cap,
        aggregate=learner.aggregate,
        constant_length=constant if learner.aggregate == "constant" else None,
        kl=kl.kind,
        kl_coef=coef,
        kl_length_normalise=kl.length_normalise,
        correction=correction.kind or "none",
        correction_cap=correction.cap,
        correction_floor=correction.floor,
        correction_geometric_mean=correction.geometric_mean,
        off_policy_delta=correction.off_policy_delta,
        off_policy_anchor=correction.off_policy_anchor,
    )


def without_effect(objective: Objective) -> tuple[str, ...]:
    """One sentence per setting that differs from its default and does nothing here, for the plan to say aloud."""
    default, reads = Objective(), objective.policy_loss.settings
    notes = [
        f"{field} does nothing: the loss {objective.loss} does not read it."
        for field in ("clip_low", "clip_high", "dual_clip", "cispo_cap")
        if field not in reads and getattr(objective, field) != getattr(default, field)
    ]
    if not objective.policy_loss.levels and objective.ratio_level != "token":
        notes.append(f"ratio_level does nothing but shape policy/ratio_mean: the loss {objective.loss} has no ratio.")
    if objective.sequence_ratio and objective.kl in ("none", *LENGTH_NORMALISED) and objective.aggregate == "constant":
        notes.append("aggregate does nothing: with a sequence ratio the loss is a mean over responses.")
    if objective.correction_floor > 0 and not objective.correction.startswith("mask"):
        notes.append("correction_floor does nothing: only the mask kinds have a smallest weight.")
    if objective.correction_geometric_mean and not objective.sequence_weight:
        notes.append("correction_geometric_mean does nothing: the weight does not belong to a response.")
    return tuple(notes)


def _check_numbers(objective: Objective) -> None:
    for field in ("clip_low", "clip_high", "kl_coef", "correction_floor"):
        if not 0 <= getattr(objective, field) < math.inf:
            raise UserError(f"{field} must be a number of at least 0, got {getattr(objective, field)}.")
    for field in ("cispo_cap", "correction_cap"):
        if not 0 < getattr(objective, field) < math.inf:
            raise UserError(f"{field} must be a number above 0, got {getattr(objective, field)}.")
    length, delta = objective.constant_length, objective.off_policy_delta
    if objective.aggregate == "constant" and length is None:
        raise UserError("aggregate constant divides by constant_length, which is not set: give the longest response.")
    if length is not None and not 0 < length < math.inf:
        raise UserError(f"constant_length must be a number above 0, got {length}.")
    if delta is not None and not 0 <= delta < math.inf:
        raise UserError(f"off_policy_delta must be a number of at least 0, got {delta}.")


def _check_ratio(objective: Objective) -> None:
    policy_loss = objective.policy_loss
    if policy_loss.levels and objective.ratio_level not in policy_loss.levels:
        raise UserError(
            f"loss {objective.loss} is not defined for ratio_level {objective.ratio_level}, only for "
            f"{' and '.join(policy_loss.levels)}"
            + (": it weighs each token's log-prob by that token's own ratio." if objective.loss == "cispo" else ".")
        )
    if objective.sequence_ratio and objective.aggregate == "sequence_sum":
        raise UserError(
            f"aggregate sequence_sum beside ratio_level {objective.ratio_level}: the loss of a response is one number "
            f"there, and a sum over its tokens would multiply it by its length. Leave aggregate out, or use "
            f"sequence_mean."
        )
    dual = objective.dual_clip
    if dual is not None and "dual_clip" in policy_loss.settings and not 1 + objective.clip_high <= dual < math.inf:
        raise UserError(
            f"dual_clip {dual} lies below 1 + clip_high = {1 + objective.clip_high:g}: it would cut inside the range "
            f"that the clip leaves alone. Use at least {1 + objective.clip_high:g}."
        )


def _check_correction(objective: Objective) -> None:
    kind = objective.correction
    if kind.endswith("_token") and objective.sequence_ratio:
        raise UserError(
            f"correction {kind} weighs single tokens, but with ratio_level {objective.ratio_level} the loss is one "
            f"number per response. Use {kind.removesuffix('token')}sequence, or ratio_level token."
        )
    if kind.startswith("mask") and objective.correction_floor > objective.correction_cap:
        raise UserError(
            f"correction {kind} keeps weights from {objective.correction_floor:g} to {objective.correction_cap:g}: "
            f"that is none. The floor must not exceed the cap."
        )


def _one_of(field: str, value: str | None, values: tuple[str | None, ...]) -> None:
    if value not in values:
        names = ", ".join(name for name in values if name is not None)
        raise UserError(f"{field} {value!r} is unknown; choose one of: {names}.")
