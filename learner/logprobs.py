"""Log-probs of response tokens under a model, without ever holding a (tokens x vocabulary) float32 matrix at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_CELLS = 1 << 24  # tokens x vocabulary in one piece: 64 MiB of float32


class PolicyModel(torch.nn.Module):
    """A causal language model that returns log-probs instead of logits."""

    def __init__(self, model: Any) -> None:
        """`model` is a transformers causal LM; its head is applied here, in chunks, with the family's logit scaling."""
        super().__init__()
        self.hf = model
        config = model.config
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of every target and entropy (detached) of the distribution it was drawn from.

        `input_ids` (b, L) padded on the right; `positions` (n,) flat indices into b * L of the predicting positions;
        `targets` (n,). Both results are (n,) float32, at `temperature`. With `position_ids` (1, N) the rows are packed
        into one, and transformers keeps them apart where a position id does not follow the one before it.
        """
        packed = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.hf.base_model(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1])[positions]
        step = max(1, CHUNK_CELLS // self.hf.config.vocab_size)
        if len(picked) <= step:
            return self._score(picked, targets, temperature)
        pieces = [
            # Recomputed in the backward pass, so only one chunk of logits lives at a time.
            checkpoint(self._score, picked[i : i + step], targets[i : i + step], temperature, use_reentrant=False)
            for i in range(0, len(picked), step)
        ]
        return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.hf.get_output_embeddings()(hidden)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        distribution = torch.log_softmax(logits / temperature, dim=-1)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, targets[:, None]).squeeze(-1), entropy
