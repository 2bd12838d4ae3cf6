"""`launch.py bench`: engines alone, learner alone, sync, and the whole round, in one run of the same system.

Limit = engines alone + learner alone (they share the cores or devices); efficiency = limit / round. Every figure is a
median over the repetitions, taken in turn, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from cluster.errors import DONE
from cluster.run.cli import apply_settings
from cluster.run.config import Config

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
    repeats: int = 3
    """Rounds that are timed, after one that is not."""
    json: str = ""
    """Write the figures to this file."""
    run: str = ""
    """Run directory."""


def main(words: list[str]) -> int:
    """Run the benchmark; prints a table, and writes JSON where asked."""
    from cluster.run.opening import open_run

    bench = tyro.cli(BenchConfig, prog="launch.py bench", args=words)
    with open_run(training_config(bench)) as run:
        figures = measure(run, bench)
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
        "eval.every": 0,
        "checkpoint.every": 0,
        # The weights must stay what they are, or responses would change in length from round to round.
        "learner.lr": 1e-12,
    }
    return apply_settings(Config(quiet=True), settings)


def measure(run: Run, bench: BenchConfig) -> dict[str, object]:
    """Seconds of each part (medians), tokens per second, and the efficiency."""
    run.generation.fixed_length = bench.fixed_length
    run.sync(version=0)
    samples: list[dict[str, float]] = []
    for turn in run.rounds():
        samples.append(_round(run, turn, bench.fixed_length))
    samples = samples[1:]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    limit = medians["generate_alone"] + medians["learn_alone"]
    return {
        "efficiency": limit / medians["round"],
        "limit": limit,
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


def _round(run: Run, turn: Round, fixed_length: bool) -> dict[str, float]:
    """One round with everything in it, then its parts alone on the same requests and the same batch."""
    began_round = time.monotonic()
    requests = run.next_requests(turn)
    groups = run.generate_and_score(turn, requests)
    scored_at = time.monotonic()
    batch = run.build_batch(turn, _all_work(groups, turn.number) if fixed_length else groups)
    run.update(turn, batch)
    turn.row |= run.sync(version=turn.number)
    run.record(turn, groups)
    whole = time.monotonic() - began_round
    began = time.monotonic()
    tokens = sum(
        len(g.token_ids) for items in run.system.pool.generate(requests, run.generation.sampling()) for g in items
    )
    generate = time.monotonic() - began
    began = time.monotonic()
    run.system.learners.update(batch, lambda done: None)
    learn = time.monotonic() - began
    began = time.monotonic()
    for scored in groups:
        run.scorer.submit(scored.group)
    answers = sum(len(scored.total) for scored in run.scorer.drain())
    score = time.monotonic() - began
    return {
        "round": whole,
        "generate_alone": generate,
        "learn_alone": learn,
        "score_alone": score,
        "score_after": float(turn.row["time/score"]),
        "answers": float(answers),
        "sync": float(turn.row["sync/seconds"]),
        "generate_and_score": scored_at - began_round,
        "learn": float(turn.row["time/learn"]),
        "old_logprobs": float(turn.row["time/old_logprobs"]),
        "tokens": float(tokens),
    }


def _all_work(groups: list[ScoredGroup], round_: int) -> list[ScoredGroup]:
    """The same groups with random rewards: no group is left out for want of signal."""
    draw = np.random.Generator(np.random.PCG64(round_))
    return [dataclasses.replace(group, total=draw.standard_normal(len(group.total))) for group in groups]


def table(figures: dict[str, object]) -> str:
    """The figures for people."""
    rows = [
        ("engines alone", figures["generate_alone"]),
        ("learner alone", figures["learn_alone"]),
        ("limit (sum)", figures["limit"]),
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
