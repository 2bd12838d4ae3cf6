"""The command line: defaults <- preset <- TOML file <- flags, and the subcommands."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from cluster.errors import PlanError
from cluster.run.config import Config
from learner.variants import PRESETS

NAMES = {"reward_function": "reward"}  # fields whose flag has another name
ALIASES = {"--skip-bad-rows": "--data.skip-bad-rows", "--placement": "--cluster.placement"}


def parse(argv: Sequence[str], prog: str = "launch.py") -> Config:
    """The configuration that a command line asks for.

    PlanError for what the file or preset got wrong; a wrong flag prints its own message and exits 2.
    """
    argv, file = _take([_full_name(word) for word in argv], "--config")
    settings = _read_toml(Path(file)) if file else {}
    preset = _take(argv, "--preset")[1] or str(settings.get("preset", Config.preset))
    base = apply_settings(Config(preset=preset), preset_settings(preset))
    # A file is turned into flags, so its values meet the same checks; what the user typed comes last and wins.
    flags = [flag for name, value in settings.items() for flag in _as_flag(name, value)]
    config = tyro.cli(Config, prog=prog, args=[*flags, *argv], default=base, description=DESCRIPTION)
    return _with_absolute_paths(config)


def _full_name(word: str) -> str:
    """A short flag as the flag it stands for, `--flag=value` included."""
    flag, equals, value = word.partition("=")
    return f"{ALIASES.get(flag, flag)}{equals}{value}"


def _with_absolute_paths(config: Config) -> Config:
    """Files the user named, as absolute paths: actors run in another directory, and a resume may be typed in one."""
    settings: dict[str, Any] = {}
    named = {"model": config.model, "prompts": config.prompts, "eval.prompts": config.eval.prompts}
    for name, value in named.items():
        # A plain word is the name of something built in, whatever files are called like it.
        if ("/" in value or Path(value).suffix) and Path(value).exists():
            settings[name] = str(Path(value).absolute())
    if config.learner.loss.endswith(".py"):
        settings["learner.loss"] = str(Path(config.learner.loss).absolute())
    file, colon, function = config.reward_function.partition(":")
    if file.endswith(".py"):
        settings["reward_function"] = f"{Path(file).absolute()}{colon}{function}"
    return apply_settings(config, settings)


DESCRIPTION = """Reinforcement learning of language models with verifiable rewards.

launch.py [train] [OPTIONS] | resume RUN | plan | presets | eval MODEL|RUN | check-reward | report RUN... |
doctor RUN|FILE | lesson NAME | bench | export RUN DIR.  Settings may also stand in a TOML file: --config FILE."""


def preset_settings(name: str) -> dict[str, Any]:
    """What a preset sets, by dotted field name; PlanError with the nearest name for an unknown one."""
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        raise PlanError(f"--preset {name}: there is no such preset.{close}\n  All: {', '.join(PRESETS)}.")
    return dict(PRESETS[name].settings)


def apply_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of the configuration with the dotted fields set."""
    for name, value in settings.items():
        section, _, field = name.rpartition(".")
        if section:
            part = dataclasses.replace(getattr(config, section), **{field: value})
            config = dataclasses.replace(config, **{section: part})
        else:
            config = dataclasses.replace(config, **{field: value})
    return config


def fields(config: Config | type[Config] = Config) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field, in the order of declaration; values of the defaults for the class."""
    instance = config() if isinstance(config, type) else config
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            for inner in dataclasses.fields(value):
                yield f"{field.name}.{inner.name}", getattr(value, inner.name)
        else:
            yield field.name, value


def flag_name(name: str) -> str:
    """The flag of a field: learner.zero_stage -> --learner.zero-stage."""
    return "--" + NAMES.get(name, name).replace("_", "-")


def as_toml(config: Config) -> str:
    """The whole configuration as a TOML file that `--config` reads back to the same configuration."""
    lines, section = [], ""
    for name, value in fields(config):
        head, _, key = name.rpartition(".")
        if head != section:
            lines.append(f"\n[{head}]")
            section = head
        lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join(lines).lstrip() + "\n"


def nearest(name: str, known: Any) -> str:
    """` Perhaps you meant X.` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Perhaps you meant {close[0]}." if close else ""


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)  # None is written as "None": TOML has no empty value
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _read_toml(file: Path) -> dict[str, Any]:
    """Dotted settings of a TOML file; PlanError names the file, and the nearest name of an unknown key."""
    try:
        data = tomllib.loads(file.read_text())
    except OSError as error:
        raise PlanError(f"--config {file}: cannot be read ({error.strerror}).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"--config {file}: not valid TOML: {error}.") from None
    known = [name for name, _ in fields()]
    settings: dict[str, Any] = {}
    for key, value in data.items():
        entries = {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
        for name, item in entries.items():
            name = name.replace("-", "_")
            if name not in known:
                raise PlanError(f"--config {file}: unknown key `{name}`.{nearest(name, known)}")
            settings[name] = item
    return settings


def _as_flag(name: str, value: Any) -> list[str]:
    flag = flag_name(name)
    if isinstance(value, bool):
        head, _, tail = flag[2:].rpartition(".")
        return [flag if value else f"--{head}{'.' if head else ''}no-{tail}"]
    return [flag, str(value)]


def _take(argv: list[str], flag: str) -> tuple[list[str], str]:
    """Remove `flag VALUE` or `flag=VALUE`; returns the rest and the last value given."""
    rest, value, position = [], "", 0
    while position < len(argv):
        word = argv[position]
        if word == flag and position + 1 < len(argv):
            value, position = argv[position + 1], position + 1
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
        position += 1
    return rest, value


def version() -> str:
    """Version of the installed or checked-out package."""
    pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if pyproject.is_file():
        return str(tomllib.loads(pyproject.read_text())["project"]["version"])
    from importlib.metadata import version as installed

    return installed("rollearn")


def is_terminal() -> bool:
    """True when the output is looked at by a person."""
    return sys.stdout.isatty()
