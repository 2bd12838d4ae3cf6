"""The frozen reference of the KL term, made only when there is such a term.

Without LoRA it is a second copy of the model. With LoRA it is the policy's own model with the adapter switched off, so
nothing is held twice.
"""

from __future__ import annotations

import torch

from learner.engine import LearnerEngine, load_model
from learner.logprobs import PolicyModel
from learner.lora import without_adapter


class Reference:
    """Scores responses under frozen weights; may be replaced by the policy every N optimizer steps (R1: 400)."""

    def __init__(self, engine: LearnerEngine) -> None:
        """Load the same directory as the policy (it starts equal to it), or lean on the policy's frozen model."""
        self._engine = engine
        self.model: PolicyModel | None = None
        self.refreshed_at = 0
        if not engine.settings.lora_rank:
            self.model = PolicyModel(load_model(engine.settings.model, engine.settings.dtype, engine.attention)).to(
                engine.device
            )
            self.model.eval().requires_grad_(False)

    @torch.no_grad()
    def score(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """(n,) log-probs of the targets under the reference (tensors as LearnerEngine.score).

        With LoRA and ZeRO-3 a collective: every rank must score the same number of microbatches.
        """
        if self.model is None:
            with without_adapter(self._engine.policy.hf):
                return self._engine.score(tensors)[0]
        temperature = self._engine.settings.score_temperature
        logprobs: torch.Tensor = self.model(
            tensors["input_ids"], tensors["positions"], tensors["targets"], temperature
        )[0]
        return logprobs

    def after_step(self, engine: LearnerEngine) -> None:
        """Hard copy of the policy when its age reaches `ref_refresh_steps`. Collective under ZeRO-3."""
        every = engine.settings.ref_refresh_steps
        if every and engine.steps_done - self.refreshed_at >= every:
            self.copy_from(engine)
            self.refreshed_at = engine.steps_done

    @torch.no_grad()
    def copy_from(self, engine: LearnerEngine) -> None:
        """Take the policy's weights."""
        assert self.model is not None, "with LoRA the reference is the frozen model and cannot follow the policy"
        own = dict(self.model.hf.named_parameters())
        for bucket in engine.gathered(bucket_bytes=1 << 28):
            for name, tensor in bucket:
                own[name].copy_(tensor)
