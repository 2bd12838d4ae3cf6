"""The configuration as a run directory keeps it, and how it differs from its preset."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.types import UserError

CONFIG = "config.toml"


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not what the preset gives."""

    name: str
    """Dotted name."""
    preset: Any
    """What the preset (or the default) gives."""
    run: Any
    """What the run used."""


def saved_settings(run_folder: Path) -> dict[str, Any]:
    """The settings of a run by dotted name; empty when it has no config.toml."""
    file = run_folder / CONFIG
    if not file.exists():
        return {}
    try:
        data = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None
    settings: dict[str, Any] = {}
    for name, value in data.items():
        section = value if isinstance(value, dict) else None
        settings.update({name: value} if section is None else {f"{name}.{key}": each for key, each in section.items()})
    return settings


def preset_differences(settings: Mapping[str, Any]) -> list[Difference]:
    """Settings that differ from what the run's own preset gives; where the run is written down is none."""
    from cluster.run.cli import apply_settings, fields, preset_settings
    from cluster.run.config import Config

    preset = str(settings.get("preset", Config.preset))
    given = dict(fields(apply_settings(Config(preset=preset), preset_settings(preset))))
    return [
        Difference(name, given.get(name), value)
        for name, value in settings.items()
        if name not in ("run", "preset") and not _same(given.get(name), value)
    ]


def _same(given: Any, saved: Any) -> bool:
    """Whether a value is the same after its way through TOML, which has no None."""
    return given == saved or str(given) == str(saved)
