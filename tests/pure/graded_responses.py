"""Groups of responses for tests of rewards: texts in, a Group with matching ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout.scoring import Scoring
from rollout.types import Group, GroupRequest, Prompt

OPEN, CLOSE, END = 1, 2, 3
SCORING = Scoring(think=(OPEN, CLOSE), max_new_tokens=64)


def ids_of(text: str) -> list[int]:
    """The think tags as one id each, every other character as one id above 9."""
    ids: list[int] = []
    while text:
        for tag, token in (("<think>", OPEN), ("</think>", CLOSE), ("<eos>", END)):
            if text.startswith(tag):
                ids.append(token)
                text = text[len(tag) :]
                break
        else:
            ids.append(10 + ord(text[0]) % 90)
            text = text[1:]
    return ids


def make_prompt(
    answer: str = "132", row_id: str = "row-1", ids: Sequence[int] = (20, 21), columns: Mapping[str, Any] | None = None
) -> Prompt:
    """A prompt with a gold answer."""
    return Prompt(row_id, "How much is it?", np.array(ids, dtype=np.int32), answer, "default", columns or {})


def make_group(
    texts: Sequence[str],
    answer: str = "132",
    finished: Sequence[bool] | None = None,
    prompt: Prompt | None = None,
    ids: Sequence[Sequence[int]] | None = None,
) -> Group:
    """A group whose ids follow from its texts unless they are given."""
    rows = [list(row) for row in ids] if ids is not None else [ids_of(text) for text in texts]
    request = GroupRequest(prompt or make_prompt(answer), 1, 0, 0, len(texts), 0)
    return Group(
        request=request,
        weights_version=0,
        token_ids=np.array([token for row in rows for token in row], dtype=np.int32),
        sampler_logprobs=np.zeros(sum(map(len, rows)), dtype=np.float32),
        lengths=np.array([len(row) for row in rows], dtype=np.int32),
        finished=np.array([True] * len(texts) if finished is None else finished, dtype=np.bool_),
        texts=tuple(texts),
    )
