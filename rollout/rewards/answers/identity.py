"""Decides whether two expressions are the same function, by evaluating both to 60 digits at fixed points.

Two different expressions of the kind that fits into an answer box do not agree to 40 digits at several unrelated
points. Nothing is simplified and nothing symbolic is computed, so the cost is bounded by the size of the trees.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from rollout.rewards.answers.exact import NotRational, exact
from rollout.rewards.answers.expression import Node, TooBig, symbols

Opinion = Literal["right", "wrong", "unsure"]

_DIGITS, _AGREE = 60, 40
_POSITIVE, _MIXED = 4, 3
_LARGEST_EXPONENT, _LARGEST_ANGLE = 10**6, 10**9
_CONTEXT = threading.local()
_UNSAFE = ("floor", "ceil")  # steps: a few points say little, so they never prove equality


class Undefined(Exception):
    """No value at this point (a pole, a guard)."""


def evaluate(node: Node, at: Mapping[str, Any], mp: Any) -> Any:
    """The value of a tree as an mpmath number; raises Undefined where there is none or it would be too large."""
    kind = node.kind
    if kind == "number":
        return mp.mpf(node.value.numerator) / node.value.denominator
    if kind == "symbol":
        return at[node.name]
    if kind == "constant":
        if node.name == "infty":
            raise Undefined("infinity")
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1), "degree": +mp.degree}[node.name]
    args = [evaluate(arg, at, mp) for arg in node.args]
    if kind == "add":
        return sum(args[1:], args[0])
    if kind == "mul":
        return math.prod(args[1:], start=args[0])
    if kind == "div":
        return args[0] / _nonzero(args[1])
    if kind in ("pow", "root"):
        return _power(node, args, mp)
    return _function(kind, args, mp)


def _nonzero(value: Any) -> Any:
    if value == 0:
        raise Undefined("division by zero")
    return value


def _power(node: Node, args: list[Any], mp: Any) -> Any:
    base, exponent = args
    if node.kind == "root":
        exponent = 1 / _nonzero(exponent)
    if base == 0:
        if mp.re(exponent) <= 0:
            raise Undefined("0 to a power below 1")
        return base
    if abs(exponent) * (1 + abs(mp.log(abs(base)))) > _LARGEST_EXPONENT:
        raise Undefined("power too large")
    if mp.im(base) == 0 and mp.re(base) < 0 and (odd := _odd_root(node)) is not None:
        # School roots are real: the cube root of -8 is -2.
        return (-1) ** odd.numerator * abs(base) ** exponent
    return base**exponent


def _odd_root(node: Node) -> Fraction | None:
    """The exponent p/q of a power or root when q is odd and above 1."""
    try:
        value = exact(node.args[1])
        value = 1 / value if node.kind == "root" else value
    except (NotRational, TooBig, ZeroDivisionError):
        return None
    return value if value.denominator % 2 == 1 and value.denominator > 1 else None


def _function(kind: str, args: list[Any], mp: Any) -> Any:
    x = args[0]
    if abs(x) > _LARGEST_ANGLE:
        raise Undefined("argument too large")
    try:
        if kind in ("log", "ln"):
            value = mp.log(_nonzero(x))
            base = args[1] if len(args) > 1 else mp.mpf(10) if kind == "log" else mp.e
            return value / _nonzero(mp.log(_nonzero(base)))
        if kind == "exp" and abs(x) > _LARGEST_EXPONENT:
            raise Undefined("power too large")
        if kind == "abs":
            return abs(x)
        if kind == "factorial":
            return mp.gamma(x + 1) if abs(x) < 3000 else _undefined()
        if kind == "binom":
            return mp.binomial(*args) if max(abs(arg) for arg in args) < 3000 else _undefined()
        name = "a" + kind[3:] if kind.startswith("arc") else kind
        return getattr(mp, name)(x)
    except (ValueError, ZeroDivisionError, OverflowError) as problem:
        raise Undefined(kind) from problem


def _undefined() -> Any:
    raise Undefined("argument too large")


def _points(names: frozenset[str], mp: Any) -> list[tuple[bool, dict[str, Any]]]:
    """(all positive?, value per name): the same points for the same names in every process."""
    points = []
    for i in range(_POSITIVE + _MIXED):
        positive = i < _POSITIVE
        point = {}
        for j, name in enumerate(sorted(names)):
            seed = zlib.crc32(f"{name}/{i}".encode())
            value = mp.mpf(3 + seed % 100003) / 34721 + mp.sqrt(2) / 7
            point[name] = -value if not positive and (i + j) % 2 == 0 else value
        points.append((positive, point))
    return points


def _close(a: Any, b: Any, mp: Any) -> bool:
    return bool(abs(a - b) <= mp.mpf(10) ** -_AGREE * max(abs(a), abs(b)))


def _both(g: Node, a: Node, point: Mapping[str, Any], mp: Any) -> tuple[Any, Any] | None:
    """Both values, with noise around zero recognised by evaluating it once more with twice the digits."""
    try:
        values = evaluate(g, point, mp), evaluate(a, point, mp)
        if not all(mp.isfinite(value) for value in values):
            return None
        if not _close(*values, mp) and max(map(abs, values)) < mp.mpf(10) ** -_AGREE:
            with mp.workdps(2 * _DIGITS):
                again = evaluate(g, point, mp), evaluate(a, point, mp)
            tiny = mp.mpf(10) ** -(_DIGITS + _AGREE)
            values = tuple(mp.mpf(0) if abs(value) < tiny else value for value in again)
    except (Undefined, ZeroDivisionError, OverflowError, ValueError):
        return None
    return values


def _with_case(g: Node, a: Node) -> tuple[frozenset[str], dict[str, str]]:
    """Names the two trees share, and how the answer's are mapped to the gold's when only their case differs."""
    names, others = symbols(g), symbols(a)
    if names == others:
        return names, {}
    lower = {name.lower(): name for name in names}
    if {name.lower() for name in others} == set(lower) and len(lower) == len(names) == len(others):
        return names, {name: lower[name.lower()] for name in others}
    return names | others, {}


def _mp() -> Any:
    """An mpmath context of this thread's own (precision is state), imported when the first answer needs it."""
    if not hasattr(_CONTEXT, "mp"):
        import mpmath

        _CONTEXT.mp = mpmath.mp.clone()
    _CONTEXT.mp.dps = _DIGITS
    return _CONTEXT.mp


