"""The scorers of reasoning-gym, made safe to hand a model's text to.

Some of them give the text to Python's `eval` or to sympy's `parse_expr`, which run code. Here `eval` is replaced by a
reader of literals, and what goes to `parse_expr` must first pass a grammar of numbers, operators and known functions.
A task that evaluates text and has not been read and listed here is refused.
"""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rollout.tasks.reasoning_gym import parse
from rollout.types import UserError

FAULTS = {
    "codeio": "runs programs that read the clock and draw unseeded numbers: a resumed run would see other rows",
    "composite": "is a mixture of other tasks: name these",
    "game_of_life_halting": "pays for any text where the process halts or does not, whatever the text says",
    "puzzle24": "accepts any four numbers of its range, not only those of the puzzle",
}
"""Tasks that are refused, and why."""
READS_LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Their scorers `eval` an answer that is not an exact match, to accept Python lists for part of the reward."""
ONLY_OWN_TEXT = (
    "basic_arithmetic",
    "bitwise_arithmetic",
    "decimal_arithmetic",
    "number_sorting",
    "propositional_logic",
)
"""They evaluate text they have made themselves, or have a harmless function of such a name."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a scorer raises on an answer it cannot read: a wrong one, for `audit` has shown that it reads a right one."""
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify|__import__|literal_eval|lambdify)\s*\(")
FULL_SCORE = 1.0 - 1e-9
_NONSENSE = ("", "zzz")

Scorer = Callable[[str, Mapping[str, Any]], float]


def score(final_answer: str | None, task: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """What the task's own scorer gives a final answer, as two parts that sum to it.

    `correctness` is 1 for the full score, else 0, so that accuracy counts nothing that is only partly right; `partial`
    is what a partly right answer earns. `task` and `entry` are columns of the row.
    """
    value = 0.0 if final_answer is None else scorer(task)(final_answer.strip(), entry)
    full = value >= FULL_SCORE
    return {"correctness": float(full), "partial": 0.0 if full else value}


def _arithmetic(answer: str) -> bool:
    return len(answer) <= 200 and re.fullmatch(r"[0-9+\-*/().\s]*", answer) is not None and "**" not in answer


_FUNCTIONS = frozenset(
    name
    for names in (
        "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh",
        "exp log ln sqrt Abs erf erfi Si Ci Ei pi",
    )
    for name in names.split()
)
_PIECE = re.compile(r"\s+|\d+(?:\.\d*)?|\.\d+|(?P<name>[A-Za-z]+)|\*\*|[+\-*/(),]")


def _formula(answer: str) -> bool:
    """Numbers, single letters, known functions and operators; short, and with no tower of powers."""
    if len(answer) > 400 or re.search(r"\*\*[^+\-*/]*\*\*|\d{8}|\*\*\s*\(?\s*-?\s*\d{4}", answer):
        return False
    position = 0
    while position < len(answer):
        match = _PIECE.match(answer, position)
        if match is None or (len(match["name"] or "") > 1 and match["name"] not in _FUNCTIONS):
            return False
        position = match.end()
    return True


GUARDS: dict[str, Callable[[str], bool]] = {
    "countdown": _arithmetic,
    "simple_integration": _formula,
    "intermediate_integration": _formula,
    "polynomial_multiplication": _formula,
}
"""What an answer must look like before the scorer sees it; anything else gets 0."""


def make_dataset(name: str, options: Mapping[str, Any]) -> Any:
    """A data set of the library, after a look at whether its scorer can be trusted."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3)
        raise UserError(
            f"there is no task {name!r}. "
            + (f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(DATASETS)}.")
        )
    if name in FAULTS:
        raise UserError(f"{name} {FAULTS[name]}.")
    kind = DATASETS[name][0]
    module = sys.modules[kind.__module__]
    listed = name in GUARDS or name in READS_LITERALS or name in ONLY_OWN_TEXT
    if not listed and _EVALUATES.search(inspect.getsource(module)):
        raise UserError(f"{name} evaluates text as code, and its scorer has not been reviewed; it is not used.")
    if name in READS_LITERALS:
        module.__dict__["eval"] = ast.literal_eval
    try:
        return create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"{name}: {error or 'an option is out of range'}. Its options are those of the library."
        ) from error


@functools.lru_cache(maxsize=256)
def scorer(text: str) -> Scorer:
    """The scorer of a task, as it is written in --prompts."""
    task = parse(text)[0]
    dataset = make_dataset(task.name, {**task.options, "seed": 0, "size": 1})
    guard = GUARDS.get(task.name)

    def points(answer: str, entry: Mapping[str, Any]) -> float:
        if guard is not None and not guard(answer):
            return 0.0
        try:
            return float(dataset.score_answer(answer, copy.deepcopy(dict(entry))))  # some scorers write into the entry
        except UNREADABLE:
            return 0.0

    return points


def acceptable(task: str, answer: str | None) -> bool:
    """False where the task's own answer is not in a form that is scored (an integral left standing as it is)."""
    guard = GUARDS.get(task)
    return guard is None or answer is None or guard(answer)


def audit(text: str, entry: Mapping[str, Any]) -> None:
    """Refuse a scorer that does not pay its own answer, or pays nonsense."""
    gold = entry["answer"]
    if gold is not None and not score(gold, text, entry)["correctness"]:
        raise UserError(f"{text}: the scorer does not give its own answer {gold[:60]!r} the full score.")
    for nonsense in _NONSENSE:
        if score(nonsense, text, entry)["correctness"]:
            raise UserError(f"{text}: the scorer gives the answer {nonsense!r} the full score.")
