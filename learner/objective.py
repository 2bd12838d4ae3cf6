"""One objective on given tensors: policy term, KL term, corrections, and the metrics of the family.

    loss, metrics = objective_loss(Objective(...), logprobs, old_logprobs, response_mask, advantages)

evaluates a whole minibatch. `objective_terms` evaluates one microbatch of it: the losses of all microbatches of all
ranks add up to the loss of the minibatch, and their partials merge into its metrics.

Everything is computed in float64, whatever the log-probs come in: these tensors are small beside the logits, and the
sum over a long response keeps its digits. Gradients flow back in the dtype of the log-probs. Padding may hold anything,
NaN included: it is replaced before any arithmetic. Letters: B responses, T tokens.

Log-probs must be scored on the distribution that was sampled from (temperature, top-p, top-k). Which tokens top-p or
top-k kept is not known here, so sampling that cuts the distribution is refused before a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.aggregate import Denominators, count_denominators, reduce_responses, reduce_tokens, valid_tokens
from learner.corrections import importance_weights, off_policy_mask
from learner.kl import PER_RESPONSE, kl_term
from learner.losses import LossInputs
from learner.partials import Partial, finish_metrics, merge_partials, pack_partial, unpack_partial
from learner.ratios import Ratios, ratios
from learner.settings import Objective, objective_settings

__all__ = [
    "Denominators",
    "Objective",
    "Partial",
    "finish_metrics",
    "merge_partials",
    "objective_loss",
    "objective_settings",
    "objective_terms",
    "pack_partial",
    "unpack_partial",
]


def objective_loss(
    objective: Objective,
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    *,
    kl_coefs: Tensor | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss (0-d float64, with gradient) and metrics of a whole minibatch, whose denominators are its own.

    `logprobs` (B, T) under the policy, with gradient; `old_logprobs`, `ref_logprobs` (needed by a KL term),
    `sampler_logprobs` (needed by a correction) (B, T), constant; `response_mask` (B, T), not 0 on response tokens, end
    token included; `advantages` (B,). `kl_coefs` (B,) replaces `objective.kl_coef`; `counted` (B,) is False where the
    overlong filter takes a response out: it contributes nothing and still counts as a response.

    Metrics: `policy/loss` is the policy term without KL; the loss is `policy/loss + policy/kl_loss`.
    """
    denominators = count_denominators(response_mask, counted)
    loss, partial = objective_terms(
        objective,
        logprobs,
        old_logprobs,
        response_mask,
        advantages,
        denominators,
        ref_logprobs,
        sampler_logprobs,
        kl_coefs,
        counted,
    )
    return loss, finish_metrics(partial, denominators)


def objective_terms(
    objective: Objective,
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    denominators: Denominators,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    kl_coefs: Tensor | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, Partial]:
    """One microbatch's share of the minibatch's loss, and its partial metrics.

    Tensors as for `objective_loss`; `denominators` are those of the whole minibatch over ranks and microbatches.
    Give `sampler_logprobs` only where they are not the old log-probs themselves, else the mismatch reads 0.
    """
    given = _cleaned(
        logprobs, old_logprobs, response_mask, advantages, ref_logprobs, sampler_logprobs, kl_coefs, counted
    )
    if denominators.responses < 1:
        raise ValueError("the minibatch has no response: its denominators are 0.")
    stats: dict[str, Tensor | float] = {}
    loss = _policy_term(objective, given, denominators, stats)
    stats["loss"] = loss.detach()
    if objective.kl != "none":
        loss = loss + _kl_loss(objective, given, denominators, stats)
    if given.sampler is not None:
        gap = (given.sampler - given.old).abs()
        stats |= {"mismatch": gap.sum(), "mismatch_tokens": given.valid.sum(), "mismatch_max": _max(gap, given.valid)}
    return loss, _as_floats(stats)


@dataclass(frozen=True, slots=True)
class _Given:
    """The tensors of a microbatch in float64, with 0 wherever there is no valid token."""

    logprobs: Tensor
    old: Tensor
    valid: Tensor
    advantages: Tensor
    ref: Tensor | None
    sampler: Tensor | None
    kl_coefs: Tensor | None


def _cleaned(
    logprobs: Tensor,
    old: Tensor,
    mask: Tensor,
    advantages: Tensor,
    ref: Tensor | None,
    sampler: Tensor | None,
    kl_coefs: Tensor | None,
    counted: Tensor | None,
) -> _Given:
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs must be (B, T), got shape {tuple(logprobs.shape)}.")
    by_token = {"old_logprobs": old, "response_mask": mask, "ref_logprobs": ref, "sampler_logprobs": sampler}
    by_response = {"advantages": advantages, "kl_coefs": kl_coefs, "counted": counted}
    for expected, tensors in ((logprobs.shape, by_token), (logprobs.shape[:1], by_response)):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape != expected:
                raise ValueError(f"{name} must be {tuple(expected)} to go with logprobs, got {tuple(tensor.shape)}.")
    valid = valid_tokens(mask, counted)
    exists = valid.any(dim=1)

    def constant(tensor: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, tensor.detach().double(), 0.0)

    return _Given(
        logprobs=torch.where(valid, logprobs.double(), 0.0),
        old=constant(old, valid),
        valid=valid,
        advantages=constant(advantages, exists),
        ref=None if ref is None else constant(ref, valid),
        sampler=None if sampler is None else constant(sampler, valid),
        kl_coefs=None if kl_coefs is None else constant(kl_coefs, exists),
    )


