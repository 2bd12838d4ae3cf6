"""Groups and columns of any kind survive their way through bytes and JSON."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.run.group_codec import decode_group, encode_group, pack_value, unpack_value
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup
from tests.pure.scored_groups import assert_same

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$dict", "$bytes", "a"]), inner, max_size=2)
        | st.dictionaries(st.integers(), inner, max_size=2)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(json_values | st.datetimes() | st.times() | st.timedeltas() | st.decimals(allow_nan=False))
def test_any_value_of_a_column_survives_its_way_through_json(value):
    again = unpack_value(json.loads(json.dumps(pack_value(value))))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array([1.5, np.nan, np.inf], dtype=np.float32),
        np.array([True, False]),
        np.array(["a", "bc"]),
        np.array([{"a": 1}, None, "x"], dtype=object),
        np.empty((0, 3)),
    ],
)
def test_arrays_in_columns_survive(array):
    again = unpack_value(json.loads(json.dumps(pack_value(array))))
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    np.testing.assert_array_equal(again, array)


def test_numpy_scalars_decimals_and_times_keep_their_type():
    for value in (np.float32(0.1), np.int64(1 << 60), np.bool_(True), Decimal("1.10"), datetime.time(1, 2)):
        again = unpack_value(json.loads(json.dumps(pack_value(value))))
        assert again == value
        assert type(again) is type(value)


@st.composite
def any_group(draw):
    size = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    tokens = sum(lengths)
    ids = st.integers(0, 2**31 - 1)

    def floats(count, width=64):
        return draw(st.lists(st.floats(width=width), min_size=count, max_size=count))

    columns = draw(st.dictionaries(st.text(), json_values, max_size=3))
    prompt_ids = np.array(draw(st.lists(ids, max_size=5)), np.int32)
    prompt = Prompt(draw(st.text()), draw(st.text()), prompt_ids, draw(st.text()), draw(st.text()), columns)
    request = GroupRequest(prompt, draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 9)), size, 7)
    group = Group(
        request,
        draw(st.integers(0, 9)),
        np.array(draw(st.lists(ids, min_size=tokens, max_size=tokens)), np.int32),
        np.array(floats(tokens, 32), np.float32),
        np.array(lengths, np.int32),
        np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_),
        tuple(draw(st.lists(st.text(), min_size=size, max_size=size))),
        engine=draw(st.integers(0, 9)),
        attempt=draw(st.integers(0, 9)),
    )
    names = draw(st.lists(st.text(min_size=1).filter(lambda name: name != "total"), max_size=3, unique=True))
    outcomes = draw(st.lists(st.sampled_from(["right", "wrong", "error"]), min_size=size, max_size=size))
    parts = {name: np.array(floats(size)) for name in names}
    return ScoredGroup(group, parts, np.array(floats(size)), tuple(outcomes), draw(st.integers(0, 9)), parts)


@settings(max_examples=100)
@given(any_group())
def test_any_group_survives_its_way_through_bytes(scored):
    assert_same(scored, decode_group(bytearray(encode_group(scored))))
