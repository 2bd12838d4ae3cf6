"""The plan as people read it: what `launch.py plan` prints, and plan.txt of a run."""

from __future__ import annotations

from cluster.plan import Plan
from cluster.resources import Resources
from cluster.run.config import Config
from cluster.seating import layout_text


def plan_text(config: Config, plan: Plan, resources: Resources) -> str:
    """The plan as people read it."""
    kl = f"{config.kl.kind}, coefficient {plan.kl_coef:g}"
    kl = "off (no reference in memory)" if config.kl.kind == "none" else kl
    inner = f" x {config.learner.inner_updates} inner updates" if config.learner.inner_updates > 1 else ""
    lines = [
        f"round      {config.rollouts} responses = {_count(plan.prompts, 'prompt')} x {plan.group_size}{inner}",
        f"           {_count(plan.steps_per_round, 'optimizer step')} of {_count(plan.groups_per_minibatch, 'group')} "
        f"({plan.groups_per_minibatch * plan.group_size} responses)",
        f"run        {_count(config.rounds, 'round')}, "
        f"{_count(config.rounds * plan.steps_per_round, 'optimizer step')}, "
        f"{config.rounds * plan.responses_per_round} responses",
        f"model      {plan.model.path}" + (f" (vocabulary {plan.model.vocab_size})" if plan.model.vocab_size else ""),
        f"objective  {config.learner.loss}, ratio per {config.learner.ratio_level}, clip "
        f"{config.learner.clip_low:g}/{config.learner.clip_high:g}, advantages {config.learner.advantage}, "
        f"{plan.objective.reduction}, KL {kl}"
        + (f", correction {plan.objective.correction}" if plan.objective.correction != "none" else ""),
        f"optimizer  AdamW, learning rate {plan.lr:g}, ZeRO {config.learner.zero_stage}, {plan.learner_dtype}"
        + (f", LoRA of rank {plan.lora_rank}, alpha {plan.lora_alpha:g}" if plan.lora_rank else ""),
        f"sampling   temperature {config.rollout.temperature:g}, top-p {config.rollout.top_p:g}, at most "
        f"{plan.max_new_tokens} tokens after at most {plan.max_prompt_tokens}, {plan.engine_dtype}",
        f"reward     correctness + {config.reward.format_weight:g} x format"
        + (" where correct" if config.reward.conditional_format else "")
        + (f" + {config.reward_function}" if config.reward_function else ""),
        f"evaluation {_evaluation_text(config, plan)}",
        f"processes  {_count(plan.engines, 'engine')} and {_count(plan.ranks, 'rank')}, "
        f"placement {plan.placement}, weights by {plan.transport}",
        f"schedule   {plan.overlap}",
        *(f"placement  {line}" for line in layout_text(plan.layout, resources.nodes)),
        f"machine    {resources.cpus} cores, {resources.gpus} GPUs, {resources.memory / 2**30:.1f} GiB memory",
    ]
    return "\n".join(lines + [f"note       {note}" for note in plan.notes])


def _count(number: int, what: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def _evaluation_text(config: Config, plan: Plan) -> str:
    """When held-out prompts are answered, and how many."""
    if not plan.eval_every:
        return "none"
    asked = f"at most {_count(config.eval.size, 'held-out prompt')}"
    if config.eval.samples > 1:
        asked += f" x {config.eval.samples} responses"
    if plan.eval_every >= config.rounds:
        return f"{asked} at the start and at the end"
    chosen = config.eval.every is None and plan.eval_every > 2
    why = " (so that training generates as much)" if chosen else ""
    often = "every round" if plan.eval_every == 1 else f"every {plan.eval_every} rounds"
    return f"{asked} at the start, {often}{why} and at the end"
