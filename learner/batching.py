"""From scored groups to what a rank puts through the model at once. Pure numpy; every rank computes the same plan.

Shape letters: B responses of the round, b rows of one microbatch, L padded length, T padded response length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from learner.types import Batch
from rollout.types import BoolArray, DoubleArray, IntArray, ScoredGroup

Rows = npt.NDArray[np.int64]


def build_batch(
    groups: Sequence[ScoredGroup],
    advantages: DoubleArray,
    *,
    kl_coef: float = 0.0,
    domain_coefs: Mapping[str, float] | None = None,
    drop_unfinished: bool = False,
    max_lag: int = 0,
) -> Batch:
    """Lay whole groups end to end, in the order given.

    `advantages` is (B,), computed on the whole groups in the same order. `drop_unfinished` is the overlong filter.
    `max_lag` is how many weights versions a group may be behind the round. Raises ValueError when one is further
    behind, or ahead, or when the groups come from several rounds.
    """
    rounds = {scored.group.request.round for scored in groups}
    if len(rounds) != 1:
        raise ValueError(f"a batch must come from one round, got {sorted(rounds)}")
    round_ = rounds.pop()
    _check_lag(round_, groups, max_lag)
    rows: list[IntArray] = []
    for scored in groups:
        offsets, prompt = scored.group.offsets, scored.group.request.prompt.token_ids
        for start, end in pairwise(offsets):
            rows.extend((prompt, scored.group.token_ids[start:end]))
    sizes = [len(scored.group.lengths) for scored in groups]
    domains = domain_coefs or {}
    finished = np.concatenate([scored.group.finished for scored in groups])
    return Batch(
        round=round_,
        weights_versions=np.repeat([scored.group.weights_version for scored in groups], sizes).astype(np.int32),
        token_ids=np.concatenate(rows).astype(np.int32, copy=False),
        prompt_lengths=np.repeat([len(g.group.request.prompt.token_ids) for g in groups], sizes).astype(np.int32),
        response_lengths=np.concatenate([scored.group.lengths for scored in groups]),
        sampler_logprobs=np.concatenate([scored.group.sampler_logprobs for scored in groups]),
        advantages=np.asarray(advantages, dtype=np.float64),
        groups=np.repeat(np.arange(len(groups)), sizes).astype(np.int32),
        minibatches=np.repeat([scored.group.request.minibatch for scored in groups], sizes).astype(np.int32),
        kl_coefs=np.repeat([domains.get(g.group.request.prompt.domain, kl_coef) for g in groups], sizes).astype(float),
        counted=finished if drop_unfinished else np.ones(len(finished), dtype=bool),
    )


def _check_lag(round_: int, groups: Sequence[ScoredGroup], max_lag: int) -> None:
    wrong = [scored.group for scored in groups if not 0 <= round_ - 1 - scored.group.weights_version <= max_lag]
    if wrong:
        raise ValueError(
            f"{len(wrong)} groups of round {round_} come from weights version {wrong[0].weights_version} (row "
            f"{wrong[0].request.prompt.row_id}), while this round is trained on version {round_ - 1}"
            + (f" and at most {max_lag} behind" if max_lag else "")
        )


def rows_with_signal(batch: Batch) -> BoolArray:
    """(B,) True where a response can move the weights: an advantage, or a KL term, and not filtered out."""
    moving: BoolArray = batch.counted & ((batch.advantages != 0) | (batch.kl_coefs != 0))
    return moving


def plan_microbatches(
    rows: Rows, lengths: npt.NDArray[np.integer], rank: int, ranks: int, budget: int, *, packed: bool = False
) -> list[Rows]:
    """The microbatches of one rank: rows sorted by length, at most `budget` tokens each, padding included.

    `lengths` is (B,) prompt plus response of every row of the batch. Every rank gets the same number of microbatches
    (empty ones at the end where it has fewer rows), because ZeRO 2 and 3 communicate in each backward pass; and at
    least one, so that a minibatch without signal still makes a step with a gradient of zero, as it would if all of it
    had been computed.
    A row longer than the budget gets a microbatch of its own. `packed`: there will be no padding (pack_rows).
    """
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    shares = [order[first::ranks] for first in range(ranks)]
    fill = _fill_packed if packed else _fill
    plans = [fill(share, lengths, budget) for share in shares]
    most = max(1, *(len(plan) for plan in plans))
    return plans[rank] + [np.empty(0, dtype=np.int64)] * (most - len(plans[rank]))


def _fill(share: Rows, lengths: npt.NDArray[np.integer], budget: int) -> list[Rows]:
    """Cut rows that are sorted by falling length into runs whose padded size stays within the budget."""
    plan, start = [], 0
    while start < len(share):
        count = max(1, budget // int(lengths[share[start]]))
        plan.append(share[start : start + count])
        start += count
    return plan


def _fill_packed(share: Rows, lengths: npt.NDArray[np.integer], budget: int) -> list[Rows]:
    """Cut rows into runs whose tokens together stay within the budget."""
    plan: list[Rows] = []
    start = 0
    while start < len(share):
        reached = np.cumsum(lengths[share[start:]])
        count = max(1, int(np.searchsorted(reached, budget, side="right")))
        plan.append(share[start : start + count])
        start += count
    return plan


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Some rows as the model takes them: padded on the right, or packed into one (pack_rows)."""

    rows: Rows
    """(b,) which rows of the batch."""
    input_ids: npt.NDArray[np.int64]
    """(b, L); packed (1, N)."""
    positions: npt.NDArray[np.int64]
    """(n,) flat index into `input_ids` of the position that predicts each response token, row by row."""
    targets: npt.NDArray[np.int64]
    """(n,) the response tokens."""
    response_mask: BoolArray
    """(b, T) True on response tokens."""
    flat: npt.NDArray[np.int64]
    """(n,) index of each response token in the flat arrays of the batch."""
    position_ids: npt.NDArray[np.int64] | None = None
    """(1, N) place of each token in its own row, where rows are packed: this is what keeps them apart."""


