"""What flows through the learner side: Batch (one round) -> Minibatch (one step) -> StepReport -> UpdateReport.

Shape letters: B responses, N tokens of all prompts and responses end to end, T response tokens end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.types import BoolArray, DoubleArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole minibatches of one round, all of them or some, flat; advantages are final (whole groups)."""

    round: int
    """Round the responses belong to."""
    weights_versions: IntArray
    """(B,) version that sampled each response; `round - 1` where it is not behind."""
    token_ids: IntArray
    """(N,) prompt then response of each row, end to end."""
    prompt_lengths: IntArray
    """(B,) tokens of each prompt."""
    response_lengths: IntArray
    """(B,) tokens of each response, end token included."""
    sampler_logprobs: FloatArray
    """(T,) log-probs as the engine reported them."""
    advantages: DoubleArray
    """(B,) one per response."""
    groups: IntArray
    """(B,) which group a response belongs to, numbered from 0 within the batch."""
    minibatches: IntArray
    """(B,) which optimizer step it is trained in; whole groups."""
    kl_coefs: DoubleArray
    """(B,) KL coefficient of each response (by domain); all 0 without KL."""
    counted: BoolArray
    """(B,) False where the overlong filter takes the response out of the loss (its denominators follow)."""

    @property
    def current(self) -> bool:
        """True when all responses are of the policy as it is at the start of the round."""
        return bool((self.weights_versions == self.round - 1).all())

    @property
    def size(self) -> int:
        """B."""
        return len(self.prompt_lengths)

    @property
    def row_offsets(self) -> npt.NDArray[np.int64]:
        """(B+1,) where each row starts in `token_ids`."""
        return np.concatenate(([0], np.cumsum(self.prompt_lengths + self.response_lengths, dtype=np.int64)))

    @property
    def response_offsets(self) -> npt.NDArray[np.int64]:
        """(B+1,) where each response starts in `sampler_logprobs`."""
        return np.concatenate(([0], np.cumsum(self.response_lengths, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, already reduced over ranks and microbatches."""

    step: int
    """Optimizer steps done in the run, this one included (also when it was skipped)."""
    minibatch: int
    """Which minibatch of the round."""
    skipped: bool
    """True when the update was not finite and no rank applied it."""
    metrics: Mapping[str, float]
    """`policy/...`, `correction/...`, `mismatch/...` of this step."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What the learner did with one batch."""

    steps: tuple[StepReport, ...]
    """One per minibatch that was trained."""
    seconds_old_logprobs: float
    """Wall seconds spent on recomputing old log-probs."""
    seconds_learn: float
    """Wall seconds of the whole update."""
    mismatch: tuple[float, float] | None
    """(mean, largest) |engine - learner| log-prob of the tokens scored before training; None: other weights by now."""
    trained_responses: int
    """Responses that went through forward and backward (groups without signal may be left out)."""


def joined(reports: Sequence[UpdateReport]) -> UpdateReport:
    """The reports of all batches of a round as one."""
    return UpdateReport(
        steps=tuple(step for report in reports for step in report.steps),
        seconds_old_logprobs=sum(report.seconds_old_logprobs for report in reports),
        seconds_learn=sum(report.seconds_learn for report in reports),
        mismatch=next((report.mismatch for report in reports if report.mismatch is not None), None),
        trained_responses=sum(report.trained_responses for report in reports),
    )


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of a checkpoint."""

    name: str
    """Path inside the checkpoint."""
    rank: int
    """Rank that wrote it."""
    size: int
    """Bytes."""
    sha256: str
    """Hash of its content."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says about its part of a checkpoint, which exists only when all ranks say yes."""

    rank: int
    """Who votes."""
    files: tuple[SavedFile, ...] = ()
    """What it wrote, already on the disk."""
    steps: int = 0
    """Optimizer steps done, skipped ones included."""
    weights: str = ""
    """Hash of all parameters (rank 0)."""
    error: str = ""
    """Why it votes no; empty for yes."""
