r"""Reads a canonical answer as what it is: a value, a tuple, a set or list, an interval or inequality, a matrix, an
equation. Only brackets, separators and relations are looked at; single values stay text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from rollout.rewards.answers.brackets import enclosed, split_top
from rollout.rewards.answers.exact import exact_text
from rollout.rewards.answers.notation import key
from rollout.rewards.answers.shapes import (
    Collected,
    Interval,
    Matrix,
    Named,
    Related,
    Sequenced,
    Shape,
    United,
    Value,
)

_MAX_ITEMS, _MAX_DEPTH = 64, 12
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MATRIX = re.compile(
    r"\\begin\{(?:[pbvBV]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{[a-zA-Z]+\}", re.DOTALL
)
_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|\\approx(?![a-z])|\\equiv(?![a-z])|[<>=]")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))(?<!\d{4},)")
_SYMBOL = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+)'*(?:_(?:\{[^{}]*\}|\w))?(?:\([a-zA-Z, ]*\))?")
_ABSOLUTE = re.compile(r"\|\s*([a-zA-Z])\s*\|")
_NOT_A_NAME = re.compile(r"[-+*/^]|\\(?:frac|sqrt|sum|int|binom)|^\d|\d\s*[a-zA-Z\\]|^\|[a-zA-Z]\|$")
_NO_SOLUTION_LIST = r"no solution|no solutions|no real solution|no real solutions|nosolution|\emptyset|\{\}|empty set"
_NO_SOLUTION = frozenset(_NO_SOLUTION_LIST.split("|"))
_EVERY_REAL = frozenset(("\\mathbb{r}", "all real numbers", "all reals", "real numbers", "(-\\infty,\\infty)"))


_OUTWARD = re.compile(r"([\[\]])([^\[\](),]+,[^\[\](),]+)([\[\]])")
_WORDS_BETWEEN = re.compile(r"(?:,\s*)?(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z])|;", re.IGNORECASE)
_COMMA = re.compile(r",")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_IN = re.compile(r"\\in(?![a-zA-Z])")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])\s*")
_SUCH_THAT = re.compile(r"\||:")
_MINUS = re.compile(r"\\setminus(?![a-zA-Z])")


@lru_cache(maxsize=8192)
def readings(text: str) -> tuple[Shape, ...]:
    """How a canonical text can be meant: `1,234` is one number or a list of two."""
    first, second = read(text, True), read(text, False)
    return (first,) if first == second else (first, second)


def read(text: str, thousands: bool, depth: int = 0) -> Shape:
    """One shape; `thousands`: a comma before exactly three digits belongs to the number."""
    text = _outward(text.strip().strip(",;").strip())
    while (inner := enclosed(text)) and inner[0] == "{":
        text = inner[1]
    if depth > _MAX_DEPTH:
        return Value(text)
    for reader in (_special, _listed, _united, _bracketed, _related, _plus_minus):
        if (shape := reader(text, thousands, depth + 1)) is not None:
            return shape
    return Value(text)


def _outward(text: str) -> str:
    """]0, 1[ as (0, 1): the other way to write ends that do not belong to an interval."""
    return _OUTWARD.sub(lambda m: f"{'(' if m[1] == ']' else '['}{m[2]}{')' if m[3] == '[' else ']'}", text)


def _special(text: str, thousands: bool, depth: int) -> Shape | None:
    name = key(text)
    if name in _NO_SOLUTION:
        return Collected((), True)
    if name in _EVERY_REAL:
        return Interval("-\\infty", "\\infty")
    inner = enclosed(text)
    body = inner[1] if inner and inner[0] in "([" and inner[1].startswith("\\begin") else text
    if match := _MATRIX.fullmatch(body.strip()):
        rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[1])]
        return Matrix(tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows if row))
    pieces, _ = split_top(text, _IN)
    if len(pieces) == 2 and all(pieces):
        shape = read(pieces[1], thousands, depth)
        return (
            Interval(shape.low, shape.high, shape.low_closed, shape.high_closed, key(pieces[0]))
            if isinstance(shape, Interval)
            else shape
        )
    return None


def _listed(text: str, thousands: bool, depth: int) -> Shape | None:
    pieces, joints = split_top(text, _WORDS_BETWEEN)
    if len(pieces) == 1:
        pieces, joints = _split_commas(text, thousands)
    else:
        pieces = [part for piece in pieces for part in _split_commas(piece, thousands)[0]]
    pieces = [piece for piece in pieces if piece]
    if len(pieces) < 2 or len(pieces) > _MAX_ITEMS:
        return None
    items = [read(piece, thousands, depth) for piece in pieces]
    if len(items) == 2 and not any("or" in joint.lower() for joint in joints) and (cut := _cut(*items)):
        return cut
    ranges = [item for item in items if isinstance(item, Interval) and item.variable]
    if len(ranges) == len(items):
        both = _intersection(ranges) if "and" in (joint.lower().strip(", ") for joint in joints) else None
        return both or United(tuple(items))
    return Collected(tuple(each for item in items for each in _solutions(item)), False)


def _solutions(shape: Shape) -> tuple[Shape, ...]:
    """Several solutions may be written as one: plus-minus 1 in a list of others."""
    return shape.items if isinstance(shape, Collected) and not shape.braced else (shape,)


def _split_commas(text: str, thousands: bool) -> tuple[list[str], list[str]]:
    if thousands:
        text = _THOUSANDS_COMMA.sub("\0", text)
    pieces, joints = split_top(text, _COMMA)
    return [piece.replace("\0", ",") for piece in pieces], joints


def _intersection(ranges: Sequence[Interval]) -> Interval | None:
    """x > 1 and x < 3 as the interval they leave."""
    lower = [each for each in ranges if each.high == "\\infty"]
    upper = [each for each in ranges if each.low == "-\\infty"]
    if len(ranges) != 2 or len(lower) != 1 or len(upper) != 1 or lower[0].variable != upper[0].variable:
        return None
    return Interval(lower[0].low, upper[0].high, lower[0].low_closed, upper[0].high_closed, lower[0].variable)


def _cut(first: Shape, second: Shape) -> United | None:
    """x > -1 and x \\ne 0: the interval without the point, if the point lies in it."""
    whole, hole = (first, second) if isinstance(first, Interval) else (second, first)
    if not isinstance(whole, Interval) or not isinstance(hole, United) or len(hole.parts) != 2:
        return None
    below, above = hole.parts
    if not (isinstance(below, Interval) and isinstance(above, Interval) and below.high == above.low):
        return None
    if (below.low, above.high, below.variable) != ("-\\infty", "\\infty", whole.variable) or not whole.variable:
        return None
    low, point, high = (exact_text(text) for text in (whole.low, below.high, whole.high))
    inside = point is not None and (low is None or low < point) and (high is None or point < high)
    if not inside or (low is None and whole.low != "-\\infty") or (high is None and whole.high != "\\infty"):
        return None
    return United((replace(whole, high=below.high, high_closed=False), replace(whole, low=above.low, low_closed=False)))


def _united(text: str, thousands: bool, depth: int) -> Shape | None:
    pieces, _ = split_top(text, _CUP)
    if 1 < len(pieces) <= _MAX_ITEMS:
        return United(tuple(read(piece, thousands, depth) for piece in pieces))
    pieces, _ = split_top(text, _MINUS)
    if len(pieces) == 2 and read(pieces[0], thousands, depth) == Interval("-\\infty", "\\infty"):
        hole = read(pieces[1], thousands, depth)
        if isinstance(hole, Collected) and len(hole.items) == 1 and isinstance(point := hole.items[0], Value):
            return _without(point.text, "")
    return None


def _without(point: str, variable: str) -> United:
    return United((Interval("-\\infty", point, variable=variable), Interval(point, "\\infty", variable=variable)))


def _bracketed(text: str, thousands: bool, depth: int) -> Shape | None:
    inner = enclosed(text)
    if inner is None:
        return None
    opening, inside, closing = inner
    if opening == "\\{":
        pieces, _ = split_top(inside, _SUCH_THAT)
        if len(pieces) == 2 and _RELATION.search(pieces[1]):
            return read(pieces[1], thousands, depth)
        pieces, _ = _split_commas(inside, thousands)
        return Collected(tuple(read(piece, thousands, depth) for piece in pieces[:_MAX_ITEMS] if piece), True)
    pieces, _ = _split_commas(inside.replace(";", ",") if "," not in inside else inside, thousands)
    if len(pieces) == 1:
        return read(inside, thousands, depth) if opening == "(" and closing == ")" else None
    if len(pieces) == 2 and not (opening == "[" and closing == "]" and any("=" in piece for piece in pieces)):
        pair = opening == "(" and closing == ")"
        return Interval(pieces[0], pieces[1], opening == "[", closing == "]", pair=pair)
    if len(pieces) > _MAX_ITEMS or _CLOSING[opening] != closing:
        return None
    return Sequenced(tuple(read(piece, thousands, depth) for piece in pieces))


def _related(text: str, thousands: bool, depth: int) -> Shape | None:
    pieces, relations = split_top(text, _RELATION)
    if not relations or len(relations) > 8:
        return None
    pieces = [piece or "" for piece in pieces]
    if not pieces[0] and relations == ["\\approx"]:
        return read(pieces[1], thousands, depth)
    if not all(pieces):
        return None
    if all(relation in ("=", "\\approx", "\\equiv") for relation in relations):
        return _equation(pieces, relations, thousands, depth)
    if len(relations) == 1:
        return _inequality(pieces[0], relations[0], pieces[1])
    if len(relations) == 2 and _SYMBOL.fullmatch(pieces[1]) and "=" not in relations:
        for low, high in (("<", "\\le"), (">", "\\ge")):
            if set(relations) <= {low, high}:
                ends = (pieces[0], pieces[2], relations[0] == high, relations[1] == high)
                ends = ends if low == "<" else (ends[1], ends[0], ends[3], ends[2])
                return Interval(*ends, variable=key(pieces[1]))
    return None


def _is_name(text: str) -> bool:
    inner = enclosed(text)
    if inner and inner[0] == "(":
        return all(_is_name(piece) for piece in split_top(inner[1], _COMMA)[0])
    return (
        not _NOT_A_NAME.search(text) and re.search("[a-zA-Z]", text) is not None and key(text) not in ("e", "\\pi", "i")
    )


def _equation(pieces: list[str], relations: list[str], thousands: bool, depth: int) -> Shape | None:
    left, right = pieces[0], pieces[-1]
    if not _is_name(left) and _is_name(right) and len(pieces) == 2:
        left, right = right, left
    if _is_name(left):
        value, text = read(right, thousands, depth), (left, "=", right)
        names = enclosed(left)
        if names and isinstance(value, Sequenced | Interval):
            parts = split_top(names[1], _COMMA)[0]
            values = value.items if isinstance(value, Sequenced) else (Value(value.low), Value(value.high))
            if len(parts) == len(values) > 1:
                bound = zip(parts, values, strict=True)
                return Collected(tuple(Named(key(name), each, (name, "=", _text(each))) for name, each in bound), False)
        return Named(key(left), value, text)
    return Related(left, "=", right) if len(pieces) == 2 else Value(right)


def _text(shape: Shape) -> str:
    return shape.text if isinstance(shape, Value) else ""


def _inequality(left: str, relation: str, right: str) -> Shape:
    if _SYMBOL.fullmatch(right) and not _SYMBOL.fullmatch(left):
        turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
        left, relation, right = right, turned.get(relation, relation), left
    if (inside := _ABSOLUTE.fullmatch(left)) and relation != "\\ne":
        closed, name = relation in ("\\le", "\\ge"), key(inside[1])
        if relation in ("<", "\\le"):
            return Interval(f"-({right})", right, closed, closed, name)
        below = Interval("-\\infty", f"-({right})", high_closed=closed, variable=name)
        return United((below, Interval(right, "\\infty", closed, variable=name)))
    if not _SYMBOL.fullmatch(left):
        return Related(left, relation, right)
    name = key(left)
    if relation == "\\ne":
        return _without(right, name)
    if relation in ("<", "\\le"):
        return Interval("-\\infty", right, high_closed=relation == "\\le", variable=name)
    return Interval(right, "\\infty", low_closed=relation == "\\ge", variable=name)


def _sign(signs: dict[str, str], match: re.Match[str]) -> str:
    return signs[match[1]]


def _plus_minus(text: str, thousands: bool, depth: int) -> Shape | None:
    if not 0 < len(_PLUS_MINUS.findall(text)) <= 3:
        return None
    both = []
    for upper in (True, False):
        signs = {"pm": "+" if upper else "-", "mp": "-" if upper else "+"}
        signed = _PLUS_MINUS.sub(partial(_sign, signs), text)
        both.append(read(signed.removeprefix("+"), thousands, depth))
    return Collected(tuple(both), False)
