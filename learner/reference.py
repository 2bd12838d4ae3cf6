"""The frozen reference of the KL term: a second copy of the model, made only when there is such a term."""

from __future__ import annotations

import torch

from learner.engine import LearnerEngine, load_model
from learner.logprobs import PolicyModel


class Reference:
    """Scores responses under frozen weights; may be replaced by the policy every N optimizer steps (R1: 400)."""

    def __init__(self, engine: LearnerEngine) -> None:
        """Load the same directory as the policy; it starts equal to it."""
        self.model = PolicyModel(load_model(engine.settings.model, engine.settings.dtype)).to(engine.device)
        self.model.eval().requires_grad_(False)
        self.refreshed_at = 0

    @torch.no_grad()
    def score(
        self, input_ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """(n,) log-probs of the targets under the reference (shapes as PolicyModel.forward)."""
        logprobs: torch.Tensor = self.model(input_ids, positions, targets, temperature)[0]
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
        own = dict(self.model.hf.named_parameters())
        for bucket in engine.gathered(bucket_bytes=1 << 28):
            for name, tensor in bucket:
                own[name].copy_(tensor)
