r"""Compares two answers part by part, once `readings` has said what they are.

The comparison of single values is handed in, so that the same walk serves the fast stages and the one with math-verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollout.rewards.answers import scalars
from rollout.rewards.answers.identity import Opinion
from rollout.rewards.answers.notation import key
from rollout.rewards.answers.readings import readings
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

Leaf = Callable[[str, str], Opinion]
_MAX_COMPARISONS = 400


def compare(gold: str, answer: str, leaf: Leaf) -> Opinion:
    """The opinion on two canonical answers: right if any reading of the one is any reading of the other."""
    unsure = False
    for gold_shape in readings(gold):
        for answer_shape in readings(answer):
            opinion = match(gold_shape, answer_shape, leaf)
            if opinion == "right":
                return "right"
            unsure = unsure or opinion == "unsure"
    return "unsure" if unsure else "wrong"


def all_of(opinions: Iterable[Opinion]) -> Opinion:
    """Right if all are; wrong as soon as one is."""
    result: Opinion = "right"
    for opinion in opinions:
        if opinion == "wrong":
            return "wrong"
        if opinion == "unsure":
            result = "unsure"
    return result


def match(gold: Shape, answer: Shape, leaf: Leaf) -> Opinion:
    """The opinion on two shapes."""
    gold, answer = _simplest(gold), _simplest(answer)
    if isinstance(gold, Named) or isinstance(answer, Named):
        return _named(gold, answer, leaf)
    if isinstance(gold, Value) and isinstance(answer, Value):
        return leaf(gold.text, answer.text)
    if isinstance(gold, Related) or isinstance(answer, Related):
        return _related(gold, answer, leaf)
    if isinstance(gold, United) or isinstance(answer, United):
        if isinstance(gold, United) and isinstance(answer, United):
            return _any_order(gold.parts, answer.parts, leaf)
        return _perhaps_a_set(gold, answer)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return "wrong"
        cells = zip((c for row in gold.rows for c in row), (c for row in answer.rows for c in row), strict=True)
        return all_of(leaf(*pair) for pair in cells)
    gold, answer = _vector(gold, answer), _vector(answer, gold)
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        return _intervals(gold, answer, leaf)
    return _items(gold, answer, leaf)


def _vector(shape: Shape, other: Shape) -> Shape:
    """A column or row as the tuple it is compared with."""
    if not isinstance(shape, Matrix) or isinstance(other, Matrix) or _parts(other) is None:
        return shape
    cells = tuple(Value(cell) for row in shape.rows for cell in row)
    return Sequenced(cells) if len(cells) > 1 and 1 in (len(shape.rows), len(shape.rows[0])) else shape


def _simplest(shape: Shape) -> Shape:
    """A set of one is its element; sets in a union are one set."""
    if isinstance(shape, Collected) and len(set(shape.items)) == 1:
        return _simplest(shape.items[0])
    if not isinstance(shape, United):
        return shape
    flat: list[Shape] = []
    for part in map(_simplest, shape.parts):
        flat += part.parts if isinstance(part, United) else [part]
    loose = [item for part in flat if isinstance(part, Collected) for item in part.items]
    loose += [part for part in flat if isinstance(part, Value)]
    ranges = [part for part in flat if not isinstance(part, Collected | Value)]
    if not ranges:
        return Collected(tuple(loose), True)
    return United((*ranges, *loose)) if loose or len(ranges) > 1 else ranges[0]


def _named(gold: Shape, answer: Shape, leaf: Leaf) -> Opinion:
    if isinstance(gold, Named) and isinstance(answer, Named):
        if gold.name == answer.name:
            return match(gold.value, answer.value, leaf)
        both_values = isinstance(gold.value, Value) and isinstance(answer.value, Value)
        return scalars.compare_relations(gold.text, answer.text) if both_values else "wrong"
    if isinstance(gold, Named):
        if isinstance(answer, Related):
            return scalars.compare_relations(gold.text, (answer.left, answer.relation, answer.right))
        return match(gold.value, answer, leaf)
    assert isinstance(answer, Named)
    if isinstance(gold, Related):
        return scalars.compare_relations((gold.left, gold.relation, gold.right), answer.text)
    return match(gold, answer.value, leaf)


def _related(gold: Shape, answer: Shape, leaf: Leaf) -> Opinion:
    relations = _as_relation(gold), _as_relation(answer)
    if relations[0] and relations[1]:
        if key("".join(relations[0])) == key("".join(relations[1])):
            return "right"
        return scalars.compare_relations(relations[0], relations[1])
    if isinstance(gold, Value) and isinstance(answer, Related) and answer.relation == "=":
        # A calculation written out, 2+3=5, states its result; x+1=3 does not state x.
        if not scalars.is_number(answer.left):  # x(x+1) = x^2+x is both, if both are right
            return all_of((leaf(gold.text, answer.left), leaf(gold.text, answer.right)))
        return leaf(gold.text, answer.right)
    return _perhaps_a_set(gold, answer)


def _as_relation(shape: Shape) -> tuple[str, str, str] | None:
    """An inequality as it was written: x > 3, or 2x > 6 that names no interval yet."""
    if isinstance(shape, Related):
        return shape.left, shape.relation, shape.right
    if isinstance(shape, Interval) and shape.variable:
        if shape.high == "\\infty" and shape.low != "-\\infty":
            return shape.variable, "\\ge" if shape.low_closed else ">", shape.low
        if shape.low == "-\\infty" and shape.high != "\\infty":
            return shape.variable, "\\le" if shape.high_closed else "<", shape.high
    return None


def _perhaps_a_set(gold: Shape, answer: Shape) -> Opinion:
    """An interval on one side, and on the other something that may describe the same set in a way not read here."""
    sides = (gold, answer)
    if not any(isinstance(side, Interval | United) for side in sides):
        return "wrong"
    other = [side for side in sides if not isinstance(side, Interval | United)]
    if not other:
        return "wrong"
    if isinstance(other[0], Related):
        return "unsure"
    return "unsure" if isinstance(other[0], Value) and scalars.is_unreadable(other[0].text) else "wrong"


def _intervals(gold: Interval, answer: Interval, leaf: Leaf) -> Opinion:
    if gold.variable and answer.variable and gold.variable != answer.variable:
        return "wrong"
    if (gold.low_closed, gold.high_closed) != (answer.low_closed, answer.high_closed):
        return "wrong"
    return all_of(leaf(*pair) for pair in ((gold.low, answer.low), (gold.high, answer.high)))


def _parts(shape: Shape) -> tuple[tuple[Shape, ...], bool, bool] | None:
    """(items, ordered?, braced?) of anything with items; (a, b) counts as a pair here."""
    if isinstance(shape, Sequenced):
        return shape.items, True, False
    if isinstance(shape, Collected):
        return shape.items, any(_is_ellipsis(item) for item in shape.items), shape.braced
    if isinstance(shape, Interval) and shape.pair:
        return (Value(shape.low), Value(shape.high)), True, False
    return None


def _is_ellipsis(shape: Shape) -> bool:
    return isinstance(shape, Value) and "\\ldots" in shape.text


def _items(gold: Shape, answer: Shape, leaf: Leaf) -> Opinion:
    gold_parts, answer_parts = _parts(gold), _parts(answer)
    if gold_parts is None or answer_parts is None:
        return _perhaps_a_set(gold, answer)
    (wanted, ordered, gold_braced), (given, answer_ordered, answer_braced) = gold_parts, answer_parts
    if (gold_braced and answer_ordered and not answer_braced) or (answer_braced and ordered and not gold_braced):
        return "wrong"  # a set in braces is no tuple
    if ordered or _bound(wanted) != _bound(given):
        if len(wanted) != len(given):
            return "wrong"
        return all_of(match(*pair, leaf) for pair in zip(wanted, given, strict=True))
    return _any_order(wanted, given, leaf)


def _bound(items: Sequence[Shape]) -> bool:
    """x = 1, y = 2: different names, so the values alone are only right in that order."""
    names = {item.name for item in items if isinstance(item, Named)}
    return len(names) == len(items) > 1


def _distinct(items: Iterable[Shape]) -> list[Shape]:
    seen: dict[object, Shape] = {}
    for item in items:
        seen.setdefault(key(item.text) if isinstance(item, Value) else item, item)
    return list(seen.values())


def _any_order(wanted: Iterable[Shape], given: Iterable[Shape], leaf: Leaf) -> Opinion:
    wanted, left = _distinct(wanted), _distinct(given)
    if len(wanted) != len(left):
        return "wrong"
    comparisons = 0
    unmatched = False
    for item in wanted:
        opinions = []
        for candidate in left:
            comparisons += 1
            if comparisons > _MAX_COMPARISONS:
                return "unsure"
            opinions.append(match(item, candidate, leaf))
            if opinions[-1] == "right":
                left.remove(candidate)
                break
        else:
            if "unsure" not in opinions:
                return "wrong"
            unmatched = True
    return "unsure" if unmatched else "right"
