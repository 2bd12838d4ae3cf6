r"""Reads one canonical expression into a small tree.

The model's text is never handed to an evaluator of a programming language: this parser knows numbers, names, a list of
functions and the operators below, nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_BITS = 64_000
"""Size beyond which an exact number is not computed (about 19,000 digits)."""
_MAX_DEPTH, _MAX_TOKENS = 40, 600

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z.]))?)|\\(?P<command>[a-zA-Z]+)"
    r"|(?P<letters>[A-Za-z]+'*)|(?P<degree>\^\{\\circ\})|(?P<op>\\\{|\\\}|[-+*/^_!(){}\[\]|%])|(?P<bad>\S))"
)
_FUNCTION_NAMES = """
sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh ln log lg exp sqrt floor ceil abs
"""
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_GLUED = re.compile(r"(sin|cos|tan|log|ln)([a-zA-Z])")
_ALIAS = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "imath": "i", "infty": "infty"}
_GREEK_NAMES = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi omicron rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar
"""
_GREEK = frozenset(_GREEK_NAMES.split())
_BRACKETS = {"(": ")", "{": "}", "[": "]"}


class Unreadable(Exception):
    """The text is not an expression this parser knows; someone else may still read it."""


class TooBig(Exception):
    """The value would be larger than anything an answer may ask to compute."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: `kind` is number, symbol, constant, add, mul, div, pow, root, factorial, binom or a function.

    Sums and products take any number of arguments, the others one or two.
    """

    kind: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


def _number(literal: str) -> Node:
    mantissa, _, exponent = literal.lower().partition("e")
    power = int(exponent or 0) if len(exponent) < 7 else MAX_BITS
    if abs(power) * 4 > MAX_BITS or len(mantissa) > MAX_BITS // 4:
        raise TooBig(literal[:40])
    return Node("number", value=Fraction(mantissa) * Fraction(10) ** power)


