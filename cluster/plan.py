"""The arithmetic before anything starts. Everything that relates two options is checked here and nowhere else.

Pure: a configuration, the resources and the facts about the model in; a Plan or a PlanError out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cluster import transport as transports
from cluster.adapter_plan import adapter_settings
from cluster.errors import PlanError
from cluster.model_facts import ModelFacts
from cluster.placement import Layout, find
from cluster.resources import Resources
from cluster.run.config import Config
from cluster.schedule import Kind
from cluster.schedule_plan import scheduled
from cluster.seating import seat
from learner.settings import Objective, objective_settings, without_effect


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything derived from the configuration; nothing is derived anywhere else."""

    prompts: int
    """P, prompts per round."""
    group_size: int
    """G."""
    minibatches: int
    """Optimizer steps per set of responses."""
    steps_per_round: int
    """Optimizer steps per round, inner updates included."""
    responses_per_round: int
    """Responses per round, inner updates included."""
    groups_per_minibatch: int
    """Whole groups per step."""
    device: str
    """cpu or cuda."""
    placement: str
    """cpu, colocated or separate."""
    layout: Layout
    """Where every engine and every rank sits."""
    schedule: Kind
    """phased, streamed or async."""
    max_lag: int
    """Weights versions a response may be behind; 0 unless async."""
    overlap: str
    """What overlaps, for people."""
    old_logprobs: str
    """recompute or sampler."""
    transport: str
    """How weights travel."""
    engines: int
    """Rollout engines."""
    ranks: int
    """Learner processes."""
    engine_dtype: str
    """Precision of the engines."""
    learner_dtype: str
    """Precision of the learner."""
    lr: float
    """Learning rate."""
    lora_rank: int
    """Rank of the adapter (0: all weights are trained)."""
    lora_alpha: float
    """Its output is multiplied by alpha / rank."""
    max_new_tokens: int
    """Longest response."""
    max_model_len: int
    """Longest prompt plus response an engine takes."""
    max_prompt_tokens: int
    """Longest prompt."""
    score_temperature: float
    """Temperature log-probs are scored at."""
    objective: Objective
    """What a step minimises."""
    kl_coef: float
    """KL coefficient (0 without KL)."""
    kl_domains: dict[str, float]
    """KL coefficient by domain."""
    mismatch_limit: float
    """Largest engine/learner difference."""
    eval_every: int
    """Rounds between evaluations (0: none)."""
    model: ModelFacts
    """The model."""
    notes: tuple[str, ...]
    """What the user should know before the start."""