def same_value(g: Node, a: Node) -> Opinion:
    """Whether two trees are the same number or the same function of their variables."""
    mp = _mp()
    names, mapped = _with_case(g, a)
    agreed = 0
    for positive, point in _points(names, mp):
        point |= {name: point[target] for name, target in mapped.items()}
        values = _both(g, a, point, mp)
        if values is None:
            continue
        if _close(*values, mp):
            agreed += positive
        elif positive or not names or all(mp.im(value) == 0 for value in values):
            return "wrong"
        if not names:
            break
    if agreed >= (3 if names else 1) and not _is_unsafe(g) and not _is_unsafe(a):
        return "right"
    return "unsure"


def proportional(g: Node, a: Node, positive_only: bool = False) -> Opinion:
    """Whether a = c * g with one constant c (c > 0 if asked): the same equation, or inequality, up to a factor."""
    mp = _mp()
    names, mapped = _with_case(g, a)
    if names != symbols(g):
        return "wrong"
    ratio = None
    agreed = 0
    for _, point in _points(names, mp):
        point |= {name: point[target] for name, target in mapped.items()}
        values = _both(g, a, point, mp)
        if values is None or values[0] == 0 or values[1] == 0:
            continue
        now = values[1] / values[0]
        if ratio is not None and not _close(now, ratio, mp):
            return "unsure" if len(names) == 1 else "wrong"
        ratio, agreed = now, agreed + 1
    if ratio is None or agreed < 3 or _is_unsafe(g) or _is_unsafe(a):
        return "unsure"
    return "wrong" if positive_only and (mp.im(ratio) != 0 or mp.re(ratio) < 0) else "right"


def decimals_of(node: Node, places: int) -> Fraction | None:
    """The value of a constant tree, exact to `places` decimals and a few more; None if it is not a real number."""
    mp = _mp()
    try:
        with mp.workdps(max(_DIGITS, places + 20)):
            value = evaluate(node, {}, mp)
            if mp.im(value) != 0 or not mp.isfinite(value) or abs(value) > mp.mpf(10) ** 40:
                return None
            return Fraction(int(mp.nint(mp.re(value) * mp.mpf(10) ** (places + 5))), 10 ** (places + 5))
    except (Undefined, ZeroDivisionError, OverflowError, ValueError, KeyError):
        return None


def _is_unsafe(node: Node) -> bool:
    return node.kind in _UNSAFE or any(_is_unsafe(arg) for arg in node.args)


def is_rational_tree(node: Node) -> bool:
    """Whether only rational arithmetic stands in the tree, so that agreeing digits are no proof of equality."""
    return node.kind in ("number", "add", "mul", "div", "pow", "factorial", "binom", "abs") and all(
        is_rational_tree(arg) for arg in node.args
    )
