r"""Brackets and separators of a canonical text: what stands between which, outside of all others."""

from __future__ import annotations

import re


def split_top(text: str, separators: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The pieces between separators that stand outside all brackets, and those separators."""
    pieces, found = [], []
    depth = start = i = 0
    while i < len(text):
        two = text[i : i + 2]
        if two in ("\\{", "\\}"):
            depth += 1 if two == "\\{" else -1
            i += 2
            continue
        if text.startswith("\\begin{", i) or text.startswith("\\end{", i):
            depth += 1 if text.startswith("\\begin{", i) else -1
            i = text.find("}", i) + 1 or len(text)
            continue
        if depth == 0 and (match := separators.match(text, i)):
            pieces.append(text[start:i].strip())
            found.append(match.group().strip())
            start = i = match.end()
            continue
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        i += 2 if text[i] == "\\" else 1
    return [*pieces, text[start:].strip()], found


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) when one pair of brackets holds the whole text; the kinds may differ: [0,1)."""
    if text.startswith("\\{") and text.endswith("\\}"):
        opening, inside, closing = "\\{", text[2:-2], "\\}"
    elif text[:1] in "([{" and text[-1:] in ")]}" and not text.endswith("\\}") and len(text) > 1:
        opening, inside, closing = text[0], text[1:-1], text[-1]
    else:
        return None
    depth = 0
    i = 0
    while i < len(inside):
        step = 2 if inside[i] == "\\" else 1
        token = inside[i : i + step]
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if depth < 0:
            return None
        i += step
    return (opening, inside.strip(), closing) if depth == 0 else None