def make_plan(config: Config, resources: Resources, model: ModelFacts) -> Plan:
    """Do the arithmetic, or raise PlanError: what was asked, why it cannot be, what to type."""
    notes: list[str] = []
    group_size, prompts, minibatches = split_rollouts(config.rollouts, config.group_size, config.minibatches)
    _at_least("--rounds", config.rounds, 1)
    _at_least("--trace-round", config.trace_round, 0)
    if config.trace_round > config.rounds:
        raise PlanError(
            f"--trace-round {config.trace_round}: the run has {config.rounds} rounds.\n"
            f"  Nearest: --trace-round {config.rounds}, or --rounds {config.trace_round}."
        )
    _at_least("--learner.inner-updates", config.learner.inner_updates, 1)
    _check_sampling(config)
    _check_kl(config)
    _check_offload(config)
    layout, about_processes = seat(config, resources, prompts)
    notes.extend(about_processes)
    device = "cuda" if find(layout.placement).ON_GPUS else "cpu"
    max_new = _recommended(config.rollout.max_new_tokens, model, "rollout.max_new_tokens", 1024)
    lr = _recommended(config.learner.lr, model, "learner.lr", 1e-6)
    if config.learner.lr is None and "learner.lr" in model.recommended:
        notes.append(f"learning rate {lr:g} and response length {max_new} are the model directory's own recommendation")
    max_prompt = config.data.max_prompt_tokens
    if model.max_positions:
        if max_new >= model.max_positions:
            raise PlanError(
                f"--rollout.max-new-tokens {max_new} leaves no room for a prompt: the model ends at "
                f"{model.max_positions} tokens. Try --rollout.max-new-tokens {model.max_positions // 2}."
            )
        max_prompt = min(max_prompt, model.max_positions - max_new)
    dtype = "float32" if device == "cpu" else "bfloat16"
    engine_dtype, learner_dtype = config.rollout.dtype or dtype, config.learner.dtype or dtype
    lora_rank, lora_alpha = adapter_settings(config, notes)
    placement = layout.placement
    turns = scheduled(config, shared=placement == "colocated", separate=placement == "separate", notes=notes)
    objective = objective_settings(turns.learner, config.kl, turns.correction, max_new)
    notes.extend(without_effect(objective))
    both_exact = engine_dtype == learner_dtype == "float32"
    inner = config.learner.inner_updates
    score_at = 1.0 if config.rollout.score_at_one else config.rollout.temperature
    unscored = config.rollout.allow_unscored_sampling
    limit = config.cluster.mismatch_limit or (0.02 if both_exact else 1.0)
    if unscored and config.cluster.mismatch_limit is None:
        limit = float("inf")
        notes.append("sampling is not scored exactly (--rollout.allow-unscored-sampling): the mismatch check is off")
    return Plan(
        prompts=prompts,
        group_size=group_size,
        minibatches=minibatches,
        steps_per_round=minibatches * inner,
        responses_per_round=config.rollouts * inner,
        groups_per_minibatch=prompts // minibatches,
        device=device,
        placement=layout.placement,
        layout=layout,
        schedule=turns.kind,
        max_lag=turns.max_lag,
        overlap=turns.text,
        old_logprobs=turns.learner.old_logprobs or "recompute",
        transport=transports.choose(config.cluster.transport, layout.placement),
        engines=len(layout.engines),
        ranks=len(layout.ranks),
        engine_dtype=engine_dtype,
        learner_dtype=learner_dtype,
        lr=lr,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        max_new_tokens=max_new,
        max_model_len=max_prompt + max_new,
        max_prompt_tokens=max_prompt,
        score_temperature=score_at,
        objective=objective,
        kl_coef=0.0 if config.kl.kind == "none" else (0.001 if config.kl.coef is None else config.kl.coef),
        kl_domains=parse_pairs("--kl.domains", config.kl.domains),
        mismatch_limit=limit,
        eval_every=_evaluation_interval(config),
        model=model,
        notes=tuple(notes),
    )


