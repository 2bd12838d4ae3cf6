"""`launch.py bench`: engines alone, learner alone, sync, and the whole round, in one run of the same system.

Limit = engines alone + learner alone where they share cores or devices, the larger of the two where each has its own;
efficiency = limit / round. Every figure is a median over the repetitions. Under the phased schedule they are taken in
turn, so that a machine that slows down slows them all; under the others, where rounds overlap, the parts come last.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from cluster.errors import DONE
from cluster.run.cli import apply_settings
from cluster.run.config import Config
from cluster.run.credit import batch_of

if TYPE_CHECKING:
    from cluster.run.round import Round
    from cluster.run.stages import Run
    from rollout.types import ScoredGroup


@dataclass(frozen=True)
class BenchConfig:
    """Time the parts of a round and the whole, on the same work."""

    rollouts: int = 8192
    """Responses per round."""
    minibatches: int | None = None
    """Optimizer steps per round (default: as for training)."""
    group_size: int | None = None
    """Responses per prompt (default: as for training)."""
    model: str = "demo"
    """Model directory."""
    prompts: str = "arithmetic"
    """Where prompts come from."""
    max_new_tokens: int | None = None
    """Longest response (default: as for training)."""
    fixed_length: bool = False
    """Every response has exactly --max-new-tokens tokens and a random advantage, so that all of it is work."""
    engines: Annotated[int | None, tyro.conf.arg(name="rollout.engines")] = None
    """Number of engines."""
    ranks: Annotated[int | None, tyro.conf.arg(name="learner.ranks")] = None
    """Number of learner ranks."""
    transport: Annotated[str, tyro.conf.arg(name="cluster.transport")] = "auto"
    """How weights travel."""
    schedule: Annotated[str, tyro.conf.arg(name="cluster.schedule")] = "auto"
    """What overlaps: phased, streamed, async."""
    repeats: int = 3
    """Rounds that are timed, after one that is not."""
    json: str = ""
    """Write the figures to this file."""
    run: str = ""
    """Run directory."""


def main(words: list[str], loop: Callable[[Run], None]) -> int:
    """Run the benchmark; prints a table, and writes JSON where asked."""
    from cluster.run.opening import open_run

    bench = tyro.cli(BenchConfig, prog="launch.py bench", args=words)
    with open_run(training_config(bench)) as run:
        figures = measure(run, bench, loop)
    sys.stdout.write(table(figures))
    if bench.json:
        Path(bench.json).write_text(json.dumps(figures, indent=2) + "\n")
    return DONE


def training_config(bench: BenchConfig) -> Config:
    """The run that is timed: no evaluation, no checkpoints, everything else as in training."""
    settings = {
        "rollouts": bench.rollouts,
        "minibatches": bench.minibatches,
        "group_size": bench.group_size,
        "model": bench.model,
        "prompts": bench.prompts,
        "rounds": bench.repeats + 1,
        "run": bench.run,
        "rollout.max_new_tokens": bench.max_new_tokens,
        "rollout.engines": bench.engines,
        "learner.ranks": bench.ranks,
        "cluster.transport": bench.transport,
        "cluster.schedule": bench.schedule,
        "eval.every": 0,
        "checkpoint.every": 0,
        # The weights must stay what they are, or responses would change in length from round to round.
        "learner.lr": 1e-12,
    }
    return apply_settings(Config(quiet=True), settings)


def measure(run: Run, bench: BenchConfig, loop: Callable[[Run], None]) -> dict[str, object]:
    """Seconds of each part (medians), tokens per second, and the efficiency."""
    phased, separate = run.plan.schedule == "phased", run.plan.placement == "separate"
    wholes: list[dict[str, float]] = []
    parts: list[dict[str, float]] = []
    ended = time.monotonic()

    def recorded(turn: Round) -> None:
        nonlocal ended
        wholes.append(_whole(turn, time.monotonic() - max(turn.started, ended)))
        if phased or turn.number == run.config.rounds:
            parts.extend(_alone(run, turn) for _ in range(1 if phased else bench.repeats + 1))
        ended = time.monotonic()

    run.generation.fixed_length = bench.fixed_length
    run.amend = _all_work if bench.fixed_length else run.amend
    run.recorded = recorded
    loop(run)
    samples = [whole | alone for whole, alone in zip(wholes[1:], parts[1:], strict=True)]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    both = (medians["generate_alone"], medians["learn_alone"])
    limit = max(both) if separate else sum(both)
    return {
        "efficiency": limit / medians["round"],
        "limit": limit,
        "limit_of": "larger of the two" if separate else "sum",
        "schedule": run.plan.schedule,
        **medians,
        "answers_per_second": medians["answers"] / medians["score_alone"],
        "tokens_per_second": medians["tokens"] / medians["generate_alone"],
        "repeats": len(samples),
        "round_samples": [sample["round"] for sample in samples],
        "engines": run.plan.engines,
        "ranks": run.plan.ranks,
        "rollouts": bench.rollouts,
        "group_size": run.plan.group_size,
        "minibatches": run.plan.minibatches,
        "max_new_tokens": run.plan.max_new_tokens,
        "fixed_length": bench.fixed_length,
    }


def _whole(turn: Round, seconds: float) -> dict[str, float]:
    """A round with everything in it."""
    return {
        "round": seconds,
        "score_after": float(turn.row["time/score"]),
        "sync": float(turn.row["sync/seconds"]),
        "generate_and_score": float(turn.row["time/generate"]) + float(turn.row["time/score"]),
        "learn": float(turn.row["time/learn"]),
        "old_logprobs": float(turn.row["time/old_logprobs"]),
    }


def _alone(run: Run, turn: Round) -> dict[str, float]:
    """The parts of a round by themselves, on the same requests and the same groups."""
    began = time.monotonic()
    answered = run.system.pool.generate(turn.requests, run.generation.sampling())
    tokens = sum(len(group.token_ids) for groups in answered for group in groups)
    generate = time.monotonic() - began
    batch = batch_of(run.config, run.plan, turn.trained, np.concatenate(turn.advantages))
    run.system.before_learning()
    began = time.monotonic()
    for _ in run.system.learners.update(batch, lambda done: None):
        pass
    learn = time.monotonic() - began
    if run.system.turns.shared:
        run.system.sync(run.system.version)  # the engines slept and have nothing to answer from
    began = time.monotonic()
    for scored in turn.trained:
        run.generation.scorer.submit(scored.group)
    answers = sum(len(scored.total) for scored in run.generation.scorer.drain())
    score = time.monotonic() - began
    return {
        "generate_alone": generate,
        "learn_alone": learn,
        "score_alone": score,
        "answers": float(answers),
        "tokens": float(tokens),
    }


def _all_work(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The same groups with random rewards: no group is left out for want of signal."""
    draw = np.random.Generator(np.random.PCG64(groups[0].group.request.round))
    return [dataclasses.replace(group, total=draw.standard_normal(len(group.total))) for group in groups]


def table(figures: dict[str, object]) -> str:
    """The figures for people."""
    rows = [
        ("engines alone", figures["generate_alone"]),
        ("learner alone", figures["learn_alone"]),
        (f"limit ({figures['limit_of']})", figures["limit"]),
        ("scoring alone", figures["score_alone"]),
        ("whole round", figures["round"]),
        ("  generate and score", figures["generate_and_score"]),
        ("    scoring not hidden", figures["score_after"]),
        ("  learn", figures["learn"]),
        ("    old log-probs", figures["old_logprobs"]),
        ("  sync", figures["sync"]),
    ]
    lines = [f"{name:<24}{float(str(value)):>10.3f} s" for name, value in rows]
    lines.append(f"{'answers scored/s':<24}{float(str(figures['answers_per_second'])):>10,.0f}")
    lines.append(f"{'engine tokens/s':<24}{float(str(figures['tokens_per_second'])):>10,.0f}")
    lines.append(f"{'efficiency':<24}{float(str(figures['efficiency'])):>10.3f}   (limit / whole round)")
    return "\n".join(lines) + "\n"
