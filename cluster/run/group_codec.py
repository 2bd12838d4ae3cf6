"""A scored group as bytes and back, exactly: one JSON header for names and text, then raw little-endian arrays.

No pickle: reading a journal runs nobody's code.

    bytes = header length, header (ASCII JSON, padded to 8), float64s, float32s, int32s, bools
"""

from __future__ import annotations

import base64
import datetime
import json
import struct
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.errors import BrokenPromise
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup, UserError

_LENGTH = struct.Struct("<I")
_TIMES: dict[str, Any] = {"$datetime": datetime.datetime, "$date": datetime.date, "$time": datetime.time}


def pack_value(value: Any) -> Any:
    """A value of a prompt's column as JSON; what JSON lacks becomes an object whose one key starts with `$`."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: pack_value(each) for key, each in value.items()}
        return {"$dict": [[pack_value(key), pack_value(each)] for key, each in value.items()]}
    if isinstance(value, list):
        return [pack_value(each) for each in value]
    if isinstance(value, tuple):
        return {"$tuple": [pack_value(each) for each in value]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), data]}
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        return {"$array": ["U", list(value.shape), value.ravel().tolist()]}
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return {"$array": ["O", list(value.shape), [pack_value(each) for each in value.ravel().tolist()]]}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    for tag, kind in _TIMES.items():  # a datetime is a date too, so the order matters
        if isinstance(value, kind):
            return {tag: value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def unpack_value(value: Any) -> Any:
    """The inverse of `pack_value`."""
    if isinstance(value, list):
        return [unpack_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith("$"):
        return {key: unpack_value(each) for key, each in value.items()}
    content = value[tag]
    if tag == "$dict":
        return {unpack_value(key): unpack_value(each) for key, each in content}
    if tag == "$tuple":
        return tuple(unpack_value(each) for each in content)
    if tag == "$array":
        return _unpack_array(*content)
    if tag == "$scalar":
        return np.frombuffer(base64.b64decode(content[1]), dtype=content[0])[0]
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$decimal":
        return Decimal(content)
    if tag == "$timedelta":
        return datetime.timedelta(*content)
    if tag in _TIMES:
        return _TIMES[tag].fromisoformat(content)
    raise BrokenPromise(f"A journal holds a value of the unknown kind {tag}: it was written by another version.")


def _unpack_array(dtype: str, shape: list[int], content: Any) -> npt.NDArray[Any]:
    if dtype == "U":
        return np.array(content, dtype=np.str_).reshape(shape)
    if dtype == "O":
        objects = np.empty(len(content), dtype=object)
        for at, each in enumerate(content):
            objects[at] = unpack_value(each)
        return objects.reshape(shape)
    return np.frombuffer(bytearray(base64.b64decode(content)), dtype=dtype).reshape(shape)


def encode_group(scored: ScoredGroup) -> bytes:
    """The group as bytes; raises `BrokenPromise` when it is not whole."""
    _check_whole(scored)
    group, request = scored.group, scored.group.request
    prompt = request.prompt
    header = {
        "prompt": [prompt.row_id, prompt.text, prompt.answer, prompt.domain, _pack_columns(prompt)],
        "request": [request.round, request.occurrence, request.minibatch, request.group_size, request.seed],
        "group": [group.weights_version, group.engine, group.attempt],
        "texts": group.texts,
        "outcomes": scored.outcomes,
        "timeouts": scored.timeouts,
        "parts": list(scored.parts),
        "weighted": list(scored.weighted),
        "sizes": [len(prompt.token_ids), len(group.token_ids), len(group.lengths)],
    }
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + _LENGTH.size) % 8)
    return b"".join(
        [
            _LENGTH.pack(len(text)),
            text,
            *(np.asarray(part, "<f8").tobytes() for part in scored.parts.values()),
            *(np.asarray(part, "<f8").tobytes() for part in scored.weighted.values()),
            np.asarray(scored.total, "<f8").tobytes(),
            np.asarray(group.sampler_logprobs, "<f4").tobytes(),
            np.asarray(prompt.token_ids, "<i4").tobytes(),
            np.asarray(group.token_ids, "<i4").tobytes(),
            np.asarray(group.lengths, "<i4").tobytes(),
            np.asarray(group.finished, "?").tobytes(),
        ]
    )


def decode_group(data: bytearray, *, columns: bool = True) -> ScoredGroup:
    """The inverse of `encode_group`; the arrays are views of `data`. Without `columns`, the prompt has none of them."""
    (length,) = _LENGTH.unpack_from(data)
    header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    at = _LENGTH.size + length

    def take(dtype: str, count: int) -> npt.NDArray[Any]:
        nonlocal at
        array = np.frombuffer(data, dtype, count, at)
        at += array.nbytes
        return array

    prompt_length, tokens, size = header["sizes"]
    parts = {name: take("<f8", size) for name in header["parts"]}
    weighted = {name: take("<f8", size) for name in header["weighted"]}
    total = take("<f8", size)
    logprobs, prompt_ids = take("<f4", tokens), take("<i4", prompt_length)
    token_ids, lengths, finished = take("<i4", tokens), take("<i4", size), take("?", size)
    row_id, text, answer, domain, packed = header["prompt"]
    unpacked = {name: unpack_value(value) for name, value in packed} if columns else {}
    prompt = Prompt(row_id, text, prompt_ids, answer, domain, unpacked)
    request = GroupRequest(prompt, *header["request"])
    version, engine, attempt = header["group"]
    group = Group(
        request, version, token_ids, logprobs, lengths, finished, tuple(header["texts"]), engine=engine, attempt=attempt
    )
    return ScoredGroup(group, parts, total, tuple(header["outcomes"]), header["timeouts"], weighted)


def _pack_columns(prompt: Prompt) -> list[list[Any]]:
    packed = []
    for name, value in prompt.columns.items():
        try:
            packed.append([name, pack_value(value)])
        except TypeError as error:
            raise UserError(
                f"Column {name!r} of row {prompt.row_id} holds a {error}, which cannot be kept in the run directory. "
                "Leave the column out of the data, or turn it into numbers, text, lists or objects of these."
            ) from error
    return packed


def _check_whole(scored: ScoredGroup) -> None:
    group = scored.group
    size, tokens = group.request.group_size, int(np.sum(group.lengths))
    expected = {
        "lengths": (len(group.lengths), size),
        "finished": (len(group.finished), size),
        "texts": (len(group.texts), size),
        "outcomes": (len(scored.outcomes), size),
        "total": (len(scored.total), size),
        "token_ids": (len(group.token_ids), tokens),
        "sampler_logprobs": (len(group.sampler_logprobs), tokens),
        **{f"reward part {name}": (len(part), size) for name, part in scored.parts.items()},
        **{f"weighted part {name}": (len(part), size) for name, part in scored.weighted.items()},
    }
    wrong = [f"{name} has {has}, not {needs}" for name, (has, needs) in expected.items() if has != needs]
    if wrong:
        raise BrokenPromise(
            f"Group {group.request.key} of round {group.request.round} is not whole: {'; '.join(wrong)}. "
            "A group is kept, trained or dropped whole."
        )