def split_rollouts(rollouts: int, group_size: int | None, minibatches: int | None) -> tuple[int, int, int]:
    """(G, P, M) of `--rollouts`, `--group-size` and `--minibatches`; equal numbers of whole groups or PlanError."""
    _at_least("--rollouts", rollouts, 2)
    size = min(16, rollouts) if group_size is None else group_size
    if size < 2:
        raise PlanError(
            f"--group-size {size}: a group of one has no advantage (its reward is compared with itself).\n"
            f"  Use --group-size 2 or more."
        )
    if rollouts % size:
        raise PlanError(_not_a_multiple(rollouts, size, group_size, minibatches))
    groups = rollouts // size
    if minibatches is None:
        return size, groups, max(m for m in range(1, 17) if groups % m == 0)
    _at_least("--minibatches", minibatches, 1)
    if groups % minibatches:
        nearest = min((m for m in range(1, groups + 1) if groups % m == 0), key=lambda m: (abs(m - minibatches), m))
        unit = "group" if groups == 1 else "groups"
        more = -(-groups // minibatches) * minibatches * size
        raise PlanError(
            f"--minibatches {minibatches} does not divide {groups} {unit} "
            f"(--rollouts {rollouts} / group size {size}).\n"
            f"  A minibatch is made of whole groups, as many in each. Nearest: --minibatches {nearest}, "
            f"or --rollouts {more} ({more // size} groups, {minibatches} minibatches of {more // size // minibatches})."
        )
    return size, groups, minibatches


def _not_a_multiple(rollouts: int, size: int, group_size: int | None, minibatches: int | None) -> str:
    fits = [g for g in range(2, min(rollouts, 2 * size + 2) + 1) if rollouts % g == 0]
    lower = rollouts // size * size
    groups = (lower or size) // size
    whole = minibatches is not None and groups % minibatches == 0
    split = f", {minibatches} minibatches of {groups // (minibatches or 1)}" if whole else ""
    asked = f"--group-size {size}" if group_size is not None else f"the default --group-size {size}"
    options = []
    if fits:
        options.append(f"--group-size {min(fits, key=lambda g: (abs(g - size), -g))}")
    options.append(f"--rollouts {lower or size} ({groups} groups{split})")
    return (
        f"--rollouts {rollouts} is not a multiple of {asked}.\n"
        f"  {rollouts} / {size} leaves {rollouts % size} responses over. Nearest: {', or '.join(options)}."
    )


def parse_pairs(flag: str, text: str) -> dict[str, float]:
    """`name=1,name=2` as a dict; PlanError naming the flag otherwise."""
    pairs: dict[str, float] = {}
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = piece.partition("=")
        try:
            pairs[name.strip()] = float(value)
        except ValueError:
            raise PlanError(f"{flag} {text}: `{piece}` is not name=number.") from None
    return pairs


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise PlanError(f"{flag} {value}: must be at least {least}.")


def _recommended(given: Any, model: ModelFacts, name: str, otherwise: Any) -> Any:
    return given if given is not None else model.recommended.get(name, otherwise)


def _evaluation_interval(config: Config) -> int:
    """Rounds between evaluations: as asked, else 2, or so many that evaluating takes no more responses than training.

    The number of rounds has no part in it: a resumed run may have more, and is evaluated where it would have been.
    """
    evaluation = config.eval
    for flag, value, least in (
        ("--eval.every", evaluation.every or 0, 0),
        ("--eval.size", evaluation.size, 1),
        ("--eval.samples", evaluation.samples, 1),
    ):
        _at_least(flag, value, least)
    if evaluation.every is not None:
        return evaluation.every
    trained = config.rollouts * config.learner.inner_updates
    return max(2, math.ceil(evaluation.size * evaluation.samples / trained))


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if not 0 < rollout.top_p <= 1:
        raise PlanError(f"--rollout.top-p {rollout.top_p}: must be above 0 and at most 1.")
    if rollout.temperature <= 0:
        raise PlanError(f"--rollout.temperature {rollout.temperature}: training needs samples, so it must be above 0.")
    unsound = []
    if rollout.top_p < 1:
        unsound.append(f"--rollout.top-p {rollout.top_p:g}")
    if rollout.top_k > 0:
        unsound.append(f"--rollout.top-k {rollout.top_k}")
    if rollout.score_at_one and rollout.temperature != 1:
        unsound.append(f"--rollout.score-at-one with --rollout.temperature {rollout.temperature:g}")
    if unsound and not rollout.allow_unscored_sampling:
        raise PlanError(
            f"{' and '.join(unsound)}: tokens would be sampled from another distribution than the one the learner "
            f"scores, so the gradient is biased (it can drive the policy towards uniform).\n"
            f"  To score over the kept tokens only, the engine would have to say which they were. vLLM does that in "
            f"Triton code alone, which its build for CPUs has not, and rollearn does not use it (docs/variants.md).\n"
            f"  Leave it out, or add --rollout.allow-unscored-sampling to do it all the same."
        )


def _check_offload(config: Config) -> None:
    if config.learner.offload and not config.learner.zero_stage:
        raise PlanError(
            "--learner.offload has no effect without ZeRO: DeepSpeed moves the optimizer state of stages 1 to 3 only.\n"
            "  Add --learner.zero-stage 1, or leave it out."
        )


def _check_kl(config: Config) -> None:
    kl = config.kl
    if kl.kind == "none":
        for flag, given in (
            ("--kl.coef", kl.coef is not None),
            ("--kl.ref-refresh-steps", bool(kl.ref_refresh_steps)),
            ("--kl.domains", bool(kl.domains)),
        ):
            if given:
                raise PlanError(f"{flag} has no effect without a KL term: add --kl.kind k3_weighted, or leave it out.")
