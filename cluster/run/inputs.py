"""What a run reads before it starts: tokenizer, prompts, reward. Runs beside the start of Ray."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.plan import Plan
from cluster.run.config import Config
from rollout.config import DataConfig
from rollout.hub import on_this_machine
from rollout.prompts import SPLITS, PromptSet, check_prompts, load_prompt_sets, load_prompts
from rollout.rewards.selftest import verify_gold
from rollout.scoring import Scoring
from rollout.stream import PromptStream
from rollout.tokens import PreparedModel, load_tokenizer, prepare_model
from rollout.types import Prompt


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads before it starts."""

    model: str
    """Directory that engines and ranks load (prepared, when the tokenizer needed it)."""
    tokenizer: Any
    """Tokenizer of that directory."""
    prompts: PromptStream
    """Training prompts."""
    in_order: tuple[Prompt, ...]
    """The same in the order of their source, for the reward's self-test."""
    held_out: tuple[Prompt, ...]
    """Evaluation prompts."""
    scoring: Scoring
    """What the scorer must know about the tokenizer and the reward."""
    stop_token_ids: tuple[int, ...]
    """End tokens."""
    data: str
    """Hash of all rows, those of the evaluation included."""
    notes: tuple[str, ...]
    """What the user should know about model and data."""


def fitting(config: Config, plan: Plan) -> DataConfig:
    """The settings of the data with the limit that really holds: a prompt and a response fit into the model."""
    return dataclasses.replace(config.data, max_prompt_tokens=plan.max_prompt_tokens)


def check_rows(config: Config, plan: Plan) -> None:
    """Everything about rows of files that can be said before a process starts; UserError for all of it at once."""
    for spec in filter(None, (config.prompts, config.eval.prompts)):
        check_prompts(
            spec,
            fitting(config, plan),
            answer_required=not config.reward_function,
            verify_gold=verify_gold,
            vocabulary=Path(plan.model.path) / "tokenizer.json",
            splits=SPLITS if config.eval.wanted else SPLITS[:1],
        )


def load_inputs(config: Config, plan: Plan, prepared: Path) -> Inputs:
    """Read and check everything the user brought; UserError for all of its problems at once.

    `prepared` is where a model directory goes whose tokenizer had to be changed.
    """
    model, tokenizer = _load_tokenizer(config, plan, prepared)
    sets = load_prompt_sets(
        config.prompts,
        fitting(config, plan),
        config.eval,
        tokenizer,
        seed=config.seed,
        answer_required=not config.reward_function,
        verify_gold=verify_gold,
    )
    stream = PromptStream(sets.train.prompts, seed=config.seed, shuffle=config.data.shuffle, mix=config.data.mix)
    return _inputs(config, plan, model, tokenizer, stream, (sets.train, sets.held_out))


def load_held_out(config: Config, plan: Plan, prepared: Path, aside: int = 0) -> Inputs:
    """As `load_inputs`, for an evaluation alone: the held-out rows of a source that has some, else all of it.

    `aside`: how many rows a run has set aside from a source without any (0: there was no such run).
    """
    model, tokenizer = _load_tokenizer(config, plan, prepared)
    found = load_prompts(
        config.prompts,
        fitting(config, plan),
        tokenizer,
        seed=config.seed,
        split="eval",
        held_out=aside,
        answer_required=not config.reward_function,
        verify_gold=verify_gold,
    )
    chosen = dataclasses.replace(found, prompts=found.prompts[: config.eval.size])
    stream = PromptStream(found.prompts, seed=config.seed)
    return _inputs(config, plan, model, tokenizer, stream, (chosen,))


def model_directory(config: Config, model: str) -> str:
    """Where engines and ranks load from: a directory, which a model of the hub becomes here and once.

    The nodes of a cluster that was joined have caches, and tokens, of their own: they are given the hub id.
    """
    return model if config.cluster.address else on_this_machine(model)


def _load_tokenizer(config: Config, plan: Plan, prepared: Path) -> tuple[PreparedModel, Any]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    model = prepare_model(model_directory(config, plan.model.path), prepared)
    return model, load_tokenizer(model.path)


def _inputs(
    config: Config,
    plan: Plan,
    model: PreparedModel,
    tokenizer: Any,
    stream: PromptStream,
    sets: tuple[PromptSet, ...],
) -> Inputs:
    return Inputs(
        model=model.path,
        tokenizer=tokenizer,
        prompts=stream,
        in_order=sets[0].prompts,
        held_out=sets[-1].prompts,
        scoring=Scoring((model.think_id, model.end_think_id), plan.max_new_tokens, config.reward_function),
        stop_token_ids=model.stop_ids,
        data=hashlib.sha256(" ".join(part.digest for part in sets).encode()).hexdigest(),
        notes=(*model.warnings, *(note for part in sets for note in part.notes)),
    )
