"""What every engine and rank is told when it starts: out of the configuration and the plan. Pure."""

from __future__ import annotations

from cluster.plan import Plan
from cluster.run.config import Config
from cluster.turns import memory_share
from learner.engine import LearnerSettings
from rollout.engine import EngineSettings
from rollout.seeds import stable_hash

SENTINEL_ROWS = 4


def engine_settings(config: Config, plan: Plan, model: str, index: int) -> EngineSettings:
    """Of engine `index`, on a model directory."""
    return EngineSettings(
        model=model,
        index=index,
        seed=stable_hash("engine", config.seed, index) % 2**31,
        dtype=plan.engine_dtype,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        tensor_parallel=config.rollout.tensor_parallel,
        device=plan.device,
        gpu_memory=memory_share(config.rollout.gpu_memory, plan.placement == "colocated"),
        kv_cache_gib=config.rollout.kv_cache_gib,
        processed_logprobs=not config.rollout.score_at_one,
        sleeps=plan.placement == "colocated",
        lora_rank=plan.lora_rank,
    )


def rank_settings(config: Config, plan: Plan, model: str, rank: int) -> LearnerSettings:
    """Of learner `rank`, on a model directory."""
    learner = config.learner
    return LearnerSettings(
        model=model,
        rank=rank,
        ranks=plan.ranks,
        device=plan.device,
        dtype=plan.learner_dtype,
        zero_stage=learner.zero_stage,
        lr=plan.lr,
        warmup_steps=learner.warmup_steps,
        weight_decay=learner.weight_decay,
        grad_clip=learner.grad_clip,
        microbatch_tokens=learner.microbatch_tokens or (4096 if plan.device == "cpu" else 16384),
        objective=plan.objective,
        score_temperature=plan.score_temperature,
        old_logprobs=plan.old_logprobs,
        ref_refresh_steps=config.kl.ref_refresh_steps,
        gradient_checkpointing=learner.gradient_checkpointing,
        offload=learner.offload,
        sentinel_rows=SENTINEL_ROWS,
        mismatch_limit=plan.mismatch_limit,
        collective_timeout=600.0,
        seed=stable_hash("learner", config.seed, rank) % 2**31,
        lora_rank=plan.lora_rank,
        lora_alpha=plan.lora_alpha,
    )
