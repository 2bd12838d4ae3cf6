"""What LoRA asks of the other options: part of the plan."""

from __future__ import annotations

from cluster.errors import PlanError
from cluster.run.config import Config

LARGEST_RANK = 512
"""What the engines' kernels hold."""


def adapter_settings(config: Config, notes: list[str]) -> tuple[int, float]:
    """(rank, alpha) of the adapter, (0, 0.0) without one; PlanError for what cannot be beside it. Adds to `notes`."""
    rank, alpha = config.learner.lora_rank, config.learner.lora_alpha
    if not 0 <= rank <= LARGEST_RANK:
        raise PlanError(f"--learner.lora-rank {rank}: must be 1 to {LARGEST_RANK}, or 0 to train all weights.")
    if not rank:
        if alpha is not None:
            raise PlanError("--learner.lora-alpha has no effect without an adapter: add --learner.lora-rank 32.")
        return 0, 0.0
    if alpha is not None and alpha <= 0:
        raise PlanError(f"--learner.lora-alpha {alpha:g}: must be above 0.")
    if config.kl.ref_refresh_steps:
        raise PlanError(
            f"--kl.ref-refresh-steps {config.kl.ref_refresh_steps} with --learner.lora-rank {rank}: with LoRA the "
            f"reference is the frozen model itself and cannot follow the policy.\n"
            f"  Use --kl.ref-refresh-steps 0 (the reference stays the start), or train all weights."
        )
    if config.learner.lr is None:
        notes.append(
            "the learning rate is one for training all weights; an adapter often wants ten times as much (--learner.lr)"
        )
    return rank, 2.0 * rank if alpha is None else alpha
