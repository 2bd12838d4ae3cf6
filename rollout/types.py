"""What flows through the rollout side: Prompt -> GroupRequest -> Group -> ScoredGroup.

Shape letters: G responses per prompt, T response tokens of the whole group laid end to end, L prompt length.
Ragged data is kept flat (one array and the lengths), because 8192 responses as Python lists of floats are slow to
move and to hold. Training uses the sampled token ids; text exists for scoring and for people.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class UserError(ValueError):
    """What the user asked for or brought cannot work; the text says what, where, what to do. Exit 2, no traceback."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, ready for the engine."""

    row_id: str
    """Stable name of the row in its data set; goes into seeds, files and error messages."""
    text: str
    """What was tokenised (after the chat template), for people."""
    token_ids: IntArray
    """(L,) the prompt as the engine sees it."""
    answer: str
    """The key a response is compared with."""
    domain: str = "default"
    """Which part of a mixture the row belongs to."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All further columns of the row, handed to the user's own reward."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group to be generated: planned before the round starts, so that it can be repeated exactly."""

    prompt: Prompt
    round: int
    """Round it belongs to; -1 and below for evaluation."""
    occurrence: int
    """Which repetition of the row within the round (repeats, inner updates, refills)."""
    minibatch: int
    """Minibatch it was assigned to, before anything was generated."""
    group_size: int
    """G."""
    seed: int
    """Seed of response k is `seed + k` (rollout/seeds.py); the attempt is not in it."""

    @property
    def key(self) -> tuple[str, int]:
        """Identity inside a round."""
        return (self.prompt.row_id, self.occurrence)


@dataclass(frozen=True, slots=True)
class Group:
    """The G responses to one prompt, whole."""

    request: GroupRequest
    weights_version: int
    """Completed rounds behind the weights that sampled every token of it."""
    token_ids: IntArray
    """(T,) sampled ids of all responses end to end, end tokens included."""
    sampler_logprobs: FloatArray
    """(T,) log-probability of each id as the engine reported it."""
    lengths: IntArray
    """(G,) tokens of each response; sums to T."""
    finished: BoolArray
    """(G,) True where the model stopped by itself, False where the length limit cut it."""
    texts: tuple[str, ...]
    """G decoded responses, special tokens kept."""
    engine: int = 0
    """Engine that made it."""
    attempt: int = 0
    """0, or how many times the group had been lost and regenerated before."""

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """(G+1,) where each response starts and ends in the flat arrays."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards; what the journal keeps and the learner trains on."""

    group: Group
    parts: Mapping[str, DoubleArray]
    """Reward parts by name, each (G,), before weights; always holds `correctness` and `format`."""
    total: DoubleArray
    """(G,) weighted sum of the parts: the reward that carries the advantage."""
    outcomes: tuple[str, ...]
    """G verdicts of the grader: right, wrong or error."""
    timeouts: int = 0
    """Responses that ran into the grader's deadline or memory limit (each is wrong)."""
    weighted: Mapping[str, DoubleArray] = field(default_factory=dict)
    """The same parts after weights and conditions, each (G,); sums to `total` (GDPO needs them apart)."""

    @property
    def errors(self) -> int:
        """Responses whose grader failed: the group is dropped whole."""
        return sum(outcome == "error" for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some tensors of the policy on their way to an engine."""

    names: tuple[str, ...]
    """Names as in the model's own checkpoint (HF names)."""
    arrays: tuple[npt.NDArray[Any], ...]
    """One array per name; bfloat16 travels as its uint16 bits."""
    dtype: str
    """What the bits mean: float32 or bfloat16."""


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """Some tensors of the policy, where the learner keeps them: engines on the same device open that memory."""

    names: tuple[str, ...]
    """Names as in the model's own checkpoint (HF names)."""
    shapes: tuple[tuple[int, ...], ...]
    """One per name."""
    dtype: str
    """float32 or bfloat16."""
    handles: Mapping[str, Any]
    """Name of a physical device -> handle of the buffer there, in which all tensors lie end to end."""

    def joined(self, other: SharedBucket) -> SharedBucket:
        """The same tensors, on the devices of both."""
        if (self.names, self.shapes, self.dtype) != (other.names, other.shapes, other.dtype):
            raise ValueError(f"ranks share other tensors in the same bucket: {self.names[:3]} and {other.names[:3]}")
        return SharedBucket(self.names, self.shapes, self.dtype, {**self.handles, **other.handles})


@dataclass(frozen=True, slots=True)
class Probe:
    """Which part of every tensor is read back after a sync, by learner and engine alike.

    Reading columns needs no stored weight: a layer that has packed its weight away gives column j as its output for the
    j-th unit vector, exactly. So the proof covers what the engine computes with, not what it was sent.
    """

    columns: Mapping[str, IntArray]
    """Tensor name -> columns to read (empty: the tensor has one dimension and is read whole)."""
    dtype: str
    """Precision of the engine; the learner casts to it before the digest."""

    @staticmethod
    def digest(values: npt.NDArray[Any]) -> str:
        """Short hash of values (rows, columns) or (rows,), of float32.

        Negative zeros and denormals are levelled: matrix kernels may flush them.
        """
        levelled = np.where(np.abs(values) < 1e-37, np.float32(0.0), values).astype(np.float32)
        data = np.ascontiguousarray(levelled).tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an engine proves after a sync."""

    engine: int
    """Which engine."""
    version: int
    """Weights version it was told it now holds."""
    digests: Mapping[str, str]
    """Tensor name -> digest of what the engine computes with, fused and packed copies included."""
    cache_reset: bool
    """True when the prefix cache was really emptied."""
    seconds: float
    """Time the engine spent on loading and reading back."""
