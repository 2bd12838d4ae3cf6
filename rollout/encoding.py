"""From a prompt to token ids: chat template or none, one beginning token, no control tokens out of the user's text.

Ids are made once, here, and go to the engine as they are; nothing is decoded and encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.config import DataConfig
from rollout.problems import Problem
from rollout.row_checks import Candidate, Message
from rollout.types import Prompt, UserError

_CHUNK = 4096
"""Texts tokenised at once: all at once would hold every intermediate result in memory."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the tokenizer asks for, found out once."""

    templated: bool
    """Prompts go through the chat template."""
    bos: int | None
    """Id of the beginning token; None where the tokenizer has none."""
    adds_bos: bool
    """The tokenizer puts it before a text by itself."""
    control_ids: frozenset[int]
    """Ids of control tokens, which no user text may produce."""
    control_texts: re.Pattern[str] | None
    """Finds the text of a control token."""
    unknown: int | None
    """Id of what the tokenizer cannot write."""


def find_rules(tokenizer: Any, data: DataConfig) -> Rules:
    """Look at the tokenizer; a request it cannot meet is a UserError."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if data.chat_template and not has_template:
        raise UserError(
            "--data.chat-template asks for the tokenizer's chat template, but this tokenizer has none. "
            "Leave the flag out, or use the instruction-tuned version of the model."
        )
    texts = {token for token in tokenizer.all_special_tokens if token}
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    texts |= {token.content for token in decoder.values() if token.special}
    pattern = re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))) if texts else None
    ids = {tokenizer.convert_tokens_to_ids(text) for text in texts}
    unknown = tokenizer.unk_token_id
    if data.system_prompt and pattern and (control := pattern.search(data.system_prompt)):
        raise UserError(f"--data.system-prompt holds the control token {control[0]!r}.")
    return Rules(
        templated=has_template if data.chat_template is None else data.chat_template,
        bos=tokenizer.bos_token_id,
        adds_bos=tokenizer.encode("a", add_special_tokens=True)[:1] == [tokenizer.bos_token_id],
        control_ids=frozenset(ids - {unknown, None}),
        control_texts=pattern,
        unknown=unknown,
    )


def encode(
    candidates: Sequence[Candidate], tokenizer: Any, data: DataConfig
) -> tuple[list[tuple[Candidate, Prompt]], list[Problem], list[str]]:
    """Tokenise; gives the prompts that are fine, the problems of the others, and notes."""
    rules = find_rules(tokenizer, data)
    rendered: list[tuple[Candidate, str]] = []
    problems: list[Problem] = []
    for candidate in candidates:
        text, problem = _render(candidate, tokenizer, data, rules)
        if problem:
            problems.append(Problem(candidate.where, candidate.index, *problem))
        else:
            rendered.append((candidate, text))
    done: list[tuple[Candidate, Prompt]] = []
    unknown = 0
    for (candidate, text), ids in zip(
        rendered, _tokenise([text for _, text in rendered], tokenizer, rules), strict=True
    ):
        problem = _check_ids(ids, data, rules)
        if problem:
            problems.append(Problem(candidate.where, candidate.index, *problem))
            continue
        unknown += rules.unknown in ids
        array = np.asarray(ids, dtype=np.int32)
        prompt = Prompt(candidate.row_id, text, array, candidate.answer, candidate.domain, candidate.columns)
        done.append((candidate, prompt))
    return done, problems, _notes(rendered, unknown, rules)


def too_long(candidates: Sequence[Candidate], vocabulary: Path | None, limit: int) -> list[Problem]:
    """Prompts whose bare text has more tokens than `limit`; `vocabulary` is a tokenizer.json, None finds nothing.

    No token stands for less than a byte, so only long texts are tokenised at all.
    """
    texts = [
        (c, c.prompt if isinstance(c.prompt, str) else "".join(m["content"] for m in c.prompt)) for c in candidates
    ]
    long = [(c, text) for c, text in texts if len(text) * 4 > limit and len(text.encode()) > limit]
    if not long or vocabulary is None or not vocabulary.is_file():
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(vocabulary))
    counts = [(c, len(tokenizer.encode(text, add_special_tokens=False).ids)) for c, text in long]
    return [Problem(c.where, c.index, *_too_many(count, limit)) for c, count in counts if count > limit]


def _too_many(tokens: int, limit: int) -> tuple[str, str]:
    return "prompt too long", f"{tokens} tokens; --data.max-prompt-tokens, or the room the model has, is {limit}"


def _messages(candidate: Candidate, system_prompt: str) -> list[Message]:
    chat = [{"role": "user", "content": candidate.prompt}] if isinstance(candidate.prompt, str) else candidate.prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, *(dict(message) for message in chat)]


def _render(candidate: Candidate, tokenizer: Any, data: DataConfig, rules: Rules) -> tuple[str, tuple[str, str] | None]:
    """(text to tokenise, (kind, text) of a problem)."""
    messages = _messages(candidate, data.system_prompt)
    if data.system_prompt and any(message["role"] == "system" for message in messages[1:]):
        return "", ("two system messages", "the chat has a system message of its own beside --data.system-prompt")
    if not rules.templated:
        if any(message["role"] in ("assistant", "tool") for message in messages):
            return "", (
                "chat without template",
                "a chat with several turns needs a chat template; the tokenizer has none",
            )
        return "\n\n".join(message["content"] for message in messages), None
    for message in messages:
        forged = rules.control_texts.search(message["content"]) if rules.control_texts else None
        if forged:
            return "", (
                "control token in text",
                f"the text holds the control token {forged[0]!r}: it would forge a turn",
            )
    from jinja2.exceptions import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        return "", ("chat template refuses", f"the tokenizer's chat template refuses this chat: {error}")
    return text, None


def _tokenise(texts: list[str], tokenizer: Any, rules: Rules) -> list[list[int]]:
    """Ids of the texts, beginning token included where the tokenizer wants one and the template has not written it.

    Without a template all text is the user's, and control tokens in it are spelled out in ordinary pieces. Ending
    tokens, which some tokenizers add as well, have no place before a response.
    """
    rows: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        batch = tokenizer(
            texts[start : start + _CHUNK],
            add_special_tokens=False,
            split_special_tokens=not rules.templated,
            return_attention_mask=False,
            verbose=False,
        )
        rows += batch["input_ids"]
    if rules.bos is None or not rules.adds_bos:
        return rows
    return [ids if ids[:1] == [rules.bos] else [rules.bos, *ids] for ids in rows]


def _check_ids(ids: list[int], data: DataConfig, rules: Rules) -> tuple[str, str] | None:
    if rules.bos is not None and ids[:2] == [rules.bos, rules.bos]:
        return "two beginning tokens", "the chat template writes the beginning token twice"
    if not rules.templated and not rules.control_ids.isdisjoint(ids[rules.adds_bos :]):
        return "control token in text", "the text turns into a control token, and this tokenizer cannot spell it out"
    if len(ids) > data.max_prompt_tokens:
        return _too_many(len(ids), data.max_prompt_tokens)
    return None


def _notes(rendered: Sequence[tuple[Candidate, str]], unknown: int, rules: Rules) -> list[str]:
    notes = []
    if unknown:
        notes.append(
            f"{unknown} prompts hold characters the tokenizer does not know; the model sees them as one unknown."
        )
    if not rules.templated and rules.control_texts is not None:
        spelled = sum(bool(rules.control_texts.search(text)) for _, text in rendered)
        if spelled:
            notes.append(
                f"{spelled} prompts hold the text of control tokens; without a chat template it stays plain text."
            )
    return notes
