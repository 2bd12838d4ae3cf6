"""The verbs of the loop in launch.py, bound to one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster import faults
from cluster.plan import Plan
from cluster.run.config import Config
from cluster.run.console import Console, summary
from cluster.run.credit import advantages_of, batch_of, probe_batch
from cluster.run.exporting import save_tokenizer
from cluster.run.folder import RunFolder
from cluster.run.generation import Generation
from cluster.run.lanes import Lanes
from cluster.run.learning import Learning
from cluster.run.recording import Recording
from cluster.run.round import Round
from cluster.run.speed import Work, idle_shares
from cluster.run.tracing import Tracer
from cluster.schedule import Schedule, Task
from cluster.system import System
from learner.types import Batch
from rollout.evaluate import evaluate_groups
from rollout.rewards.answers import final_answer
from rollout.types import GroupRequest, Prompt, ScoredGroup


@dataclass
class Run:
    """Everything one run needs between two rounds."""

    config: Config
    plan: Plan
    folder: RunFolder
    system: System
    console: Console
    generation: Generation
    recording: Recording
    learning: Learning
    held_out: Sequence[Prompt]
    tokenizer: Any
    tracer: Tracer = field(default_factory=lambda: Tracer(0))
    amend: Callable[[list[ScoredGroup]], list[ScoredGroup]] = lambda groups: groups
    """Changes groups before they are trained (only a bench does)."""
    recorded: Callable[[Round], None] = lambda turn: None
    """Told of every round that was recorded."""
    _work: Work | None = None
    """How long each process had been at work at the sync before."""
    _lanes: Lanes = field(default_factory=Lanes)
    _turns: dict[int, Round] = field(default_factory=dict)
    """Rounds that were begun and are not recorded."""

    def tasks(self) -> Iterator[Task]:
        """What the schedule starts, one after the other; between two of them, whatever was begun makes progress."""
        plan = self.plan
        groups = [plan.groups_per_minibatch] * plan.steps_per_round
        self.schedule = Schedule(plan.schedule, self.config.rounds, groups, plan.max_lag, self.weights_version)
        while not self.schedule.over:
            task = self.schedule.next()
            if task is None:
                for ended in self._lanes.advance():
                    self.tracer.ended(ended)
                    self.schedule.done(ended)
                continue
            self.tracer.begun(task)
            yield task
            if task not in self._lanes:
                self.tracer.ended(task)
                self.schedule.done(task)

    def begin(self, task: Task, work: Iterator[object]) -> None:
        """Let a task go on beside others, piece by piece."""
        self._lanes.begin(task, work)

    def turn(self, number: int) -> Round:
        """What is gathered about a round."""
        if number not in self._turns:
            self._turns[number] = Round(number)
        return self._turns[number]

    @property
    def weights_version(self) -> int:
        """Rounds recorded, which is the version of the learner's weights whenever nothing is being trained."""
        return self.recording.metrics.last_round or 0

    def sync(self, version: int) -> dict[str, Any]:
        """Give the engines the learner's weights; metrics of the sync, and memory while everybody is idle."""
        self.console.phase("sync", round_=version)
        faults.reach("sync.send", 0, version)
        report = self.learning.surely(lambda: self.system.sync(version))
        sizes, work = self.system.usage()
        memory = {f"memory/{name}": size for name, size in sizes.items()} | idle_shares(self._work, work)
        self._work = work
        self.tracer.write()  # everybody is idle: nobody is kept from work by answering
        self.tracer.align(version, self.system)
        return {"sync/seconds": report.seconds, "sync/receipt_ok": 1.0} | memory | self._compare(version)

    def _compare(self, version: int) -> dict[str, float]:
        """Engines against learner on a few fresh tokens, while both hold the same weights.

        Needed where responses are trained on other weights than sampled them: there a difference would say nothing.
        """
        if not self.plan.max_lag or version not in self._turns:
            return {}
        prompts = [request.prompt for request in self._turns[version].requests[: self.plan.engines]]
        batch = probe_batch(self.generation.probe(prompts, version), version)
        mean, largest = self.learning.surely(lambda: self.system.learners.check(batch, self.config.cluster.heartbeat))
        return {"mismatch/mean": mean, "mismatch/max": largest}

    def next_requests(self, turn: Round) -> list[GroupRequest]:
        """The groups of the round: prompts drawn, each assigned to its minibatch before anything is generated."""
        return self.generation.requests(turn)

    def generate_and_score(self, turn: Round, requests: Sequence[GroupRequest]) -> Iterator[None]:
        """Scored groups, as they are made, into `turn.kept`, all of them journalled; the schedule hears of each."""

        def settled(minibatch: int, kept: bool) -> None:
            self.schedule.settle(turn.number, minibatch, kept=kept)

        return self.generation.scored_groups(turn, requests, settled)

    def build_batch(self, turn: Round, minibatches: Collection[int]) -> Batch:
        """Advantages on whole groups, before any split; the batch of these minibatches."""
        faults.reach("pack", 0, turn.number)
        groups = self.amend(turn.groups(minibatches))
        self.recording.journal.sync(turn.number)
        turn.trained += groups
        turn.advantages.append(advantages_of(self.config, groups))
        return batch_of(self.config, self.plan, groups, turn.advantages[-1])

    def update(self, turn: Round, batch: Batch, *, first: bool) -> Iterator[None]:
        """One optimizer step per minibatch; `first`: no step of the round has been made yet."""
        before = sum(len(report.steps) for report in turn.reports)
        self.console.phase("learn", total=self.plan.steps_per_round, round_=turn.number, lane="learner")

        def progress(done: int) -> None:
            self.console.advance(before + done, "steps", "learner")

        self.system.moved_on = True
        self.system.before_learning()
        for report in self.learning.update(batch, progress, first=first):
            if report is not None:
                turn.reports.append(report)
            yield
        self.console.rest("learner")

    def record(self, turn: Round) -> None:
        """Commit the round, then look at its numbers."""
        self.recording.round(turn)
        self.tracer.ask(turn.number, turn.started, self.system)
        del self._turns[turn.number]
        self.recorded(turn)

    def evaluate(self, turn: Round) -> None:
        """Held-out accuracy with the weights the engines hold now; into the row of the round."""
        every = self.plan.eval_every
        due = every and (turn.number % every == 0 or turn.number == self.config.rounds)
        if due and self.held_out:
            turn.row |= self.evaluation(turn.number)

    def evaluate_start(self) -> None:
        """Row 0: evaluation before any update."""
        if self.plan.eval_every and self.held_out and not self.recording.rows:
            row = {"round": 0, "weights_version": 0} | self.evaluation(0)
            self.recording.write(row)

    def evaluation(self, round_: int) -> dict[str, Any]:
        """Metrics of one evaluation."""
        began = time.monotonic()
        self.console.phase("evaluate", total=len(self.held_out))
        with self.tracer.driver.span("evaluate"):
            groups = self.generation.held_out(self.held_out)
        self.recording.journal.keep_evaluation(round_, groups)
        return evaluate_groups(groups, final_answer).metrics() | {"time/eval": time.monotonic() - began}

    def finish(self) -> None:
        """Save the trained model in Hugging Face format, and say how the run went."""
        self.tracer.close()
        self.console.phase("saving the model")
        self.learning.export(self.folder.model, 300.0)
        save_tokenizer(self.tokenizer, self.system.model, self.folder.model)
        self.console.close()
        self.console.always(summary(self.recording.rows, self.folder.path))

    def happened(self, text: str, kind: str, names: tuple[str, ...]) -> None:
        """Something happened to processes: a line for people, and one in the event log."""
        self.recording.events.append(kind, names=list(names), text=text)
        self.console.always(text)
