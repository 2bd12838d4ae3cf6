"""The subcommands, and how every way to end becomes an exit code and a text for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import tyro

from cluster.errors import BAD_REQUEST, DONE, INTERRUPTED, PlanError, RollearnError, Stopped
from cluster.plan import make_plan, plan_text, read_model_facts
from cluster.resources import local_resources
from cluster.run import cli
from cluster.run.config import Config
from learner.variants import PRESETS
from rollout.types import UserError

Train = Callable[[Config], int]


def dispatch(words: Sequence[str], train: Train) -> int:
    """Run a command line; returns the exit code. A user's mistake gives a message, never a traceback."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": lambda rest: _train(rest, train),
        "plan": plan,
        "presets": presets,
        "bench": bench,
    }
    try:
        if "--version" in words:
            sys.stdout.write(f"rollearn {cli.version()}\n")
            return DONE
        name = words[0] if words and not words[0].startswith("-") else "train"
        if name not in commands:
            raise PlanError(f"{name}: there is no such command.{cli.nearest(name, commands)}\n  All: {', '.join(commands)}.")
        return commands[name](list(words[1:] if words and words[0] == name else words))
    except UserError as error:
        return _say(error, BAD_REQUEST)
    except Stopped as stopped:
        return _say(stopped, stopped.code)
    except RollearnError as error:
        return _say(error, BAD_REQUEST)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _train(words: list[str], train: Train) -> int:
    return train(cli.parse(words))


def plan(words: list[str]) -> int:
    """`plan`: the arithmetic and resources; starts nothing."""
    config = cli.parse(words, "launch.py plan")
    resources = local_resources()
    sys.stdout.write(plan_text(config, make_plan(config, resources, read_model_facts(config.model)), resources) + "\n")
    return DONE


def presets(words: list[str]) -> int:
    """`presets`: what each preset sets."""
    tyro.cli(_Nothing, prog="launch.py presets", args=words)
    for name, variant in PRESETS.items():
        sys.stdout.write(f"{name}\n  {variant.summary}\n  answers  {variant.fixes}\n  source   {variant.source}\n")
        for key, value in variant.settings.items():
            sys.stdout.write(f"    {cli.flag_name(key)} {value}\n")
        sys.stdout.write("\n")
    return DONE


def bench(words: list[str]) -> int:
    """`bench`: engines alone, learner alone, sync, the whole round."""
    from cluster.run.bench import main

    return main(words)


def _Nothing() -> None:  # noqa: N802
    """Show what each preset sets."""


def _say(text: object, code: int) -> int:
    sys.stderr.write(f"{text}\n")
    return code


