r"""Answers with a form of their own, which is no arithmetic: option letters, times, dates, ratios, digits in a base."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from rollout.rewards.answers.exact import exact_text
from rollout.rewards.answers.identity import Opinion
from rollout.rewards.answers.notation import key

_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_WORDED_TIME = re.compile(r"(\d{1,2})()()\s*([ap])\.?\s*m\.?", re.IGNORECASE)
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_CHOICE = re.compile(r"\(?\s*([A-Ja-j])\s*(?:\)|(?=[.:])|$)[.:]?\s*(.*)", re.DOTALL)
_BASE = re.compile(r"([0-9A-Fa-f]+)\s*_\s*\{?\s*(\d{1,2})\s*\}?")


def compare(gold: str, answer: str, texts: Callable[[str, str], Opinion]) -> Opinion | None:
    """The opinion on two canonical texts if one of them has such a form, else None; `texts` compares parts."""
    if (opinion := _choices(gold, answer, texts)) is not None:
        return opinion
    for form in (_dates, _times, _ratios, _bases):
        if (opinion := form(gold, answer)) is not None:
            return opinion
    return None


def _choices(gold: str, answer: str, texts: Callable[[str, str], Opinion]) -> Opinion | None:
    """A gold of one option letter: (C), C., C) and `C) and its text` are that option, unless the texts differ."""
    gold_choice, answer_choice = _CHOICE.fullmatch(gold.strip()), _CHOICE.fullmatch(answer.strip())
    if gold_choice is None or answer_choice is None or (gold_choice[2] and not gold.strip().startswith("(")):
        return None
    if gold_choice[1].lower() != answer_choice[1].lower():
        return "wrong"
    return texts(gold_choice[2], answer_choice[2]) if gold_choice[2] and answer_choice[2] else "right"


def _dates(gold: str, answer: str) -> Opinion | None:
    """2024-01-02 is a date, not a difference."""
    if not _DATE.fullmatch(gold.strip()) and not _DATE.fullmatch(answer.strip()):
        return None
    return "right" if gold.strip() == answer.strip() else "wrong"


def _clock(text: str) -> tuple[int, ...] | None:
    match = _TIME.fullmatch(text.strip()) or _WORDED_TIME.fullmatch(text.strip())
    if match is None:
        return None
    half = {"a": 1, "p": 2}[match[4].lower()] if match[4] else 0
    return int(match[1]), int(match[2] or 0), int(match[3] or 0), half


def _times(gold: str, answer: str) -> Opinion | None:
    """3:00 PM is 15:00, and also a bare 3:00; 3:00 AM is another time."""
    times = _clock(gold), _clock(answer)
    if times[0] is None or times[1] is None:
        return None
    spoken = [time[3] > 0 for time in times if time is not None]
    clocks = [(_hour(time), *time[1:3]) for time in times if time is not None]
    if spoken[0] != spoken[1]:  # a bare time before 13 o'clock may be meant in either half of the day
        bare = clocks[spoken.index(False)]
        if bare[0] <= 12:
            clocks = [(hour % 12, minutes, seconds) for hour, minutes, seconds in clocks]
    return "right" if clocks[0] == clocks[1] else "wrong"


def _hour(time: tuple[int, ...]) -> int:
    return time[0] if not time[3] else time[0] % 12 + (12 if time[3] == 2 else 0)


def _ratios(gold: str, answer: str) -> Opinion | None:
    """3:4 is 6:8 and \\frac34; 1:2:3 is 2:4:6; with an ellipsis only the same text is the same ratio."""
    if ":" not in gold and ":" not in answer:
        return None
    if re.search(r":0\d", gold + " " + answer):
        return "wrong"  # 2:05 is a time, and 2:5 is not
    first, second = _terms(gold), _terms(answer)
    if first is None or second is None or len(first) != len(second):
        return "wrong"
    pairs = list(zip(first, second, strict=True))
    return "right" if all(a * d == c * b for a, b in pairs for c, d in pairs) else "wrong"


def _terms(ratio: str) -> list[Fraction] | None:
    """The terms of a ratio, a single value being one to 1; None where one has no exact value, or all are 0."""
    terms = [term for term in map(exact_text, ratio.split(":")) if term is not None]
    if len(terms) <= ratio.count(":"):
        return None
    terms += [Fraction(1)] * (len(terms) == 1)
    return terms if any(terms) else None


def _bases(gold: str, answer: str) -> Opinion | None:
    r"""1011_2 is the same digits with or without its base; two bases must be the same one."""
    gold_base, answer_base = _BASE.fullmatch(gold.strip()), _BASE.fullmatch(answer.strip())
    if gold_base and answer_base:
        same = gold_base[1].lower() == answer_base[1].lower() and gold_base[2] == answer_base[2]
        return "right" if same else "wrong"
    if gold_base or answer_base:
        digits = [match[1] if match else text for match, text in ((gold_base, gold), (answer_base, answer))]
        return "right" if key(digits[0]) == key(digits[1]) else "wrong"
    return None
