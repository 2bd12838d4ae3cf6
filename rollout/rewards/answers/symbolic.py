r"""Stage 3: math-verify, for notation the exact stages do not read. Gold first.

math-verify may take for ever inside one C-level operation, so nothing reaches it that asks for large numbers, and in
training it runs in a process that can be killed (cluster/scorer_pool.py). Only its LaTeX reader is used: its reader of
plain expressions evaluates text.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from fractions import Fraction
from typing import Any, Literal

from rollout.rewards.answers import scalars
from rollout.rewards.answers.exact import MAX_FACTORIAL, NotRational, exact
from rollout.rewards.answers.expression import TooBig, Unreadable, parse
from rollout.rewards.answers.identity import Opinion
from rollout.rewards.answers.matching import compare
from rollout.rewards.answers.notation import LONGEST, balanced_end, canonical

MAX_BRACES = 50
MAX_EXPONENT = 10_000
MAX_NUMBER = 400
_DEGENERATE = re.compile(rf"\d{{{MAX_NUMBER}}}|(?:[-+*/!]\s*){{12}}|(?:\^\s*(?:\w|\{{[^{{}}]*\}})\s*){{2}}")
_EXPONENT = re.compile(r"\^\s*(\{|\(|-?\d+|.)")


def refusal(text: str) -> str | None:
    """Why a canonical text is not given to math-verify (it is graded wrong then), or None."""
    if len(text) > LONGEST:
        return f"longer than {LONGEST} characters"
    depth = deepest = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_BRACES:
        return f"brackets nested deeper than {MAX_BRACES}"
    if _DEGENERATE.search(text):
        return f"a number of {MAX_NUMBER} digits or a run of operators"
    if _is_too_big(text):
        return "a number too large to compute"
    return _large_powers(text) or _large_factorials(text)


def _is_too_big(text: str) -> bool:
    try:
        exact(parse(text))
    except TooBig:
        return True
    except (Unreadable, NotRational):
        return False
    return False


def _large_powers(text: str) -> str | None:
    """Towers and products of exponents: (10^99)^99 asks for as much as 10^9801."""
    product = 1
    for match in _EXPONENT.finditer(text):
        opening = match[1]
        if opening in ("{", "("):
            end = balanced_end(text, match.start(1), opening, "}" if opening == "{" else ")")
            inside = text[match.end(1) : end] if end > 0 else text[match.end(1) :]
        else:
            inside = opening
        if inside.count("^") > 1:
            return "a tower of powers"
        try:
            value = exact(parse(inside))
        except TooBig:
            return "a tower of powers"
        except (Unreadable, NotRational):
            value = Fraction(max(map(int, re.findall(r"\d+", inside)), default=1))
            if "^" in inside and value > 20:
                return "a tower of powers"
        product *= max(1, abs(int(value)))
        if product > MAX_EXPONENT:
            return f"exponents beyond {MAX_EXPONENT}"
    return None


def _large_factorials(text: str) -> str | None:
    for match in re.finditer(r"!", text):
        before = re.search(r"(\d+)\s*$", text[: match.start()])
        if "!" in text[match.start() + 1 : match.start() + 2] or (
            before is None and text[: match.start()].endswith((")", "}"))
        ):
            return "a factorial of an expression"
        if before and int(before[1]) > MAX_FACTORIAL:
            return f"a factorial beyond {MAX_FACTORIAL}"
    if "\\binom" in text and "^" in text:
        return "a binomial of powers"
    if "\\binom" in text and any(int(number) > MAX_FACTORIAL for number in re.findall(r"\d+", text)):
        return f"a binomial beyond {MAX_FACTORIAL}"
    return None


def ask(answer: str, gold: str) -> Literal["right", "wrong", "refused"]:
    """The verdict on an extracted answer, with math-verify asked about the parts that need it. May hang: see above."""
    gold_text, answer_text = canonical(gold), canonical(answer)
    refused = False

    def leaf(gold_part: str, answer_part: str) -> Opinion:
        nonlocal refused
        opinion = scalars.compare(gold_part, answer_part)
        if opinion != "unsure":
            return opinion
        if refusal(gold_part) or refusal(answer_part):
            refused = True
            return "wrong"
        return "right" if _verify(gold_part, answer_part) else "wrong"

    opinion = compare(gold_text, answer_text, leaf)
    if opinion == "unsure":  # the two are not even of the same form: an interval against an unsolved inequality
        if refusal(gold_text) or refusal(answer_text):
            return "refused"
        opinion = "right" if _verify(gold_text, answer_text) else "wrong"
    return "right" if opinion == "right" else "refused" if refused else "wrong"


def _verify(gold: str, answer: str) -> bool:
    """math-verify on two canonical texts: gold first, then the other way, since it treats the two sides unequally."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    readers = [LatexExtractionConfig()]
    # No timeouts of its own: they need SIGALRM in the main thread, and cannot interrupt what really hangs.
    gold_parsed = parse(f"${gold}$", readers, fallback_mode="no_fallback", parsing_timeout=0)
    answer_parsed = parse(f"${answer}$", readers, fallback_mode="no_fallback", parsing_timeout=0)
    if not gold_parsed or not answer_parsed:
        return False
    settings: dict[str, Any] = {"float_rounding": 10, "numeric_precision": 30, "timeout_seconds": 0}
    if verify(gold_parsed, answer_parsed, **settings):
        return True
    return bool(verify(answer_parsed, gold_parsed, allow_set_relation_comp=True, **settings))


class _OutOfTime(BaseException):
    """Raised inside the grading thread; BaseException, so that no `except Exception` of a library holds it."""


def ask_within(answer: str, gold: str, seconds: float) -> Literal["right", "wrong"]:
    """`ask` in this thread with a deadline, for callers without a pool.

    Works in any thread (a signal would need the main one): a watcher raises inside the grading code. That cannot stop
    one long operation in C, which is why `refusal` keeps those away.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    done = threading.Event()
    lock = threading.Lock()

    def watch() -> None:
        if done.wait(seconds):
            return
        while not done.is_set():
            with lock:
                if not done.is_set():
                    raise_in(thread, ctypes.py_object(_OutOfTime))
            done.wait(0.2)

    watcher = threading.Thread(target=watch, name="answer-deadline", daemon=True)
    watcher.start()
    try:
        try:
            verdict = ask(answer, gold)
        finally:
            with lock:
                done.set()
            raise_in(thread, None)  # what was raised too late must not reach the caller
    except _OutOfTime:
        return "wrong"
    return "right" if verdict == "right" else "wrong"
