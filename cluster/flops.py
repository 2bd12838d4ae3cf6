"""Floating-point operations of a round, for the utilisation of the devices. Pure arithmetic on lengths.

Only what the algorithm needs counts: not what is computed again to save memory, not the optimizer, not padding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.planner.architecture import Architecture


def generation_flops(
    architecture: Architecture, prompts: npt.ArrayLike, responses: npt.ArrayLike, group_size: int
) -> float:
    """Answering: `prompts` (P,) tokens, each read once; `responses` (P x G,) tokens, group after group.

    The last prompt token's logits give the first token of every response; a response's last token is not continued.
    """
    lengths, made = np.asarray(prompts, dtype=np.float64), np.asarray(responses, dtype=np.float64)
    before = np.repeat(lengths, group_size)
    read = _forward(architecture, np.zeros_like(lengths), lengths, 0.0)
    return read + _forward(architecture, before, before + made - 1, float(made.sum()))


def scoring_flops(architecture: Architecture, prompts: npt.ArrayLike, responses: npt.ArrayLike) -> float:
    """One forward pass of the learner over responses, each behind its prompt: (B,) tokens of either."""
    lengths, made = np.asarray(prompts, dtype=np.float64), np.asarray(responses, dtype=np.float64)
    return _forward(architecture, np.zeros_like(lengths), lengths + made, float(made.sum()))


def _forward(
    architecture: Architecture, begins: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], scored: float
) -> float:
    """Positions begins..ends of (n,) sequences, each attending to itself and all before it; `scored` get logits."""
    tokens = float((ends - begins).sum())
    pairs = float((ends * (ends + 1) - begins * (begins + 1)).sum()) / 2
    return architecture.forward_flops(int(tokens), pairs / max(1.0, tokens), int(scored))
