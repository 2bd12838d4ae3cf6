"""How a reward that a user brings is called, and what it may return (loading.py finds it).

The names of the parameters say what a function wants. One response at a time (a parameter `response`), a whole group at
a time (`responses`), or TRL's protocol (`completions`, with every column as a list); `async def` works in all three.
docs/rewards.md has the contract with examples.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rollout.rewards.answers.extract import AnswerMode, final_answer, without_end_tokens
from rollout.types import UserError

Style = Literal["response", "group", "trl"]
Parts = dict[str, float]

CORRECTNESS = "correctness"
RESERVED = ("format", "overlong")
"""Names of parts that a user's function cannot give: they are measured here."""
_WHOLE = ("responses", "final_answers", "token_ids", "finished")
_ROW = ("prompt", "answer", "row_id", "domain")


@dataclass(frozen=True)
class RewardInput:
    """One group as a user's function may see it; plain values, so that it crosses to another process."""

    prompt: str
    """The prompt's text, chat template included."""
    answer: str
    """The gold answer."""
    row_id: str
    """Name of the row."""
    domain: str
    """Domain of the row."""
    columns: Mapping[str, Any]
    """All further columns of the row."""
    responses: Sequence[str]
    """G texts, end tokens removed."""
    token_ids: Sequence[Sequence[int]]
    """G lists of sampled ids, end token included."""
    finished: Sequence[bool]
    """G flags: False where the length limit cut the response."""
    answer_mode: AnswerMode = "auto"
    """Where the final answer is looked for."""
    thinking: bool = False
    """The prompt opened the thinking block."""
    first: int = 0
    """Number of the first response here within its group, for messages."""

    @property
    def final_answers(self) -> list[str | None]:
        """G final answers, as the built-in correctness would take them; None where there is none."""
        pairs = zip(self.responses, self.finished, strict=True)
        return [final_answer(text, self.answer_mode, self.thinking) if done else None for text, done in pairs]