def pad_rows(batch: Batch, rows: Rows) -> LaidOut:
    """Rows below one another, padded on the right (harmless for causal models, and needs no attention mask)."""
    prompts = batch.prompt_lengths[rows].astype(np.int64)
    responses = batch.response_lengths[rows].astype(np.int64)
    lengths = prompts + responses
    width, reach = int(lengths.max()), int(responses.max())
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    filled = np.arange(width) < lengths[:, None]
    input_ids[filled] = batch.token_ids[_ranges(batch.row_offsets[rows], lengths)]
    starts = np.arange(len(rows)) * width + prompts - 1
    positions = _ranges(starts, responses)
    return LaidOut(
        rows=rows,
        input_ids=input_ids,
        positions=positions,
        targets=input_ids.reshape(-1)[positions + 1],
        response_mask=np.arange(reach) < responses[:, None],
        flat=_ranges(batch.response_offsets[rows], responses),
    )


def pack_rows(batch: Batch, rows: Rows) -> LaidOut:
    """Rows end to end without padding; the attention must keep them apart by their position ids.

    transformers does that with every attention; only kernels for ragged batches (flash attention) gain by it.
    """
    prompts = batch.prompt_lengths[rows].astype(np.int64)
    responses = batch.response_lengths[rows].astype(np.int64)
    lengths = prompts + responses
    starts = np.cumsum(lengths) - lengths
    input_ids = batch.token_ids[_ranges(batch.row_offsets[rows], lengths)].astype(np.int64)
    positions = _ranges(starts + prompts - 1, responses)
    return LaidOut(
        rows=rows,
        input_ids=input_ids[None],
        positions=positions,
        targets=input_ids[positions + 1],
        response_mask=np.arange(int(responses.max())) < responses[:, None],
        flat=_ranges(batch.response_offsets[rows], responses),
        position_ids=_ranges(np.zeros_like(lengths), lengths)[None],
    )


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Concatenation of start .. start + length - 1 for each pair."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
