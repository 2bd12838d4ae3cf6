"""Text of models, data and other systems, made harmless for a terminal."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Control and format characters (escapes, direction marks), lone surrogates, line separators."""


def inert(text: str) -> str:
    r"""The text with all that a terminal might obey written out: an escape as \x1b, a direction mark as \u202e."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _CATEGORIES:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
