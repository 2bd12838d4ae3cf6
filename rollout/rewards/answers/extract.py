r"""Which part of a response is its final answer. One explicit slot is graded, never the whole text.

The slot is looked for after the last `</think>`. A thinking block that was opened and never closed holds no answer.
"""

from __future__ import annotations

import re
from typing import Literal

AnswerMode = Literal["auto", "boxed", "plain"]

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s*(-?\d+(?:\.\d+)?)")
_END_TOKEN = re.compile(r"(?:<[|｜][^<>]{1,40}[|｜]>|</s>|<eos>|<EOS>|\[EOS\]|<pad>|<end_of_turn>)\Z")
_LONGEST_END_TOKEN = 50


def without_end_tokens(text: str) -> str:
    """The text without the special tokens a tokenizer leaves at its end (<eos>, <|im_end|>, </s>, padding)."""
    text = text.rstrip()
    while match := _END_TOKEN.search(text, max(0, len(text) - _LONGEST_END_TOKEN)):
        text = text[: match.start()].rstrip()
    return text


def after_thinking(text: str, thinking: bool = False) -> str | None:
    """What follows the reasoning; None while the reasoning has not ended.

    `thinking`: the prompt already opened the block, so the response starts inside it.
    """
    _, closed, rest = text.rpartition("</think>")
    if closed:
        return None if "<think>" in rest else rest
    return None if thinking or "<think>" in text else text


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` with balanced braces, or None.

    One pass with a stack: a text that opens thousands of boxes and closes none costs no more than any other.
    Escaped braces are characters, not braces. Of nested boxes the outer one counts, as it closes last.
    """
    content: str | None = None
    opened: list[tuple[int, bool]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            if opened:
                start, is_box = opened.pop()
                if is_box:
                    content = text[start : match.start()]
        elif token.endswith("{") and token != "\\{":
            opened.append((match.end(), token != "{"))
    return content


def final_answer(text: str, mode: AnswerMode = "auto", thinking: bool = False) -> str | None:
    r"""The final answer a response gives, or None when it gives none.

    `boxed`: the last balanced box. `plain`: everything after the reasoning. `auto`: the box when there is one, else
    what stands in `<answer>...</answer>` or after a last line's `####`, else everything after the reasoning; a box
    that is empty or never closed is no answer, and nothing else is taken in its place.
    """
    tail = after_thinking(text, thinking)
    if tail is None:
        return None
    tail = without_end_tokens(tail).strip()
    if mode == "boxed" or (mode == "auto" and "\\boxed" in tail):
        answer = last_box(tail) or ""
    elif mode == "auto" and "</answer>" in tail:
        before, _, _ = tail.rpartition("</answer>")
        answer = before.rpartition("<answer>")[2]
    elif mode == "auto" and tail.rpartition("\n")[2].startswith("####"):
        answer = tail.rpartition("####")[2]
    else:
        answer = tail
    return answer.strip() or None


def gold_answer(gold: str) -> str:
    """The answer itself from a data set's answer column, which may carry a box or a whole solution ending in ####."""
    if "\\boxed" in gold:
        box = last_box(gold)
        return (_BARE_BOX.findall(gold) or [""])[-1] if box is None else box.strip()
    return gold.rpartition("####")[2].strip()
