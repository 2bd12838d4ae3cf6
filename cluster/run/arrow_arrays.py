"""Arrow arrays straight from numpy buffers.

`pyarrow.array` would do, but its first call imports pandas: more than a second within the first round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Booleans = npt.NDArray[np.bool_]


def numbers(values: npt.NDArray[Any], known: Booleans | None = None) -> Any:
    """Integers or floats; null where not `known`."""
    import pyarrow as pa

    kind = {"int32": pa.int32, "int64": pa.int64, "float32": pa.float32, "float64": pa.float64}[values.dtype.name]()
    return pa.Array.from_buffers(kind, len(values), [_bits(known), pa.py_buffer(np.ascontiguousarray(values))])


def booleans(values: Booleans) -> Any:
    """Truth values."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def strings(values: Sequence[str | None]) -> Any:
    """Texts, null for None; half of a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD."""
    import pyarrow as pa

    known = np.array([value is not None for value in values], dtype=np.bool_)
    texts = [value or "" for value in values]
    joined = "".join(texts)
    if joined.isascii():  # one character is one byte: nothing needs to be encoded by itself
        data, lengths = joined.encode("ascii"), [len(text) for text in texts]
    else:
        encoded = [_utf8(text) for text in texts]
        data, lengths = b"".join(encoded), [len(text) for text in encoded]
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None if known.all() else _bits(known), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers)


def repeated(values: Sequence[str | None], sizes: npt.NDArray[np.int64]) -> Any:
    """Each text as often as `sizes` says, stored once."""
    import pyarrow as pa

    known = np.repeat(np.array([value is not None for value in values], dtype=np.bool_), sizes)
    places = np.repeat(np.arange(len(values), dtype=np.int32), sizes)
    texts = strings(["" if value is None else value for value in values])
    return pa.DictionaryArray.from_arrays(numbers(places, known), texts)


def lists(values: npt.NDArray[Any], lengths: npt.NDArray[Any], known: Booleans | None = None) -> Any:
    """Lists of numbers laid end to end in `values`; null where not `known`."""
    import pyarrow as pa

    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    items = numbers(values)
    return pa.Array.from_buffers(
        pa.list_(items.type), len(lengths), [_bits(known), pa.py_buffer(offsets)], children=[items]
    )


def _bits(flags: Booleans | None) -> Any:
    import pyarrow as pa

    return None if flags is None else pa.py_buffer(np.packbits(flags, bitorder="little"))


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")
