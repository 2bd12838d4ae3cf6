"""Seeds of responses: a response is the same response whoever regenerates it."""

from __future__ import annotations

import hashlib

_MASK = (1 << 62) - 1  # leaves room for `seed + k` below the engine's signed 64-bit limit


def stable_hash(*parts: object) -> int:
    """A 62-bit hash of the parts that is the same in every process and on every machine (unlike `hash`)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _MASK


def group_seed(run_seed: int, round_: int, occurrence: int, row_id: str) -> int:
    """Seed of response 0 of a group.

    Response k has seed `group_seed(...) + k`, which is also what vLLM gives child k of a request for n responses: the
    seed of a response is a function of (run seed, round, occurrence, row id, k) whether it is asked for alone or with
    its group.
    """
    return stable_hash("group", run_seed, round_, occurrence, row_id)
