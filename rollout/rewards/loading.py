"""Finds the reward a user names, `path/to/file.py:function` or `package.module:function`, and reads how to call it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout.rewards.custom import RewardFunction, Style
from rollout.types import UserError


def split_spec(spec: str) -> tuple[str, str]:
    """(file or module, function) of a --reward; files become absolute, so that every process means the same one."""
    target, colon, name = spec.rpartition(":")
    if not colon or not target or not name.isidentifier():
        raise UserError(
            f"--reward {spec}: a function is missing.\n"
            f"  Write path/to/file.py:function or package.module:function, for example rewards.py:my_reward."
        )
    if target.endswith(".py") or "/" in target:
        path = Path(target).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"--reward {spec}: there is no file {path}.")
        return str(path), name
    return target, name


def _module(target: str, spec: str) -> ModuleType:
    try:
        if not target.endswith(".py"):
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            return importlib.import_module(target)
        path = Path(target)
        sys.path.insert(0, str(path.parent))  # files beside it can be imported
        name = f"rollearn_reward_{path.stem}"
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        found.loader.exec_module(module)
    except Exception as problem:  # importing user code: whatever it raises is the user's to read
        raise UserError(f"--reward {spec}: importing it failed: {type(problem).__name__}: {problem}") from problem
    return module


def load(spec: str) -> RewardFunction:
    """Import a --reward and read from its parameters how it wants to be called."""
    target, name = split_spec(spec)
    module = _module(target, spec)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"--reward {spec}: {target} has no function {name!r}.\n  It has: {', '.join(known) or 'none'}.")
    return read_signature(spec, function)


def right_response_of(spec: str) -> Callable[..., str] | None:
    """`right_response(**row) -> str` beside the user's function, if there is one: the self-test asks it."""
    target, _ = split_spec(spec)
    found = None if target.endswith(".py") else importlib.util.find_spec(target)
    source = target if target.endswith(".py") else found.origin if found is not None else None
    if source is None or not source.endswith(".py") or "right_response" not in Path(source).read_text("utf-8"):
        return None  # nothing is imported here for a function that does not have it
    make = getattr(_module(target, spec), "right_response", None)
    return make if callable(make) else None


def read_signature(spec: str, function: Callable[..., Any]) -> RewardFunction:
    """How a function wants to be called."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = tuple(each.name for each in named)
    style: Style | None = None
    if "completions" in names:
        style = "trl"
    elif "responses" in names or "final_answers" in names:
        style = "group"
    elif "response" in names or "final_answer" in names:
        style = "response"
    if style is None:
        raise UserError(
            f"--reward {spec} has the parameters ({', '.join(names) or 'none'}), so it cannot be told what it wants.\n"
            f"  One response at a time: def reward(response, answer) -> float. A whole group: def reward(responses, "
            f"answer) -> list[float]. TRL's: def reward(completions, **columns) -> list[float]."
        )
    call = function if inspect.isroutine(function) else type(function).__call__
    return RewardFunction(
        spec=spec,
        function=function,
        style=style,
        is_async=inspect.iscoroutinefunction(call),
        names=names,
        required=tuple(each.name for each in named if each.default is each.empty),
        takes_all=any(each.kind is each.VAR_KEYWORD for each in parameters),
    )