def _policy_term(
    objective: Objective, given: _Given, denominators: Denominators, stats: dict[str, Tensor | float]
) -> Tensor:
    """Unreduced loss, times the weights of the corrections, reduced."""
    has_ratio, by_response = bool(objective.policy_loss.levels), objective.sequence_ratio
    with torch.set_grad_enabled(has_ratio and torch.is_grad_enabled()):
        measured = ratios(given.logprobs, given.old, given.valid, objective.ratio_level)
    # A loss without a ratio works on tokens, whatever level its ratio is reported at.
    units = measured if by_response or objective.ratio_level == "token" else _no_ratio(given)
    advantages = given.advantages if by_response else given.advantages[:, None].expand_as(given.valid)
    inputs = LossInputs(
        ratio=units.values,
        logprobs=given.logprobs.sum(dim=1) if by_response else given.logprobs,
        advantages=advantages,
        valid=units.valid,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        cispo_cap=objective.cispo_cap,
    )
    terms = objective.policy_loss.function(inputs)
    if terms.loss.shape != units.valid.shape:
        raise ValueError(
            f"policy loss {objective.loss} returned shape {tuple(terms.loss.shape)} for units of shape "
            f"{tuple(units.valid.shape)}; it must return one loss per unit, unreduced."
        )
    keep = _correction(objective, given, stats)
    weight = keep if by_response or keep.dim() == 2 else keep[:, None]
    loss = torch.where(units.valid, terms.loss * weight, 0.0)
    _ratio_stats(measured, stats)
    _clip_stats(terms.clipped, units.valid, stats)
    pushing = units.valid & (weight != 0) & (advantages != 0)
    stats["effective_tokens"] = (given.valid & (pushing[:, None] if by_response else pushing)).sum()
    if by_response:
        return reduce_responses(loss, denominators)
    return reduce_tokens(loss, given.valid, objective.reduction, denominators, objective.constant_length)


def _no_ratio(given: _Given) -> Ratios:
    return Ratios(torch.ones_like(given.old), given.valid, torch.zeros(()))


def _correction(objective: Objective, given: _Given, stats: dict[str, Tensor | float]) -> Tensor:
    """Constant weight of the policy term, (B, T) or (B,)."""
    weight = torch.ones_like(given.advantages)
    if objective.correction != "none":
        if given.sampler is None:
            raise ValueError(f"correction {objective.correction} needs sampler_logprobs.")
        weights = importance_weights(
            objective.correction,
            given.old,
            given.sampler,
            given.valid,
            cap=objective.correction_cap,
            floor=objective.correction_floor,
            geometric_mean=objective.correction_geometric_mean,
        )
        weight = weights.applied
        count = weights.valid.sum()
        changed = "capped" if objective.correction.startswith("tis") else "masked"
        stats |= {
            "weight": torch.where(weights.valid, weights.raw, 0.0).sum(),
            "weights": count,
            "weight_max": _max(weights.raw, weights.valid),
            changed: (weights.valid & (weights.raw != weights.applied)).sum(),
            f"{changed}_units": count,
            "correction_clamped": weights.clamped,
        }
    if objective.off_policy_delta is None:
        return weight
    anchor = given.old if given.sampler is None or objective.off_policy_anchor == "old" else given.sampler
    left_out = off_policy_mask(given.logprobs, anchor, given.valid, given.advantages, objective.off_policy_delta)
    stats |= {"off_policy": left_out.sum(), "off_policy_units": given.valid.any(dim=1).sum()}
    return torch.where(left_out if weight.dim() == 1 else left_out[:, None], 0.0, weight)


def _kl_loss(
    objective: Objective, given: _Given, denominators: Denominators, stats: dict[str, Tensor | float]
) -> Tensor:
    if given.ref is None:
        raise ValueError(f"kl {objective.kl} needs ref_logprobs.")
    term = kl_term(
        objective.kl,
        given.logprobs,
        given.ref,
        given.old,
        given.valid,
        length_normalise=objective.kl_length_normalise,
    )

    def reduced(values: Tensor) -> Tensor:
        if objective.kl in PER_RESPONSE:
            return reduce_responses(values, denominators)
        return reduce_tokens(values, given.valid, objective.reduction, denominators, objective.constant_length)

    coef: Tensor | float = objective.kl_coef
    if given.kl_coefs is not None:
        coef = given.kl_coefs if term.values.dim() == 1 else given.kl_coefs[:, None]
    loss = reduced(coef * term.values)
    stats |= {
        "kl": reduced(term.values.detach()),
        "kl_loss": loss.detach(),
        "kl_units": given.valid.any(dim=1).sum(),
        "kl_clamped": term.clamped,
    }
    return loss


def _ratio_stats(measured: Ratios, stats: dict[str, Tensor | float]) -> None:
    values = measured.values.detach()
    stats |= {
        "ratio": torch.where(measured.valid, values, 0.0).sum(),
        "ratios": measured.valid.sum(),
        "ratio_max": _max(values, measured.valid),
        "clamped": measured.clamped,
    }


def _clip_stats(clipped: Mapping[str, Tensor], valid: Tensor, stats: dict[str, Tensor | float]) -> None:
    for bound, where in clipped.items():
        stats |= {f"clip_{bound}": (where & valid).sum(), f"clip_{bound}_units": valid.sum()}


def _max(values: Tensor, valid: Tensor) -> Tensor | float:
    if values.numel() == 0:
        return -math.inf
    return torch.where(valid, values, -math.inf).max()


def _as_floats(stats: dict[str, Tensor | float]) -> Partial:
    """One transfer from the device for all numbers together."""
    on_device = {name: value.detach().double() for name, value in stats.items() if isinstance(value, Tensor)}
    numbers = torch.stack([value.to(next(iter(on_device.values())).device) for value in on_device.values()]).tolist()
    plain = {name: value for name, value in stats.items() if not isinstance(value, Tensor)}
    return dict(zip(on_device, numbers, strict=True)) | plain
