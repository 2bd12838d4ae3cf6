r"""What an answer can be: a value, a tuple, a set or list, an interval, a union, a matrix, an equation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """Anything that is compared as one piece."""

    text: str


@dataclass(frozen=True)
class Sequenced:
    """A tuple or vector: order counts."""

    items: tuple[Shape, ...]


@dataclass(frozen=True)
class Collected:
    """A set, or solutions listed one after the other: order does not count."""

    items: tuple[Shape, ...]
    braced: bool


@dataclass(frozen=True)
class Interval:
    """All numbers between two ends; (a, b) in round brackets may also be meant as a pair."""

    low: str
    high: str
    low_closed: bool = False
    high_closed: bool = False
    variable: str = ""
    pair: bool = False


@dataclass(frozen=True)
class United:
    """A union of intervals and sets."""

    parts: tuple[Shape, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of canonical texts."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Named:
    """name = value."""

    name: str
    value: Shape
    text: tuple[str, str, str] = field(compare=False)


@dataclass(frozen=True)
class Related:
    """An equation or inequality that names no value."""

    left: str
    relation: str
    right: str


Shape = Value | Sequenced | Collected | Interval | United | Matrix | Named | Related
