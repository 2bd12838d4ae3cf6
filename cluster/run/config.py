"""The whole configuration of a run: undotted fields here, dotted sections beside the code they configure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from cluster.config import CheckpointConfig, ClusterConfig, DoctorConfig
from learner.config import CorrectionConfig, KLConfig, LearnerConfig
from rollout.config import DataConfig, EvalConfig, FilterConfig, RewardConfig, RolloutConfig


@dataclass(frozen=True)
class Config:
    """Reinforcement learning of language models with verifiable rewards."""

    rollouts: int = 8192
    """Responses generated per round (prompts x group size)."""
    minibatches: int | None = None
    """Optimizer steps per round (default: the largest M <= 16 that divides the number of groups)."""
    group_size: int | None = None
    """Responses per prompt (default: 16, or all rollouts when there are fewer)."""
    rounds: int = 12
    """Rounds: generate, learn, sync."""
    model: str = "demo"
    """Model to train: a Hugging Face directory or id; `demo` is the built-in one."""
    prompts: str = "arithmetic"
    """Where prompts come from: a file (.jsonl .json .parquet .csv), a data set directory, or a built-in source."""
    preset: str = "grpo"
    """Named recipe that sets other options (see `launch.py presets`)."""
    reward_function: Annotated[str, tyro.conf.arg(name="reward")] = ""
    """Your own reward: path/file.py:function or package.module:function."""
    seed: int = 0
    """Seed of everything that is drawn."""
    run: str = ""
    """Run directory (default: runs/<time>-<preset>)."""
    quiet: bool = False
    """Print only the summary and errors."""
    log_json: bool = False
    """Print one JSON object per event instead of the live view."""
    tracker: str = ""
    """Also send metrics to tensorboard, wandb, trackio or mlflow, several with commas; NAME:offline stays on this
    machine, NAME:trl writes the metric names that dashboards made for TRL expect."""
    trace_round: int = 0
    """Write what every process did in this round to RUN/trace-round-N.json, for ui.perfetto.dev (0: no trace)."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
