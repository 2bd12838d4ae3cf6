"""The exact value of a tree that is a rational number, with every size bounded before it is computed."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from rollout.rewards.answers.expression import MAX_BITS, Node, TooBig, Unreadable, parse

MAX_FACTORIAL = 3_000
_THOUSANDS = re.compile(r"([+-]?\s*\d{1,3})((?:,\d{3})+|(?: \d{3})+)(\.\d+)?")


class NotRational(Exception):
    """The tree has a value that is not a rational number, or no value."""


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _root(_power(base, Fraction(exponent.numerator)), exponent.denominator)
    n = exponent.numerator
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and bits * abs(n) > MAX_BITS:
        raise TooBig("power")
    if base == 0 and n <= 0:
        raise NotRational("0 to a power below 1")
    return base ** (n if abs(base) > 1 or base == 0 or abs(n) <= MAX_BITS else n % 2)


def _root(value: Fraction, order: int) -> Fraction:
    if order < 1 or order > 64 or (value < 0 and order % 2 == 0):
        raise NotRational("root")
    parts = []
    for part in (abs(value.numerator), value.denominator):
        guess = math.isqrt(part) if order == 2 else _integer_root(part, order)
        if guess**order != part:
            raise NotRational("root")
        parts.append(guess)
    return Fraction(-parts[0] if value < 0 else parts[0], parts[1])


def _integer_root(value: int, order: int) -> int:
    low, high = 0, 1 << (value.bit_length() // order + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**order <= value else (low, middle - 1)
    return low


def _whole(value: Fraction, limit: int) -> int:
    if value.denominator != 1 or value < 0:
        raise NotRational("not a natural number")
    if value > limit:
        raise TooBig("factorial")
    return value.numerator


def exact(node: Node) -> Fraction:
    """The rational value of a tree; raises NotRational or TooBig, and never computes anything beyond MAX_BITS."""
    if node.kind == "number":
        return node.value
    if node.kind in ("symbol", "constant") or node.kind not in _EXACT:
        raise NotRational(node.name or node.kind)
    return _EXACT[node.kind](*[exact(arg) for arg in node.args])


def _bounded(operation: Callable[[Fraction, Fraction], Fraction], values: tuple[Fraction, ...]) -> Fraction:
    result = values[0]
    for value in values[1:]:
        result = operation(result, value)
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
            raise TooBig("sum or product")
    return result


def _divide(a: Fraction, b: Fraction) -> Fraction:
    if b == 0:
        raise NotRational("division by zero")
    return a / b


def _order(value: Fraction) -> int:
    if value.denominator != 1:
        raise NotRational("root")
    return value.numerator


_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda *terms: _bounded(operator.add, terms),
    "mul": lambda *factors: _bounded(operator.mul, factors),
    "div": _divide,
    "pow": _power,
    "root": lambda a, n: _root(a, _order(n)),
    "factorial": lambda a: Fraction(math.factorial(_whole(a, MAX_FACTORIAL))),
    "binom": lambda n, k: Fraction(math.comb(_whole(n, MAX_FACTORIAL), _whole(k, MAX_FACTORIAL))),
    "abs": abs,
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
}


def ungrouped(text: str) -> str:
    """1,234 and 1 234 as 1234."""
    match = _THOUSANDS.fullmatch(text)
    return f"{match[1]}{re.sub('[, ]', '', match[2])}{match[3] or ''}" if match else text


def exact_text(text: str) -> Fraction | None:
    """The rational value of a canonical text, or None when it has none or one too large to compute."""
    try:
        return exact(parse(ungrouped(text.strip())))
    except (Unreadable, NotRational, TooBig):
        return None