class _Parser:
    """Recursive descent over the tokens; precedence from loose to tight: sum, product, sign, power, postfix."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str, bool]] = []
        for match in _TOKEN.finditer(text.strip()):
            kind = match.lastgroup or "bad"
            if kind == "bad" or len(self.tokens) >= _MAX_TOKENS:
                raise Unreadable(text[:80])
            token = match.group(kind)
            spaced = match.start(kind) > match.start()
            if kind == "letters":
                self._letters(token, spaced)
            else:
                self.tokens.append((kind, token, spaced))
        self.at = 0
        self.depth = 0

    def _letters(self, word: str, spaced: bool) -> None:
        glued = _GLUED.fullmatch(word)
        if word in FUNCTIONS or glued:
            self.tokens.append(("command", glued[1] if glued else word, spaced))
            if glued:
                self.tokens.append(("letter", glued[2], False))
            return
        for part in re.findall(r"[A-Za-z]'*", word):
            self.tokens.append(("letter", part, spaced))
            spaced = False

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise Unreadable(f"expected {expected} before {token!r}")
        self.at += 1
        return token

    def whole(self) -> Node:
        node = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable(f"left over: {self.peek()!r}")
        return node

    def sum(self) -> Node:
        terms = [self.product()]
        while self.kind() == "op" and self.peek() in "+-":
            negative = self.take() == "-"
            terms.append(_negative(self.product()) if negative else self.product())
        return _many("add", terms)

    def product(self) -> Node:
        factors = [self.signed()]
        while self.kind() == "op" and self.peek() in "*/":
            divided = self.take() == "/"
            factors.append(Node("div", (_ONE, self.signed())) if divided else self.signed())
        return _many("mul", factors)

    def signed(self) -> Node:
        signs = 0
        while self.kind() == "op" and self.peek() in "+-":
            signs += self.take() == "-"
        node = self.juxtaposed()
        return _negative(node) if signs % 2 else node

    def juxtaposed(self) -> Node:
        """Factors side by side; an integer before a fraction of integers is a mixed number."""
        literal = self.kind() == "number"
        node = self.power()
        if literal and node.kind == "number" and node.value.denominator == 1 and (part := self._mixed()) is not None:
            node = Node("add", (node, part))
        factors = [node]
        while self._starts_factor():
            if self.kind() == "number":
                raise Unreadable("two numbers side by side")
            factors.append(self.power())
        return _many("mul", factors)

    def _mixed(self) -> Node | None:
        start = self.at
        if self.peek() == "frac" and self.kind() == "command":
            fraction = self.power()
            if all(part.kind == "number" and part.value.denominator == 1 for part in fraction.args):
                return fraction
        elif (
            self.kind() == "number"
            and self.tokens[self.at][2]
            and self.tokens[self.at + 1 : self.at + 2] == [("op", "/", False)]
        ):
            above = _number(self.take())
            self.take("/")
            if self.kind() == "number":
                below = _number(self.take())
                if above.value < below.value:
                    return Node("div", (above, below))
        self.at = start
        return None

    def _starts_factor(self) -> bool:
        kind, token = self.kind(), self.peek()
        if kind == "command":
            return token not in ("rfloor", "rceil")
        return kind in ("number", "letter") or (kind == "op" and token in "({[")

    def power(self) -> Node:
        node = self.postfix(self.atom())
        if self.peek() == "^":
            self.take()
            node = self.postfix(Node("pow", (node, self._exponent())))
        return node

    def _exponent(self) -> Node:
        if self.peek() in _BRACKETS:
            return self.group()
        if self.peek() == "-":
            self.take()
            return _negative(self.atom())
        return self.atom()

    def postfix(self, node: Node) -> Node:
        for _ in range(_MAX_DEPTH):
            if self.peek() == "!":
                self.take()
                node = Node("factorial", (node,))
            elif self.peek() == "%":
                self.take()
                node = Node("div", (node, Node("number", value=Fraction(100))))
            elif self.kind() == "degree":
                self.take()
                node = Node("mul", (node, Node("constant", name="degree")))
            else:
                return node
        raise Unreadable("nested too deeply")

    def group(self) -> Node:
        closing = _BRACKETS.get(self.take())
        if closing is None:
            raise Unreadable("no group")
        node = self.sum()
        self.take(closing)
        return node

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        node = self._atom()
        self.depth -= 1
        return node

    def _atom(self) -> Node:
        kind, token = self.kind(), self.peek()
        if kind == "number":
            return _number(self.take())
        if kind == "letter":
            return self._named(self.take())
        if kind == "command":
            return self._command(self.take())
        if token in _BRACKETS and token:
            return self.group()
        if token == "|":
            self.take()
            node = self.sum()
            self.take("|")
            return Node("abs", (node,))
        raise Unreadable(f"cannot start with {token!r}")

    def _named(self, name: str) -> Node:
        if name in _CONSTANTS and self.peek() != "_":
            return Node("constant", name=_CONSTANTS[name])
        if self.peek() == "_":
            self.take()
            name += "_" + self._raw_argument()
        elif self.peek() == "(" and name.strip("'") in ("f", "g", "h") and not self.tokens[self.at][2]:
            name += self._raw_argument()
        return Node("symbol", name=name)

    def _raw_argument(self) -> str:
        """The tokens of a subscript or of f(...) as a name: they are not computed."""
        start = self.at
        if self.peek() in _BRACKETS:
            self.group()
        else:
            self.at += 1
        return "".join(token for _, token, _ in self.tokens[start : self.at] if token not in "{}")

    def _command(self, name: str) -> Node:
        if name == "frac":
            return Node("div", (self.group(), self.group()))
        if name == "binom":
            return Node("binom", (self.group(), self.group()))
        if name == "sqrt":
            order = self.group() if self.peek() == "[" else Node("number", value=Fraction(2))
            return Node("root", (self._argument(), order))
        if name in ("lfloor", "lceil"):
            node = self.sum()
            self.take("rfloor" if name == "lfloor" else "rceil")
            return Node("floor" if name == "lfloor" else "ceil", (node,))
        if name in FUNCTIONS:
            return self._function(_ALIAS.get(name, name))
        if name in _CONSTANTS:
            return Node("constant", name=_CONSTANTS[name])
        if name in _GREEK:
            return self._named("\\" + name)
        raise Unreadable(f"unknown command {name}")

    def _argument(self) -> Node:
        return self.group() if self.peek() in _BRACKETS else self.atom()

    def _function(self, name: str) -> Node:
        base = power = None
        while self.peek() in ("_", "^") and self.kind() == "op":
            if self.take() == "_":
                base = self._argument()
            else:
                power = self._exponent()
        if self.peek() in ("(", "{"):
            argument = self.postfix(self.group())
        else:  # sin 2x: the factors up to the next function, sign or operator
            factors = [self.power()]
            while self._starts_factor() and self.peek() not in FUNCTIONS and self.peek() not in ("(", "{"):
                factors.append(self.power())
            argument = _many("mul", factors)
        if power is not None and power == _negative(_ONE) and not name.startswith("arc"):
            return Node("arc" + name, (argument,))
        node = Node(name, (argument,) if base is None else (argument, base))
        return node if power is None else Node("pow", (node, power))


_ONE = Node("number", value=Fraction(1))


def _many(kind: str, args: list[Node]) -> Node:
    """One wide node instead of a deep chain: the depth of a tree is the depth of its brackets."""
    return args[0] if len(args) == 1 else Node(kind, tuple(args))


def _negative(node: Node) -> Node:
    if node.kind == "number":
        return Node("number", value=-node.value)
    return Node("mul", (Node("number", value=Fraction(-1)), node))


_REPEATING = re.compile(r"(\d+)?\.(\d*)\\(?:overline|dot)\{(\d+)\}")


def _spell_out_repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction it is."""
    whole, fixed, period = match[1] or "0", match[2], match[3]
    below = 10 ** len(fixed) * (10 ** len(period) - 1)
    above = int(whole + fixed + period) - int(whole + fixed)
    return f"(({above})/({below}))"


@lru_cache(maxsize=8192)
def parse(text: str) -> Node:
    """The tree of a canonical expression; raises Unreadable or TooBig."""
    try:
        return _Parser(_REPEATING.sub(_spell_out_repeating, text)).whole()
    except RecursionError:
        raise Unreadable("nested too deeply") from None


def symbols(node: Node) -> frozenset[str]:
    """Names of the variables in a tree."""
    if node.kind == "symbol":
        return frozenset((node.name,))
    return frozenset().union(*(symbols(arg) for arg in node.args)) if node.args else frozenset()
