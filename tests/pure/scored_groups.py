"""Scored groups for tests, drawn from a seed."""

from __future__ import annotations

import numpy as np

from cluster.run.group_codec import encode_group
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup


def scored_group(row="row0", *, round_=1, occurrence=0, minibatch=0, size=4, seed=0, columns=None, texts=None):
    """One group; the same arguments give the same group."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, size).astype(np.int32)
    tokens = int(lengths.sum())
    prompt = Prompt(row, "What is 2 + 2?", rng.integers(0, 99, 7).astype(np.int32), "4", "sums", columns or {})
    request = GroupRequest(prompt, round_, occurrence, minibatch, size, 1 << 60)
    group = Group(
        request,
        round_ - 1,
        rng.integers(0, 99, tokens).astype(np.int32),
        rng.normal(size=tokens).astype(np.float32),
        lengths,
        rng.random(size) < 0.5,
        tuple(texts or (f"answer {k}" for k in range(size))),
        engine=1,
        attempt=2,
    )
    parts = {"correctness": rng.random(size), "format": rng.random(size)}
    weighted = {name: part * 0.5 for name, part in parts.items()}
    return ScoredGroup(group, parts, rng.random(size), ("right",) * size, 3, weighted)


def assert_same(one, other):
    """Two groups are the same in every value and type."""
    assert encode_group(one) == encode_group(other)
    assert one.group.request.prompt.columns == other.group.request.prompt.columns
    for name in ("token_ids", "sampler_logprobs", "lengths", "finished"):
        mine, theirs = getattr(one.group, name), getattr(other.group, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert one.group.texts == other.group.texts
    assert one.group.request.key == other.group.request.key
    np.testing.assert_array_equal(one.total, other.total)
    assert list(one.parts) == list(other.parts)
    assert list(one.weighted) == list(other.weighted)