class Completion(str):
    """A response for TRL functions, which take text or chats depending on the data: this is both.

    It is the text; `completion[0]["content"]`, the way into a chat of one message, gives the text as well.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if not self and index in (0, -1):
            return _Message("", self)  # an empty response is still a chat of one message
        piece = super().__getitem__(index)
        return _Message(piece, self) if isinstance(index, int) else piece


class _Message(str):
    """A character of a completion that can also be asked for the content of the message it stands in."""

    def __new__(cls, piece: str, whole: str) -> _Message:
        message = super().__new__(cls, piece)
        message.whole = whole
        return message

    whole: str

    def __getitem__(self, index: Any) -> Any:
        if index == "content":
            return str(self.whole)
        return "assistant" if index == "role" else super().__getitem__(index)


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function and how it wants to be called."""

    spec: str
    function: Callable[..., Any]
    style: Style
    is_async: bool
    names: tuple[str, ...]
    """Parameters that are passed by name."""
    required: tuple[str, ...]
    """Those among them without a default."""
    takes_all: bool
    """The function has **kwargs: every column is passed."""

    def score(self, group: RewardInput, deadline: float | None = None) -> list[Parts | str]:
        """Per response its named parts, or the text of what failed for it.

        A function that breaks the contract (wrong number of values, wrong types) is a UserError.
        """
        if self.style != "response":
            return self._whole(group, deadline)
        if self.is_async:
            parts: list[Parts | str] = _run(self._together(group, deadline))
            return parts
        return [self._one(group, k) for k in range(len(group.responses))]

    def _one(self, group: RewardInput, k: int) -> Parts | str:
        try:
            value = self.function(**self._arguments(group, k))
        except UserError:
            raise
        except Exception as problem:  # noqa: BLE001  user code: whatever it raises is one response's error
            return self._failure(group, k, problem)
        return self._parts(value, group, k)

    async def _together(self, group: RewardInput, deadline: float | None) -> list[Parts | str]:
        """An async function of one response: all responses wait together, each with its own deadline."""

        async def one(k: int) -> Parts | str:
            try:
                value = await asyncio.wait_for(self.function(**self._arguments(group, k)), deadline)
            except UserError:
                raise
            except TimeoutError:
                return TIMED_OUT
            except Exception as problem:  # noqa: BLE001  as above
                return self._failure(group, k, problem)
            return self._parts(value, group, k)

        return list(await asyncio.gather(*(one(k) for k in range(len(group.responses)))))

    def _whole(self, group: RewardInput, deadline: float | None) -> list[Parts | str]:
        try:
            value = self.function(**self._arguments(group, None))
            if self.is_async:
                value = _run(_limited(value, None if deadline is None else deadline * len(group.responses)))
        except UserError:
            raise
        except Exception as problem:  # noqa: BLE001  as above
            return [self._failure(group, None, problem)] * len(group.responses)
        values = self._as_list(value, len(group.responses), group.row_id)
        return [self._parts(each, group, k) for k, each in enumerate(values)]

    def _as_list(self, value: Any, expected: int, row_id: str) -> list[Any]:
        if isinstance(value, Mapping):  # named parts, each a list
            columns = {name: self._as_list(each, expected, row_id) for name, each in value.items()}
            return [{name: column[k] for name, column in columns.items()} for k in range(expected)]
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise UserError(
                f"--reward {self.spec} returned {type(value).__name__} for row {row_id}.\n"
                f"  It takes a whole group, so it must return a list with one value per response ({expected})."
            )
        if len(value) != expected:
            raise UserError(
                f"--reward {self.spec} returned {len(value)} values for row {row_id}, expected {expected}: "
                f"one per response.\n  Values are never repeated or cut to fit; return a list as long as its input."
            )
        return list(value)

    def _arguments(self, group: RewardInput, k: int | None) -> dict[str, Any]:
        known = self._known(group, k)
        unknown = [name for name in self.required if name not in known]
        if unknown:
            raise UserError(
                f"--reward {self.spec} asks for {', '.join(unknown)}, which is neither a name of the contract nor a "
                f"column.\n  Known for row {group.row_id}: {', '.join(sorted(known))}."
            )
        return known if self.takes_all else {name: known[name] for name in self.names if name in known}

    def _known(self, group: RewardInput, k: int | None) -> dict[str, Any]:
        row = {name: getattr(group, name) for name in _ROW}
        if self.style == "trl":
            count = len(group.responses)
            columns = {name: [value] * count for name, value in {**row, **group.columns}.items() if name != "prompt"}
            return {
                **columns,
                "prompts": [Completion(group.prompt)] * count,
                "completions": [Completion(text) for text in group.responses],
                "completion_ids": [list(ids) for ids in group.token_ids],
            }
        plural = {name: list(getattr(group, name)) for name in _WHOLE if self._wants(name) or self.takes_all}
        if self.style == "group":
            return {**group.columns, **row, **plural}
        assert k is not None
        one = {"response": group.responses[k], "token_ids": group.token_ids[k], "finished": group.finished[k]}
        if self._wants("final_answer") or self.takes_all:
            one["final_answer"] = group.final_answers[k]
        return {**group.columns, **row, **one}

    def _wants(self, name: str) -> bool:
        return name in self.names

    def _parts(self, value: Any, group: RewardInput, k: int) -> Parts | str:
        """The value as named parts of finite floats; text where it is none."""
        named = value if isinstance(value, Mapping) else {CORRECTNESS: value}
        parts: Parts = {}
        for name, each in named.items():
            if not isinstance(name, str) or not name or name in RESERVED:
                raise UserError(
                    f"--reward {self.spec} named a part {name!r} for row {group.row_id}.\n"
                    f"  Part names are text, and {', '.join(RESERVED)} are taken."
                )
            number = _number(each)
            if number is None or not math.isfinite(number):
                what = type(each).__name__ if each is not None and number is None else each
                where = f" for the part {name!r}" if isinstance(value, Mapping) else ""
                which = f"row {group.row_id}, response {group.first + k}"
                return f"--reward {self.spec}, {which}: returned {what}{where}, not a number"
            parts[name] = number
        if not parts:
            raise UserError(f"--reward {self.spec} returned no parts for row {group.row_id}; return at least one.")
        return parts

    def _failure(self, group: RewardInput, k: int | None, problem: Exception) -> str:
        which = "" if k is None else f", response {group.first + k}"
        frame = problem.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        at = f" ({Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno})" if frame is not None else ""
        return f"--reward {self.spec}, row {group.row_id}{which}: {type(problem).__name__}: {problem}{at}"


TIMED_OUT = "timed out"
"""In place of parts: an async call ran into its deadline."""


@cache
def _runner() -> asyncio.Runner:
    """One event loop for all calls: clients that a user's module keeps open stay usable."""
    return asyncio.Runner()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _runner().run(coroutine)


async def _limited(awaitable: Any, seconds: float | None) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        return float(value)
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    if callable(item) and getattr(value, "ndim", 0) == 0:
        value = item()
        return float(value) if isinstance(value, bool | int | float) else None
    return None


def clean(texts: Sequence[str]) -> list[str]:
    """Response texts as users see them."""
    return [without_end_tokens(text) for text in texts]
