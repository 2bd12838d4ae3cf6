from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.stream import PromptStream, parse_mix
from rollout.types import Prompt, UserError


def prompts(*sizes: int) -> list[Prompt]:
    """Rows of domains a, b, ... of these sizes, one domain after the other."""
    return [
        Prompt(f"{name}{i}", f"{name}{i}", np.array([i], dtype=np.int32), "1", name)
        for name, size in zip("abcdef", sizes, strict=False)
        for i in range(size)
    ]


def ids(taken):
    return [prompt.row_id for prompt, _ in taken]


SIZES = st.integers(1, 12)
SEEDS = st.integers(0, 2**32)
TAKES = st.lists(st.integers(0, 20), max_size=8)


@given(SIZES, SEEDS, TAKES)
def test_every_epoch_walks_through_every_row_once(size, seed, takes):
    stream = PromptStream(prompts(size), seed=seed)
    walked = [row for n in takes for row in ids(stream.take(n))]
    for start in range(0, len(walked), size):
        epoch = walked[start : start + size]
        assert len(set(epoch)) == len(epoch)
    assert stream.epoch == len(walked) / size


@given(SIZES, SEEDS, TAKES, st.integers(0, 20))
def test_a_restored_stream_goes_on_exactly_where_it_was(size, seed, takes, more):
    stream = PromptStream(prompts(size, 3), seed=seed, mix="a=0.7,b=0.3")
    for n in takes:
        stream.take(n)
    state = json.loads(json.dumps(stream.state()))
    expected = stream.take(more)
    other = PromptStream(prompts(size, 3), seed=seed, mix="a=0.7,b=0.3")
    other.restore(state)
    assert other.take(more) == expected
    assert other.state() == stream.state()


@given(SIZES, SEEDS, st.lists(st.integers(0, 9), max_size=6))
def test_how_the_rows_are_asked_for_does_not_change_their_order(size, seed, takes):
    whole = ids(PromptStream(prompts(size), seed=seed).take(sum(takes)))
    stream = PromptStream(prompts(size), seed=seed)
    assert [row for n in takes for row in ids(stream.take(n))] == whole


@given(SIZES, st.integers(0, 40))
def test_occurrences_count_the_repetitions_within_a_round(size, n):
    taken = PromptStream(prompts(size), seed=0).take(n)
    assert len({(prompt.row_id, occurrence) for prompt, occurrence in taken}) == n
    for row, times in Counter(ids(taken)).items():
        assert sorted(occurrence for prompt, occurrence in taken if prompt.row_id == row) == list(range(times))


def test_a_refill_counts_on_from_what_the_round_has_taken():
    stream = PromptStream(prompts(3), seed=0)
    first = stream.take(4)
    more = stream.take(4, already=Counter(ids(first)))
    assert len(set((prompt.row_id, occurrence) for prompt, occurrence in first + more)) == 8


def test_the_order_comes_from_the_seed_and_changes_with_the_epoch():
    one, two, other = (PromptStream(prompts(50), seed=seed) for seed in (1, 1, 2))
    epochs = [ids(one.take(50)) for _ in range(3)]
    assert ids(two.take(50)) == epochs[0]
    assert ids(other.take(50)) != epochs[0]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(PromptStream(prompts(50), seed=1, shuffle=False).take(50)) == [f"a{i}" for i in range(50)]


def test_the_order_is_the_same_on_every_machine_and_under_every_numpy():
    walked = ids(PromptStream(prompts(8), seed=0).take(16))
    assert " ".join(walked) == "a0 a6 a2 a5 a1 a3 a4 a7 a1 a0 a5 a6 a3 a2 a4 a7"


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.lists(st.integers(1, 9), min_size=4, max_size=4), SEEDS)
def test_every_stretch_holds_the_mixture_as_closely_as_whole_rows_allow(sizes, weights, seed):
    names = "abcdef"[: len(sizes)]
    mix = dict(zip(names, weights, strict=False))
    stream = PromptStream(prompts(*sizes), seed=seed, mix=",".join(f"{k}={v}" for k, v in mix.items()))
    counts: Counter[str] = Counter()
    for n in range(1, 120):
        counts[stream.take(1)[0][0].domain] += 1
        for name in names:
            share = mix[name] / sum(mix.values())
            assert abs(counts[name] - share * n) < len(names)


def test_weight_zero_leaves_a_domain_out():
    stream = PromptStream(prompts(3, 3), seed=0, mix="a=1,b=0")
    assert {prompt.domain for prompt, _ in stream.take(20)} == {"a"}
    assert stream.size == 3


@pytest.mark.parametrize("mix", ["a", "a=", "a=x", "=1", "a=-1", "a=nan", "a=inf", "a=1,a=2", "a=0,b=0"])
def test_a_mixture_that_is_none_is_refused(mix):
    with pytest.raises(UserError, match=r"--data\.mix"):
        parse_mix(mix)


def test_a_mixture_must_name_the_domains_there_are():
    with pytest.raises(UserError, match="the domains a, b") as caught:
        PromptStream(prompts(1, 1), seed=0, mix="a=1,algebra=2")
    assert "Weights without prompts: algebra. Domains without a weight: b" in str(caught.value)


def test_the_place_in_other_prompts_is_refused():
    """NVIDIA-NeMo/RL#2519: resuming with another data set skipped its first rows without a word."""
    state = PromptStream(prompts(5), seed=0).state()
    for other in (
        PromptStream(prompts(6), seed=0),
        PromptStream(prompts(5)[::-1], seed=0),
        PromptStream(prompts(5), seed=1),
        PromptStream(prompts(5), seed=0, shuffle=False),
        PromptStream(prompts(5), seed=0, mix="a=1"),
    ):
        with pytest.raises(UserError, match="belongs to other prompts"):
            other.restore(state)


def test_no_prompts_are_no_stream():
    with pytest.raises(UserError, match="no prompts"):
        PromptStream([], seed=0)
