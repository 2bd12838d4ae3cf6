"""The verbs of the loop in launch.py, bound to one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster import faults
from cluster.plan import Plan
from cluster.run.config import Config
from cluster.run.console import Console, summary
from cluster.run.credit import advantages_of, batch_of
from cluster.run.exporting import save_tokenizer
from cluster.run.folder import RunFolder
from cluster.run.generation import Generation
from cluster.run.recording import Recording
from cluster.run.round import Round
from cluster.run.rows import update_metrics
from cluster.start import System
from cluster.waiting import ActorLost
from learner.types import Batch, UpdateReport
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
    held_out: Sequence[Prompt]
    tokenizer: Any

    def rounds(self) -> Iterator[Round]:
        """The rounds that are still to do."""
        for number in range(self.weights_version + 1, self.config.rounds + 1):
            yield Round(number)

    @property
    def weights_version(self) -> int:
        """Completed rounds behind the learner's weights."""
        return self.recording.metrics.last_round or 0

    def sync(self, version: int) -> dict[str, Any]:
        """Give the engines the learner's weights; metrics of the sync."""
        self.console.phase("sync", round_=version)
        faults.reach("sync.send", 0, version)
        report = self.system.sync(version)
        return {"sync/seconds": report.seconds, "sync/receipt_ok": 1.0}

    def next_requests(self, turn: Round) -> list[GroupRequest]:
        """The groups of the round: prompts drawn, each assigned to its minibatch before anything is generated."""
        return self.generation.requests(turn)

    def generate_and_score(self, turn: Round, requests: Sequence[GroupRequest]) -> list[ScoredGroup]:
        """Scored groups in the order of the requests, all of them journalled."""
        return self.generation.scored_groups(turn, requests)

    def build_batch(self, turn: Round, groups: Sequence[ScoredGroup]) -> Batch:
        """Advantages on whole groups, before any split; the batch of the round."""
        faults.reach("pack", 0, turn.number)
        turn.advantages = advantages_of(self.config, groups)
        return batch_of(self.config, self.plan, groups, turn.advantages)

    def update(self, turn: Round, batch: Batch) -> UpdateReport:
        """One optimizer step per minibatch."""
        self.console.phase("learn", total=self.plan.steps_per_round)
        report = self.system.learners.update(batch, lambda done: self.console.advance(done, "steps"))
        turn.row |= update_metrics(report) | {
            "time/learn": report.seconds_learn,
            "time/old_logprobs": report.seconds_old_logprobs,
        }
        return report

    def record(self, turn: Round, groups: Sequence[ScoredGroup]) -> None:
        """Commit the round, then look at its numbers."""
        self.recording.round(turn, groups)

    def evaluate(self, turn: Round) -> None:
        """Held-out accuracy with the weights the engines hold now; into the row of the round."""
        every = self.config.eval.every
        due = every and (turn.number % every == 0 or turn.number == self.config.rounds)
        if due and self.held_out:
            turn.row |= self.evaluation(turn.number)

    def evaluate_start(self) -> None:
        """Row 0: evaluation before any update."""
        if self.config.eval.every and self.held_out and not self.recording.rows:
            row = {"round": 0, "weights_version": 0} | self.evaluation(0)
            self.recording.write(row)

    def evaluation(self, round_: int) -> dict[str, Any]:
        """Metrics of one evaluation."""
        began = time.monotonic()
        self.console.phase("evaluate", total=len(self.held_out))
        groups = self.generation.held_out(self.held_out)
        self.recording.journal.keep_evaluation(round_, groups)
        return evaluate_groups(groups, final_answer).metrics() | {"time/eval": time.monotonic() - began}

    def finish(self) -> None:
        """Save the trained model in Hugging Face format, and say how the run went."""
        self.console.phase("saving the model")
        self.system.learners.export(self.folder.model, 300.0)
        save_tokenizer(self.tokenizer, self.system.model, self.folder.model)
        self.console.close()
        self.console.always(summary(self.recording.rows, self.folder.path))

    def engine_lost(self, lost: ActorLost) -> None:
        """Say that an engine is replaced, and why: it costs time, and a second time it may be a fault of the model."""
        self.recording.events.append("engine_lost", engine=lost.name, reason=lost.reason, hung=lost.hung)
        self.console.always(f"{lost.name} is replaced, its unfinished groups are generated again: {lost.reason}")
