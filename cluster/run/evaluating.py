"""`launch.py eval`: accuracy, pass@k, maj@k, format and length of a model or a run on held-out prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from cluster.errors import DONE, INTERRUPTED, NOT_RESUMABLE, PlanError, RollearnError, Stopped
from cluster.joining import resources_at
from cluster.model_facts import read_model_facts
from cluster.plan import make_plan
from cluster.private import private_ray
from cluster.run.cli import apply_settings, parse
from cluster.run.config import Config
from cluster.run.folder import RunFolder
from cluster.run.inert import inert
from cluster.run.saved_config import CONFIG
from cluster.run.signals import handled
from rollout.config import DataConfig


@dataclass(frozen=True)
class EvalCluster:
    """Where an evaluation takes place."""

    address: str = ""
    """Ray cluster to join (default: this machine, also for a run that was trained on a cluster)."""


@dataclass(frozen=True)
class EvalOptions:
    """Measure a model, or the trained model of a run; a run brings its prompts, columns, reward and lengths along."""

    model: Annotated[str, tyro.conf.Positional]
    """Model directory, hub id, `demo`, or a run directory."""
    prompts: str = "arithmetic"
    """Prompts to answer; their held-out rows where the source has some, for a run those that it has held out."""
    size: int = 512
    """Prompts used at most."""
    samples: int = 1
    """Responses per prompt (above 1: pass@k and maj@k)."""
    greedy: bool = False
    """Take the most likely token everywhere, one response per prompt."""
    temperature: float = 1.0
    """Sampling temperature."""
    max_new_tokens: int | None = None
    """Longest response (default: what the model directory recommends, else 1024)."""
    reward: str = ""
    """Your own reward, as for training."""
    seed: int = 0
    """Seed of the samples."""
    json: str = ""
    """Also write the numbers to this file."""
    data: DataConfig = field(default_factory=DataConfig)
    cluster: EvalCluster = field(default_factory=EvalCluster)


def main(words: list[str]) -> int:
    """Evaluate; prints a table."""
    options = tyro.cli(EvalOptions, prog="launch.py eval", args=words)
    run = _config_of(options.model)
    if run is not None:
        options = tyro.cli(EvalOptions, prog="launch.py eval", args=words, default=_as_in(run, options.model))
    if options.greedy and options.samples > 1:
        raise PlanError("--greedy gives the same response every time: leave --samples at 1, or sample.")
    config = apply_settings(
        dataclasses.replace(run or Config(), run="", quiet=True, data=options.data),
        {
            "model": _model_of(options.model),
            "prompts": options.prompts,
            "reward_function": options.reward,
            "seed": options.seed,
            "cluster.address": options.cluster.address,
            "eval.size": options.size,
            "eval.samples": options.samples,
            "rollout.max_new_tokens": options.max_new_tokens,
        },
    )
    own = run is not None and run.eval.wanted and options.prompts == run.prompts
    aside = run.eval.size if run is not None and own else 0
    table, numbers = _evaluate(config, 0.0 if options.greedy else options.temperature, aside)
    sys.stdout.write(inert(table) + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(numbers, indent=2) + "\n")
    return DONE


def _config_of(name: str) -> Config | None:
    """The configuration of a run directory; None for a model."""
    saved = Path(name) / CONFIG
    return parse(["--config", str(saved)]) if saved.is_file() and (Path(name) / "metrics.jsonl").is_file() else None


def _as_in(run: Config, name: str) -> EvalOptions:
    """What a run was measured with while it was trained."""
    return EvalOptions(
        name,
        prompts=run.eval.prompts or run.prompts,
        size=run.eval.size,
        max_new_tokens=run.rollout.max_new_tokens,
        reward=run.reward_function,
        data=run.data,
    )


def _model_of(name: str) -> str:
    """The trained model of a run directory, or the name as it is."""
    if (Path(name) / "metrics.jsonl").is_file():
        trained = Path(name) / "model"
        if not (trained / "config.json").is_file():
            raise PlanError(f"{name} has no trained model yet; write one with: launch.py export {name} DIR")
        return str(trained)
    return name


@contextlib.contextmanager
def ended_as_a_run(pids: Mapping[str, int], places: Sequence[Path], grace: float) -> Iterator[None]:
    """An evaluation ends by signals and lost processes as a run does; there is nothing to resume, so both are exit 4.

    One that does not end in time is ended with its processes `pids`, and its directories `places` are removed.
    """

    def end_now(number: int) -> None:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        os._exit(INTERRUPTED if number == signal.SIGINT else NOT_RESUMABLE)

    with handled(end_now, grace) as received:
        try:
            yield
        except KeyboardInterrupt:
            if signal.SIGTERM in received[:1]:
                raise Stopped(NOT_RESUMABLE, "terminated; nothing was measured") from None
            raise
        except PlanError:
            raise
        except RollearnError as error:
            raise Stopped(NOT_RESUMABLE, str(error)) from None


def _evaluate(config: Config, temperature: float, aside: int) -> tuple[str, dict[str, float]]:
    resources = resources_at(config.cluster.address)
    plan = make_plan(config, resources, read_model_facts(config.model))
    pids: dict[str, int] = {}

    places: list[Path] = []

    def tell(text: str, kind: str, names: tuple[str, ...]) -> None:
        sys.stderr.write(f"{text}\n")

    with contextlib.ExitStack() as stack:
        # Engines on other nodes write their logs into it, so there it must lie where all nodes see it.
        shared = Path.cwd() if config.cluster.address else None
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollearn-eval-", dir=shared)))
        places.append(place)
        stack.enter_context(ended_as_a_run(pids, places, config.cluster.grace))
        folder = RunFolder.create(place / "eval")
        code = folder.copy_code(Path(__file__).resolve().parents[2])
        places.append(temp := private_ray(config.cluster.address))
        stack.callback(shutil.rmtree, temp, ignore_errors=True)
        from cluster.run.inputs import load_held_out

        inputs = load_held_out(config, plan, place / "prepared", aside)
        from cluster.ray_start import start_ray
        from cluster.scorer_pool import ScorerPool
        from cluster.start import Processes
        from cluster.system import System
        from rollout.engine import Sampling
        from rollout.evaluate import evaluate_groups
        from rollout.rewards.answers import final_answer
        from rollout.seeds import group_seed
        from rollout.types import GroupRequest

        system = System(Processes(config, plan, folder, code, temp, pids))
        system.tell = tell
        stack.callback(system.close)
        start_ray(config, plan, folder, temp)
        system.launch_engines(inputs.model)
        scorer = ScorerPool(config.reward, inputs.scoring, folder.logs / "scorer.log")
        stack.callback(scorer.close)
        sampling = Sampling(temperature, 1.0, 0, plan.max_new_tokens, inputs.stop_token_ids)
        requests = [
            GroupRequest(p, -1, 0, 0, config.eval.samples, group_seed(config.seed, -1, 0, p.row_id))
            for p in inputs.held_out
        ]
        for note in inputs.notes:
            sys.stderr.write(inert(f"note       {note}\n"))
        for groups in system.pool.generate(requests, sampling):
            for group in groups:
                scorer.submit(group)
        scored = list(scorer.drain())
        if scored and all(group.errors for group in scored):
            raise PlanError(f"Nothing could be graded: {scorer.last_error}")
        result = evaluate_groups(scored, final_answer)
    return result.table(), result.metrics()
