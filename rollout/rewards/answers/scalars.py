r"""Compares two single values: numbers, percentages, quantities, words, expressions.

Everything here is exact or evaluated within fixed bounds. `unsure` means that the notation is not known here, so that
math-verify has to be asked.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rollout.rewards.answers import forms, identity
from rollout.rewards.answers.exact import NotRational, exact, exact_text, ungrouped
from rollout.rewards.answers.expression import FUNCTIONS, Node, TooBig, Unreadable, parse, symbols
from rollout.rewards.answers.identity import Opinion
from rollout.rewards.answers.notation import key
from rollout.rewards.answers.units import DEGREE, PERCENT, RADIAN, split_unit

APPROXIMATION_DIGITS = 10
"""Significant digits from which a decimal may stand for a value that is no decimal: 0.333333 is not 1/3."""

FLOAT_DIGITS = 16
"""Digits from which the last one may be off by one: 1.4142135623730951 is how a float prints the root of 2."""

_DECIMAL = re.compile(r"[+-]?\s*(\d*)\.(\d+)(?:[eE]([+-]?\d{1,4})|\s*\*\s*10\s*\^\s*\{?\s*([+-]?\d{1,4})\s*\}?)?")
_TRIGONOMETRY = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_SHORT_WORD_LIST = """
yes no odd not and or all any one two six ten red up down in on of is the if to at by for but so day sun mon tue wed
thu fri sat
"""
_SHORT_WORDS = frozenset(_SHORT_WORD_LIST.split())


def is_prose(text: str) -> bool:
    """Whether a canonical text has words in it, so that only the same words are the same answer."""
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", text)) if word not in FUNCTIONS]
    return any(len(word) >= 4 or word.lower() in _SHORT_WORDS for word in words)


def compare(gold: str, answer: str) -> Opinion:
    """The opinion on two canonical texts that are no sets, tuples, intervals or equations."""
    if key(gold) == key(answer):
        return "right" if key(gold) else "wrong"
    if (opinion := forms.compare(gold, answer, compare)) is not None:
        return opinion
    gold_value, gold_unit = split_unit(gold)
    answer_value, answer_unit = split_unit(answer)
    if {gold_unit, answer_unit} == {DEGREE, RADIAN}:
        gold_unit, answer_unit = (unit if unit == DEGREE else None for unit in (gold_unit, answer_unit))
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return "wrong"
    if is_prose(gold_value) or is_prose(answer_value):
        return "right" if key(gold_value) == key(answer_value) and key(gold_value) else "wrong"
    gold_value, answer_value = ungrouped(_without_degrees(gold_value)), ungrouped(_without_degrees(answer_value))
    if not gold_value or not answer_value:
        return "wrong"
    opinion = _values(gold_value, answer_value)
    if opinion != "right" and gold_unit != answer_unit:
        return _converted(gold_value, gold_unit, answer_value, answer_unit, opinion)
    return _percent_of_fraction(gold_value, gold_unit, answer_value, answer_unit, opinion)


def _without_degrees(text: str) -> str:
    """180^\\circ - x as 180 - x; inside a trigonometric function the sign has a value."""
    return text if _TRIGONOMETRY.search(text) else text.replace("^{\\circ}", "")


def _read(text: str) -> Node | None:
    try:
        return parse(text)
    except (Unreadable, TooBig):
        return None


def is_unreadable(text: str) -> bool:
    """Whether the text is notation this package does not read (and no prose), so that math-verify has to be asked."""
    return _read(text) is None and _is_notation(text) and not is_prose(text)


def _is_notation(text: str) -> bool:
    """Whether it can be read here or at least has a LaTeX command in it; what has neither is a slip of the pen."""
    return _COMMAND.search(text) is not None or _read(text) is not None


def is_number(text: str) -> bool:
    """Whether the text is an expression without variables."""
    node = _read(text)
    return node is not None and not symbols(node)


def _infinity(node: Node) -> int:
    """+1 or -1 for a signed infinity, 0 for anything else."""
    if node.kind == "constant" and node.name == "infty":
        return 1
    return -_infinity(node.args[1]) if node.kind == "mul" and len(node.args) == 2 and node.args[0].value == -1 else 0


def _values(gold: str, answer: str) -> Opinion:
    if ("\\ldots" in gold) != ("\\ldots" in answer):
        return "wrong"  # what goes on is not what stops
    gold_node, answer_node = _read(gold), _read(answer)
    if gold_node is None or answer_node is None:
        return "unsure" if all(map(_is_notation, (gold, answer))) else "wrong"
    if _infinity(gold_node) or _infinity(answer_node):
        return "right" if _infinity(gold_node) == _infinity(answer_node) else "wrong"
    if ("\\infty" in gold) != ("\\infty" in answer):
        return "wrong"  # 1/\infty is no number
    gold_exact, answer_exact = _rational(gold_node), _rational(answer_node)
    if gold_exact is not None and answer_exact is not None:
        if gold_exact == answer_exact:
            return "right"
        return "right" if _approximates(gold, gold_exact, answer, answer_exact) else "wrong"
    if (
        not symbols(gold_node)
        and not symbols(answer_node)
        and _decimal_of_constant(gold, gold_node, answer, answer_node)
    ):
        return "right"
    opinion = identity.same_value(gold_node, answer_node)
    if opinion == "right" and identity.is_rational_tree(gold_node) and identity.is_rational_tree(answer_node):
        constant = not symbols(gold_node) and not symbols(answer_node)
        return "unsure" if constant else "right"  # too large to be exact, and 60 digits prove nothing
    return opinion


def _rational(node: Node) -> Fraction | None:
    try:
        return exact(node)
    except (NotRational, TooBig):
        return None


def _decimal(text: str) -> tuple[int, int] | None:
    """(significant digits, decimal places) of a decimal literal."""
    match = _DECIMAL.fullmatch(text.strip())
    if match is None:
        return None
    digits = (match[1] + match[2]).lstrip("0")
    return len(digits), len(match[2]) - int(match[3] or match[4] or 0)


def _approximates(gold: str, gold_value: Fraction, answer: str, answer_value: Fraction) -> bool:
    """One side is a decimal that rounds or truncates the other, which is not a decimal, to enough digits."""
    literals = _decimal(gold), _decimal(answer)
    literal = literals[0] or literals[1]
    if literal is None or (literals[0] and literals[1]):
        return False
    decimal, other = (gold_value, answer_value) if literals[0] else (answer_value, gold_value)
    return literal[0] >= APPROXIMATION_DIGITS and _is_cut_from(decimal, other, literal[1])


def _is_cut_from(decimal: Fraction, value: Fraction, places: int, within: Fraction = Fraction(1, 2)) -> bool:
    """Whether the decimal is the value rounded or truncated to its places; `within` counts units of the last place."""
    unit = Fraction(10) ** -places
    truncated = 0 <= abs(value) - abs(decimal) < unit and (value < 0) == (decimal < 0)
    return truncated or abs(value - decimal) <= unit * within


def _decimal_of_constant(gold: str, gold_node: Node, answer: str, answer_node: Node) -> bool:
    literals = _decimal(gold), _decimal(answer)
    for literal, text, other in ((literals[0], gold, answer_node), (literals[1], answer, gold_node)):
        if literal and literal[0] >= APPROXIMATION_DIGITS and abs(literal[1]) < 500:
            value, decimal = identity.decimals_of(other, max(literal[1], 0)), exact_text(text)
            if value is not None and decimal is not None:
                within = Fraction(1) if literal[0] >= FLOAT_DIGITS else Fraction(1, 2)
                return _is_cut_from(decimal, value, literal[1], within)
    return False


def _converted(gold: str, gold_unit: str | None, answer: str, answer_unit: str | None, opinion: Opinion) -> Opinion:
    """50% is 0.5, and 90 degrees are pi/2, when only one side carries the sign."""
    units = {gold_unit, answer_unit}
    if units == {PERCENT, None}:
        side = f"({gold})/100" if gold_unit else f"({answer})/100"
        return _values(side, answer) if gold_unit else _values(gold, side)
    if units == {DEGREE, None} and "\\pi" in (answer if gold_unit else gold):
        side = f"({gold})*\\pi/180" if gold_unit else f"({answer})*\\pi/180"
        return _values(side, answer) if gold_unit else _values(gold, side)
    return opinion


def _percent_of_fraction(
    gold: str, gold_unit: str | None, answer: str, answer_unit: str | None, opinion: Opinion
) -> Opinion:
    """A bare number stands for a percentage of the same number only when it is whole (50 for 50%, not 0.5 for 0.5%)."""
    if opinion == "right" and {gold_unit, answer_unit} == {PERCENT, None}:
        value = exact_text(gold)
        return "right" if value is not None and value.denominator == 1 else "wrong"
    return opinion


def compare_relations(gold: tuple[str, str, str], answer: tuple[str, str, str]) -> Opinion:
    """Two (left, relation, right) of canonical texts: the same one up to a factor, inequalities also turned round."""
    sides = [_oriented(*gold), _oriented(*answer)]
    if sides[0][1] != sides[1][1]:
        return "wrong"
    nodes = [(_read(left), _read(right)) for left, _, right in sides]
    differences = []
    for left, right in nodes:
        if left is None or right is None:
            return "unsure"
        minus = Node("mul", (Node("number", value=Fraction(-1)), right))
        differences.append(Node("add", (left, minus)))
    return identity.proportional(differences[0], differences[1], positive_only=sides[0][1] in ("<", "\\le"))


def _oriented(left: str, relation: str, right: str) -> tuple[str, str, str]:
    if relation in (">", "\\ge"):
        return right, {">": "<", "\\ge": "\\le"}[relation], left
    return left, relation, right
