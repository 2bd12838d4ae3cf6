"""`launch.py export RUN DIR`: the model of the newest checkpoint in Hugging Face format, with its tokenizer."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from cluster.adapter_plan import adapter_settings
from cluster.errors import DONE, PlanError
from cluster.model_facts import read_model_facts
from cluster.run import cli
from cluster.run.checkpoints import Checkpoint, CheckpointStore
from cluster.run.saved_config import CONFIG

if TYPE_CHECKING:
    from cluster.run.config import Config


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run's newest checkpoint as a Hugging Face directory."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory; it may still be running."""
    directory: Annotated[Path, tyro.conf.Positional]
    """Directory to write; must not hold anything yet."""


def main(words: list[str]) -> int:
    """Export; prints where the model is and what it is."""
    options = tyro.cli(ExportOptions, prog="launch.py export", args=words)
    file = options.run / CONFIG
    if not file.is_file():
        raise PlanError(f"{options.run} holds no run: there is no {CONFIG} in it.")
    target = options.directory.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PlanError(f"{options.directory} is there already and not empty: give a new directory.")
    checkpoint = CheckpointStore(options.run.absolute()).find_latest(lambda text: _say(f"warning: {text}"))
    if checkpoint is None:
        raise PlanError(f"{options.run} has no checkpoint yet, so there is nothing to export.")
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _write(checkpoint, cli.parse(["--config", str(file)]), options.run.absolute(), part)
        if target.exists():
            target.rmdir()
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    manifest = checkpoint.manifest
    _say(f"{options.directory}: weights after round {manifest.round}, {manifest.steps} optimizer steps")
    return DONE


def save_tokenizer(tokenizer: Any, model: str, target: Path) -> None:
    """Put beside exported weights what the model directory had: tokenizer, and the settings it recommends."""
    tokenizer.save_pretrained(target)
    own = Path(model) / "rollearn.json"
    if own.is_file():
        shutil.copyfile(own, target / own.name)


def _write(checkpoint: Checkpoint, config: Config, run: Path, target: Path) -> None:
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DS_ACCELERATOR": "cpu"}
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    from cluster.run.inputs import model_directory
    from learner.checkpoint import CheckpointRefused, read_weights, tensors_sha256
    from learner.engine import load_model
    from learner.lora import insert_adapter
    from learner.weights import write_model
    from rollout.tokens import load_tokenizer, prepare_model

    manifest = checkpoint.manifest
    model_path = prepare_model(model_directory(config, read_model_facts(config.model).path), run / "prepared").path
    model = load_model(model_path, str(manifest.settings["plan.learner_dtype"]))
    rank, alpha = adapter_settings(config, [])
    if rank:
        insert_adapter(model, rank, alpha)
    if not manifest.initial:
        stage = int(manifest.settings["learner.zero_stage"])
        try:
            # With LoRA a checkpoint holds the adapter only; the hash below covers the frozen weights as well.
            model.load_state_dict(read_weights(checkpoint.path, manifest.files, stage), strict=not rank)
        except (CheckpointRefused, RuntimeError) as error:
            raise PlanError(f"{checkpoint.path} cannot be exported: {error}") from None
    found = tensors_sha256(model.named_parameters())
    if found != manifest.weights:
        raise PlanError(
            f"{checkpoint.path}: the weights read have sha256 {found[:12]}, the ranks that wrote them had "
            f"{manifest.weights[:12]}; nothing was exported."
        )
    write_model(model, dict(model.named_parameters()), rank, alpha, target)
    save_tokenizer(load_tokenizer(model_path), model_path, target)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
