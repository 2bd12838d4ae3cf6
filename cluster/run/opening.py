"""From a configuration to a run that stands: directory, processes, prompts; and back to nothing left behind."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import INTERRUPTED, NOT_RESUMABLE, RESUMABLE, PlanError, RollearnError, Stopped
from cluster.joining import resources_at
from cluster.model_facts import read_model_facts
from cluster.plan import Plan, make_plan
from cluster.plan_text import plan_text
from cluster.private import private_ray
from cluster.run.checkpoints import Checkpoint, CheckpointStore
from cluster.run.cli import as_toml, fields
from cluster.run.commits import Commits, base_manifest
from cluster.run.config import Config
from cluster.run.console import Console
from cluster.run.folder import RunFolder, default_run
from cluster.run.inputs import check_rows
from cluster.run.resume import check_inputs, choose, restore
from cluster.run.secrecy import refuse_secrets
from cluster.run.signals import handled
from cluster.run.trackers import Trackers, choose_trackers

if TYPE_CHECKING:
    from cluster.run.inputs import Inputs
    from cluster.run.stages import Run

SOURCE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class _Opening:
    """What is settled before any process starts."""

    config: Config
    plan: Plan
    folder: RunFolder
    console: Console
    store: CheckpointStore
    checkpoint: Checkpoint | None
    """Where to go on from; None for a run that has not begun."""


@contextmanager
def open_run(config: Config, resume: Path | None = None) -> Iterator[Run]:
    """A new run, or one to go on with: everything is checked, then started, and closed again however the body ends.

    Raises UserError for what cannot work (nothing was started), Stopped with the exit code for everything later.
    """
    resources = resources_at(config.cluster.address)
    refuse_secrets(fields(config))
    plan = make_plan(config, resources, read_model_facts(config.model))
    choose_trackers(config.tracker)
    check_rows(config, plan)
    new = Path(config.run) if config.run else default_run(config.preset)
    folder = RunFolder.create(new) if resume is None else RunFolder.reopen(resume)
    console = Console(quiet=config.quiet, log_json=config.log_json, rounds=config.rounds)
    try:
        store = CheckpointStore(folder.path, config.checkpoint.keep)
        checkpoint = None if resume is None else choose(store, config, plan, console.always)
        folder.write("config.toml", as_toml(config))
        folder.write("plan.txt", plan_text(config, plan, resources) + "\n")
        console.line(plan_text(config, plan, resources))
        console.line(f"run        {folder.path}")
        with _running(_Opening(config, plan, folder, console, store, checkpoint)) as run:
            yield run
    finally:
        console.close()
        folder.release()


@contextmanager
def _running(opening: _Opening) -> Iterator[Run]:
    """Processes up, body, processes down; turns the end of the body into an exit code."""
    folder = opening.folder
    pids: dict[str, int] = {}
    temps: list[Path] = []

    def end_now(number: int) -> None:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for temp in temps:
            shutil.rmtree(temp, ignore_errors=True)
        sys.stderr.write(f"ended at once; {_what_is_left(folder)}\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED if number == signal.SIGINT else _code(folder))

    with contextlib.ExitStack() as stack:
        received = stack.enter_context(handled(end_now, opening.config.cluster.grace))
        try:
            run = _start(opening, pids, temps, stack)
            yield run
        except KeyboardInterrupt:
            if signal.SIGTERM in received[:1]:
                raise Stopped(_code(folder), f"terminated; {_what_is_left(folder)}") from None
            raise Stopped(INTERRUPTED, f"interrupted; {_what_is_left(folder)}") from None
        except PlanError:
            raise
        except RollearnError as error:
            raise Stopped(_code(folder), f"{error}\n  {_what_is_left(folder)}") from None


def _start(opening: _Opening, pids: dict[str, int], temps: list[Path], stack: contextlib.ExitStack) -> Run:
    config, plan, folder, console = opening.config, opening.plan, opening.folder, opening.console
    began = time.monotonic()
    console.phase("starting Ray, engines and ranks")
    code = folder.copy_code(SOURCE)
    temp = private_ray(config.cluster.address)
    temps.append(temp)
    # The tokenizer's imports take seconds and need no process of Ray's: both go on at once.
    pool = stack.enter_context(ThreadPoolExecutor(1))
    loading = pool.submit(_load_inputs, config, plan, folder)
    from cluster.ray_start import start_ray
    from cluster.start import Processes
    from cluster.system import System

    system = System(Processes(config, plan, folder, code, temp, pids))
    system.tell = lambda text, kind, names: console.always(text)
    stack.callback(system.close)
    start_ray(config, plan, folder, temp)
    inputs = loading.result()
    base = base_manifest(config, plan, inputs, code)
    if opening.checkpoint is not None:
        check_inputs(opening.checkpoint.manifest, inputs, base.model)
    system.launch(inputs.model)
    from cluster.run.generation import Generation
    from cluster.run.journal import Journal
    from cluster.run.learning import Learning
    from cluster.run.metrics import EventLog, MetricsLog
    from cluster.run.recording import Recording
    from cluster.run.speed import known_machine
    from cluster.run.stages import Run
    from cluster.run.tracing import Tracer
    from cluster.scorer_pool import ScorerPool

    tracer = Tracer(config.trace_round, folder, console.line)
    scorer = ScorerPool(config.reward, inputs.scoring, folder.logs / "scorer.log")
    scorer.timeline = tracer.scorer
    stack.callback(scorer.close)
    journal = stack.enter_context(Journal(folder.path))
    for note in inputs.notes:
        console.line(f"note       {note}")
    console.line(f"started    {plan.engines} engine(s) and {plan.ranks} rank(s) in {time.monotonic() - began:.1f} s")
    events = EventLog(folder.path)
    learning = Learning(system, opening.store, console.always)
    system.recover = learning.rebuild
    commits = Commits(
        store=opening.store,
        base=base,
        learners=learning,
        every=config.checkpoint.every,
        rounds=config.rounds,
        parameters=sum(math.prod(shape) for shape in system.shapes.values()),
        say=console.always,
        events=events,
    )
    if opening.checkpoint is None:
        commits.start(inputs.prompts.state())
    events = EventLog(folder.path)
    first_round = 0 if opening.checkpoint is None else opening.checkpoint.manifest.round + 1
    trackers = Trackers(choose_trackers(config.tracker), folder.path, events, first_round=first_round)
    stack.callback(trackers.close)
    generation = Generation(
        config, plan, system, inputs.prompts, scorer, journal, console, stop_token_ids=inputs.stop_token_ids
    )
    recording = Recording(
        config, plan, system, journal, console, MetricsLog(folder.path), events, trackers, commits, tracer.driver
    )
    run = Run(
        config,
        plan,
        folder,
        system,
        console,
        generation,
        recording,
        learning,
        inputs.held_out,
        inputs.tokenizer,
        tracer,
    )
    recording.machine = known_machine(
        inputs.model,
        {name: str(about["gpu"]) for name, about in system.processes.abouts.items()},
        engine_dtype=plan.engine_dtype,
        learner_dtype=plan.learner_dtype,
        tensor_parallel=config.rollout.tensor_parallel,
        adapter=config.learner.lora_rank > 0,
    )
    system.tell = run.happened
    console.states = system.care.fleet.states
    if opening.checkpoint is not None:
        restore(run, opening.checkpoint)
    return run


def _load_inputs(config: Config, plan: Plan, folder: RunFolder) -> Inputs:
    from cluster.reward_check import require_sound_reward
    from cluster.run.inputs import load_inputs

    inputs = load_inputs(config, plan, folder.path / "prepared")
    # A reward that pays for nothing is found here, before any model is loaded.
    require_sound_reward(config.reward, inputs.scoring, inputs.in_order)
    return inputs


def _code(folder: RunFolder) -> int:
    return RESUMABLE if (folder.path / "checkpoints" / "LATEST").exists() else NOT_RESUMABLE


def _what_is_left(folder: RunFolder) -> str:
    if _code(folder) == RESUMABLE:
        return f"continue with: python launch.py resume {folder.path}"
    return f"no round was committed; the directory {folder.path} can be read"
