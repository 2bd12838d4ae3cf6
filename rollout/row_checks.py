"""What is checked on every row before anything starts.

No tokenizer is needed here, so a plan can run these checks too; what needs one is in `encoding.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.config import DataConfig
from rollout.problems import Problem
from rollout.tasks.files import BYTE_ORDER_MARK, RawRow
from rollout.types import UserError

MAX_ANSWER_CHARACTERS = 10_000
"""Longest answer that is accepted as a key."""
CHARACTERS_PER_TOKEN = 128
"""No common vocabulary has longer tokens, so this times the limit in tokens is certainly too long."""
SCORED_BY = "scored_by"
"""Column of rows that their source scores itself; holds the name of the source."""
ROLES = ("system", "developer", "user", "assistant", "tool")
VERL_ANSWER, VERL_DOMAIN = "reward_model.ground_truth", "data_source"

Message = dict[str, Any]
_LOST_ESCAPES = {"\x07": "a", "\x08": "b", "\t": "t", "\x0b": "v", "\x0c": "f", "\r": "r"}
_PROMPT_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
_ANSWER_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_GSM8K_ANSWER = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")
_PROMPT_COLUMNS = ("question", "problem", "query", "instruction", "input", "messages", "text")
_ANSWER_COLUMNS = ("solution", "ground_truth", "final_answer", "expected_answer", "target", "gold", "label")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row whose columns have been found, before it is tokenised."""

    where: str
    """File and line, or number of the row."""
    index: int
    """Position of the row in its source."""
    row_id: str
    """Name given by the source, or hash of the content and index."""
    prompt: str | tuple[Message, ...]
    """Text, or a chat."""
    answer: str
    """The key; empty where the row is scored by its source or no key is asked for."""
    domain: str
    """Part of a mixture."""
    columns: Mapping[str, Any]
    """All columns but the prompt."""

    @property
    def question(self) -> str:
        """The prompt as one text: what makes two rows the same question."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Keys:
    """Columns that are used."""

    prompt: str
    answer: str
    domain: str


def lookup(columns: Mapping[str, Any], key: str) -> Any:
    """Value of a column; dots go into nested columns unless a column has that very name. None when it is missing."""
    if key in columns:
        return columns[key]
    value: Any = columns
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def find_keys(name: str, rows: Sequence[RawRow], data: DataConfig, answer_required: bool) -> tuple[Keys, list[str]]:
    """The columns to use and notes about them; a column that no row has is one mistake, not one per row."""
    readable = [row for row in rows if not row.problem]
    if not readable:
        return Keys(data.prompt_key, data.answer_key, data.domain_key), []

    def has(key: str) -> bool:
        return any(lookup(row.columns, key) is not None for row in readable)

    notes: list[str] = []
    default = DataConfig()
    answer, domain = data.answer_key, data.domain_key
    if not has(data.prompt_key):
        raise UserError(_no_column(name, readable, data.prompt_key, "question", "prompt", _PROMPT_COLUMNS))
    if not has(answer) and answer == default.answer_key and has(VERL_ANSWER):
        answer = VERL_ANSWER
        notes.append(f"{name} has verl's columns: answers are taken from {VERL_ANSWER}.")
    if not has(answer) and answer_required and not any(SCORED_BY in row.columns for row in readable):
        raise UserError(_no_column(name, readable, answer, "answer", "answer", _ANSWER_COLUMNS))
    if not has(domain) and domain == default.domain_key and has(VERL_DOMAIN):
        domain = VERL_DOMAIN
        notes.append(f"{name} has verl's columns: domains are taken from {VERL_DOMAIN}.")
    return Keys(data.prompt_key, answer, domain), notes


def _no_column(name: str, rows: Sequence[RawRow], key: str, what: str, flag: str, usual: Sequence[str]) -> str:
    names = list(dict.fromkeys(column for row in rows[:100] for column in row.columns))
    likely = next((candidate for candidate in usual if candidate in names), None)
    text = f"{name}: no row has a column {key!r} with the {what}. The columns are: {', '.join(names) or 'none'}."
    advice = f"If it is in {likely!r}" if likely else "Name the right one"
    return f"{text}\n  {advice}: --data.{flag}-key {likely or 'COLUMN'}"


def examine(
    rows: Sequence[RawRow], keys: Keys, data: DataConfig, answer_required: bool = True
) -> tuple[list[Candidate], list[Problem], list[str]]:
    """Candidates without any problem, all problems, and notes. A row may have several problems."""
    candidates: list[Candidate] = []
    problems: list[Problem] = []
    first_seen: dict[str, str] = {}
    marked = 0
    for row in rows:
        if row.problem:
            problems.append(Problem(row.where, row.index, row.kind, row.problem))
            continue
        found: list[tuple[str, str]] = []
        digest = content_digest(row.columns)
        if digest in first_seen:
            found.append(("duplicate", f"identical to {first_seen[digest]}"))
        else:
            first_seen[digest] = row.where
        prompt = _read_prompt(lookup(row.columns, keys.prompt), keys.prompt, data.max_prompt_tokens, found)
        scored = SCORED_BY in row.columns
        answer = _read_answer(
            lookup(row.columns, keys.answer), keys.answer, answer_required and not scored, scored, found
        )
        mark = None if scored else _GSM8K_ANSWER.search(answer)
        if mark:
            answer = mark[1]
            marked += 1
        problems += [Problem(row.where, row.index, kind, text) for kind, text in found]
        if not found and prompt is not None:
            domain = lookup(row.columns, keys.domain)
            others = {key: value for key, value in row.columns.items() if key not in (keys.prompt, "row_id")}
            candidates.append(
                Candidate(
                    row.where,
                    row.index,
                    row.row_id or f"{digest}-{row.index}",
                    prompt,
                    answer,
                    "default" if domain is None or domain == "" else str(domain),
                    others,
                )
            )
    notes = [f"{marked} answers end in GSM8K's mark (#### x): what follows it is the answer."] if marked else []
    repeated = len(candidates) - len({candidate.question for candidate in candidates})
    if repeated:
        notes.append(f"{repeated} rows ask the same as an earlier row, with other columns; they are kept.")
    return candidates, problems, notes


def content_digest(columns: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that say which content a row has, whatever the order of its columns."""
    try:
        text = json.dumps(columns, sort_keys=True, default=repr)
    except TypeError:  # keys of several types cannot be sorted
        text = repr(sorted(columns.items(), key=lambda item: str(item[0])))
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def _read_prompt(value: Any, key: str, limit: int, found: list[tuple[str, str]]) -> str | tuple[Message, ...] | None:
    if value is None:
        found.append(("missing prompt", f"no {key!r}"))
        return None
    if isinstance(value, str):
        _check_text(value, "prompt", _PROMPT_CONTROLS, found)
        _check_size(len(value), limit, found)
        if not value.strip():
            found.append(("empty prompt", f"{key!r} is empty"))
        return value
    if isinstance(value, list):
        return _read_chat(value, key, limit, found)
    found.append(("prompt is not text", f"{key!r} is {type(value).__name__}; text or a list of messages is needed"))
    return None


