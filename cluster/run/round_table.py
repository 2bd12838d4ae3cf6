"""The scored groups of a committed round as a Parquet table: one row per response, readable with pandas."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cluster.run.arrow_arrays import booleans, lists, numbers, repeated, strings
from cluster.run.group_codec import decode_group
from cluster.run.records import sync_folder, whole_records
from rollout.types import DoubleArray, ScoredGroup, UserError

if TYPE_CHECKING:
    import pyarrow as pa

Key = tuple[str, int]
_TOKENS_PER_ROW_GROUP = 4_000_000
_GROUPS_PER_ROW_GROUP = 512


def part_names(groups: Iterable[ScoredGroup]) -> list[str]:
    """Names of the reward parts, in the order in which they appear."""
    return list(dict.fromkeys(name for scored in groups for name in scored.parts))


def as_table(
    groups: Sequence[ScoredGroup],
    parts: Sequence[str],
    advantages: Mapping[Key, DoubleArray],
    minibatches: Mapping[Key, int],
    dropped: Mapping[Key, str],
) -> pa.Table:
    """Rows of some groups.

    `advantage` and `minibatch` are null and `dropped` holds the reason where a group was not trained. The ids of a
    prompt stand in the row of its response 0 only; its text stands in every row.
    """
    import pyarrow as pa

    requests = [scored.group.request for scored in groups]
    prompts = [request.prompt for request in requests]
    sizes = np.array([request.group_size for request in requests], dtype=np.int64)
    lengths = _flat([scored.group.lengths for scored in groups], "int32")
    trained = [request.key not in dropped for request in requests]
    taken = np.repeat(np.array(trained, dtype=np.bool_), sizes)
    batch = [minibatches.get(request.key, request.minibatch) for request in requests]
    unknown = [np.full(size, np.nan) for size in sizes]
    advantage = [
        advantages[request.key] if used else none
        for request, used, none in zip(requests, trained, unknown, strict=True)
    ]

    def each(values: Iterable[int], dtype: str = "int32") -> Any:
        return numbers(np.repeat(np.array(list(values), dtype), sizes))

    columns = {
        "round": each((request.round for request in requests), "int64"),
        "row_id": repeated([prompt.row_id for prompt in prompts], sizes),
        "occurrence": each(request.occurrence for request in requests),
        "k": numbers(_flat([np.arange(size) for size in sizes], "int32")),
        "attempt": each(scored.group.attempt for scored in groups),
        "minibatch": numbers(np.repeat(np.array(batch, "int32"), sizes), known=taken),
        "dropped": repeated([dropped.get(request.key) for request in requests], sizes),
        "domain": repeated([prompt.domain for prompt in prompts], sizes),
        "prompt": repeated([prompt.text for prompt in prompts], sizes),
        "answer": repeated([prompt.answer for prompt in prompts], sizes),
        "response": strings([text for scored in groups for text in scored.group.texts]),
        "token_ids": lists(_flat([scored.group.token_ids for scored in groups], "int32"), lengths),
        "sampler_logprobs": lists(_flat([scored.group.sampler_logprobs for scored in groups], "float32"), lengths),
        "prompt_token_ids": _prompt_ids(groups, int(sizes.sum())),
        "length": numbers(lengths),
        "finished": booleans(_flat([scored.group.finished for scored in groups], "bool")),
        "outcome": strings([outcome for scored in groups for outcome in scored.outcomes]).dictionary_encode(),
        "reward_total": numbers(_flat([scored.total for scored in groups], "float64")),
    }
    for name in parts:
        values = [scored.parts.get(name, none) for scored, none in zip(groups, unknown, strict=True)]
        columns[f"reward_{name}"] = numbers(_flat(values, "float64"))
    columns |= {
        "advantage": numbers(_flat(advantage, "float64"), known=taken),
        "weights_version": each((scored.group.weights_version for scored in groups), "int64"),
        "engine": each(scored.group.engine for scored in groups),
        "seed": numbers(_flat([request.seed + np.arange(request.group_size) for request in requests], "int64")),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def write_round(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write the tables (row groups) as one file that appears whole under its name or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path.with_suffix(".parquet.tmp")
    writer = None
    with temporary.open("wb") as file:
        for table in tables:
            if writer is None:
                often = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
                # Without the Arrow schema, readers see plain strings although repeated ones are stored once.
                writer = pq.ParquetWriter(
                    file, table.schema, store_schema=False, compression="zstd", compression_level=1,
                    use_dictionary=often, write_statistics=False,
                )  # fmt: skip
            writer.write_table(table)
        if writer is not None:
            writer.close()
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def in_portions(groups: Iterable[ScoredGroup]) -> Iterable[list[ScoredGroup]]:
    """Groups in portions that are written as one row group each, so that memory stays bounded."""
    portion: list[ScoredGroup] = []
    tokens = 0
    for scored in groups:
        portion.append(scored)
        tokens += len(scored.group.token_ids) + len(scored.group.request.prompt.token_ids)
        if len(portion) == _GROUPS_PER_ROW_GROUP or tokens >= _TOKENS_PER_ROW_GROUP:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def read_round(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The responses of one round, from its Parquet file or from the journal of a round that is not committed yet.

    From a journal, `advantage` and `minibatch` are null: nothing has been trained.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        return pq.read_table(path, columns=None if columns is None else list(columns))
    if path.suffix != ".journal":
        raise UserError(f"{path} holds no groups: give a groups/round-*.parquet or .journal file.")
    groups = [decode_group(payload, columns=False) for _, payload in whole_records(path)]
    table = as_table(
        groups, part_names(groups), {}, {}, {scored.group.request.key: "not committed" for scored in groups}
    )
    plain = [
        pa.field(field.name, pa.string()) if pa.types.is_dictionary(field.type) else field for field in table.schema
    ]
    table = table.cast(pa.schema(plain))
    return table if columns is None else table.select(list(columns))


def _flat(arrays: Sequence[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _prompt_ids(groups: Sequence[ScoredGroup], rows: int) -> Any:
    """List column with the ids of each prompt in the first row of its group, null in the others."""
    lengths = np.zeros(rows, dtype=np.int64)
    first = np.zeros(rows, dtype=np.bool_)
    at = 0
    for scored in groups:
        lengths[at], first[at] = len(scored.group.request.prompt.token_ids), True
        at += scored.group.request.group_size
    return lists(_flat([scored.group.request.prompt.token_ids for scored in groups], "int32"), lengths, known=first)
