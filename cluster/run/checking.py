"""`launch.py check-reward`: try a reward out on answers whose worth is known, before any model is loaded."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from cluster.errors import BAD_REQUEST, DONE
from cluster.model_facts import read_model_facts
from cluster.plan import make_plan
from cluster.resources import local_resources
from cluster.run.cli import parse
from cluster.run.inert import inert
from rollout.config import DataConfig, RewardConfig


@dataclass(frozen=True)
class CheckOptions:
    """Say what a reward would pay for a gold, an empty, a wrong, a format-only and a huge answer."""

    reward_function: str = ""
    """Your own reward: path/file.py:function or package.module:function (default: the built-in correctness)."""
    prompts: str = "arithmetic"
    """Prompts whose first rows are tried."""
    model: str = "demo"
    """Model whose tokenizer is used."""
    rows: int = 3
    """Rows tried."""
    json: str = ""
    """Also write the findings to this file."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)


def main(words: list[str]) -> int:
    """Check; exit 2 when something critical was found."""
    options = tyro.cli(CheckOptions, prog="launch.py check-reward", args=_flags(words))
    base = parse(["--prompts", options.prompts, "--model", options.model, "--reward", options.reward_function])
    config = dataclasses.replace(base, reward=options.reward, data=options.data)
    plan = make_plan(config, local_resources(), read_model_facts(config.model))
    from cluster.reward_check import check_reward
    from cluster.run.inputs import load_inputs

    with tempfile.TemporaryDirectory(prefix="rollearn-check-") as place:
        inputs = load_inputs(config, plan, Path(place) / "prepared")
        check = check_reward(config.reward, inputs.scoring, inputs.in_order, options.rows, thorough=True)
    sys.stdout.write(inert(check.as_text()) + "\n")
    if options.json:
        findings = [dataclasses.asdict(finding) for finding in check.findings]
        Path(options.json).write_text(json.dumps(findings, indent=2, default=str) + "\n")
    return BAD_REQUEST if check.is_critical else DONE


def _flags(words: list[str]) -> list[str]:
    """`--reward` names the function, as for training; `--reward.x` are its settings."""
    return [word.replace("--reward", "--reward-function", 1) if _is_reward(word) else word for word in words]


def _is_reward(word: str) -> bool:
    return word == "--reward" or word.startswith("--reward=")