def _read_chat(value: list[Any], key: str, limit: int, found: list[tuple[str, str]]) -> tuple[Message, ...] | None:
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        role = item.get("role") if isinstance(item, dict) else None
        content = _content_text(item.get("content")) if isinstance(item, dict) else None
        if role not in ROLES or content is None:
            need = f"role ({', '.join(ROLES)}) and content (text)"
            found.append(("chat is malformed", f"message {number} of {key!r} needs {need}"))
            return None
        _check_text(content, f"message {number}", _PROMPT_CONTROLS, found)
        messages.append({"role": role, "content": content})
    _check_size(sum(len(message["content"]) for message in messages), limit, found)
    if not messages or not messages[-1]["content"].strip():
        found.append(("empty prompt", f"{key!r} is empty"))
    elif messages[-1]["role"] == "assistant":
        found.append(("chat is malformed", f"{key!r} ends with an answer of the assistant: nothing is left to ask"))
    return tuple(messages)


def _content_text(content: Any) -> str | None:
    """Text of a message; a list of text parts is one text, anything else (pictures) is not ours to read."""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if texts and len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def _read_answer(value: Any, key: str, required: bool, scored: bool, found: list[tuple[str, str]]) -> str:
    if isinstance(value, float) and math.isnan(value):
        value = None  # how tables write a gap
    if value is None or value == "":
        if required:
            found.append(("missing answer", f"no {key!r}" if value is None else f"{key!r} is empty"))
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        if required:
            found.append(("answer is not text", f"{key!r} is {type(value).__name__}; text or a number is needed"))
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)  # a column of integers with a gap in it arrives as floats
    answer = str(value)
    if scored:
        return answer
    _check_text(answer, "answer", _ANSWER_CONTROLS, found)
    if len(answer) > MAX_ANSWER_CHARACTERS:
        size = f"{len(answer):,} characters; at most {MAX_ANSWER_CHARACTERS:,} can be compared"
        found.append(("answer too long", f"{key!r} has {size}"))
    elif required and not answer.strip():
        found.append(("missing answer", f"{key!r} is empty"))
    return answer.strip(" \n")


def _check_size(characters: int, limit: int, found: list[tuple[str, str]]) -> None:
    if characters > CHARACTERS_PER_TOKEN * limit:
        size = f"{characters:,} characters cannot fit in --data.max-prompt-tokens {limit}"
        found.append(("prompt too long", size))


def _check_text(text: str, what: str, controls: re.Pattern[str], found: list[tuple[str, str]]) -> None:
    match = controls.search(text)
    if match:
        sign, at = match[0], match.start()
        message = f"control character U+{ord(sign):04X} in the {what}, character {at + 1}"
        following = re.match(r"[A-Za-z]+", text[at + 1 :])
        if sign in _LOST_ESCAPES and following:
            word = _LOST_ESCAPES[sign] + following[0][:12]
            message += f"; was it \\{word}? In JSON and Python text a backslash is written twice: \\\\{word}"
        found.append(("control character", message))
    if _SURROGATES.search(text):
        found.append(("half a character", f"half of a surrogate pair in the {what}: no tokenizer can read it"))
    if BYTE_ORDER_MARK in text:
        found.append(("byte order mark", f"a byte order mark (U+FEFF) inside the {what}; files were joined by hand?"))
