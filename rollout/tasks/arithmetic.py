"""The demo's prompts: sums of two numbers below 100, worked out digit by digit.

    47+85=   ->   <think>7+5=12,4+8+1=13</think>132

A problem is held out by a hash of its text with the smaller number first, so that `47+85=` and `85+47=` are always on
the same side. (A linear form of the two numbers modulo n looks random but holds out a structured slice.)

    --prompts arithmetic:carries      only the sums in which both digits carry, as above
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from rollout.types import UserError

NAME = "arithmetic"
CARRIES = "carries"
"""The variant with the longest scratchpads: both digits carry, and the answer has three digits."""

LIMIT = 100
"""Both numbers lie in 0 .. LIMIT - 1."""
HELD_OUT_ONE_IN = 12
"""About one problem in this many is held out: never trained on, neither supervised nor by reinforcement."""


def problem(a: int, b: int) -> str:
    """The text of a problem, for example `47+85=`."""
    return f"{a}+{b}="


def scratchpad(a: int, b: int) -> str:
    """The sum worked out from the right, carry last, for example `7+5=12,4+8+1=13`."""
    units = a % 10 + b % 10
    carry = "+1" if units > 9 else ""
    return f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}{carry}={a // 10 + b // 10 + units // 10}"


def response(a: int, b: int) -> str:
    """The right response in the right format, without the end token."""
    return f"<think>{scratchpad(a, b)}</think>{a + b}"


def _digest(a: int, b: int) -> bytes:
    return hashlib.blake2b(problem(min(a, b), max(a, b)).encode(), digest_size=8).digest()


def held_out(a: int, b: int) -> bool:
    """True when the problem, in either order, belongs to the held-out split."""
    return int.from_bytes(_digest(a, b), "big") % HELD_OUT_ONE_IN == 0


def pairs(split: Literal["train", "eval"]) -> list[tuple[int, int]]:
    """All pairs of one split in an order drawn by hash: any first part of the list is a fair sample of it."""
    wanted = split == "eval"
    chosen = [(a, b) for a in range(LIMIT) for b in range(LIMIT) if held_out(a, b) == wanted]
    return sorted(chosen, key=lambda pair: hashlib.blake2b(problem(*pair).encode(), digest_size=8).digest())


def carries(a: int, b: int) -> bool:
    """True when the units carry and so do the tens by themselves."""
    return a % 10 + b % 10 > 9 and a // 10 + b // 10 > 9


def check(spec: str) -> None:
    """Spelling: all sums, or the variant."""
    if spec not in ("", CARRIES):
        raise UserError(f"--prompts {NAME}:{spec}: there is no such variant. Write {NAME} or {NAME}:{CARRIES}.")


def rows(spec: str, *, seed: int, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Every problem of the split, or of its variant, once.

    `seed` changes nothing: the problems are finite, and runs with different seeds are compared on the same held-out
    problems.
    """
    del seed
    check(spec)
    return [
        {
            "prompt": problem(a, b),
            "answer": str(a + b),
            "row_id": f"{a}+{b}",
            "domain": NAME,
            "scratchpad": scratchpad(a, b),
        }
        for a, b in pairs(split)
        if spec != CARRIES or carries(a, b)
    ]
