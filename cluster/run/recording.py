"""What a run writes down about a round, when the round counts, and what the doctor says to it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.errors import BrokenPromise
from cluster.plan import Plan
from cluster.run.commits import Commits
from cluster.run.config import Config
from cluster.run.console import Console
from cluster.run.doctor import Limits, diagnose, new_findings
from cluster.run.findings import Finding
from cluster.run.journal import Journal
from cluster.run.metrics import EventLog, MetricsLog
from cluster.run.round import Round
from cluster.run.rows import dropped_metrics, rollout_metrics, update_metrics, version_metrics
from cluster.run.rules import all_rules
from cluster.run.speed import Machine, tokens_per_second, utilisation
from cluster.run.trackers import Trackers
from cluster.system import System
from cluster.timeline import Timeline
from learner.types import joined

MAX_SKIPPED_IN_A_ROW = 3


class DoctorStop(BrokenPromise):
    """A finding stopped the run, as --doctor.stop-on asked."""


@dataclass
class Recording:
    """Rows, commits and findings of one run."""

    config: Config
    plan: Plan
    system: System
    journal: Journal
    console: Console
    metrics: MetricsLog
    events: EventLog
    trackers: Trackers
    commits: Commits
    timeline: Timeline = field(default_factory=lambda: Timeline(on=False))
    machine: Machine | None = None
    """What utilisation is measured against, where that is known."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    _recorded: float = field(default_factory=time.monotonic)
    """When the round before was recorded."""

    def __post_init__(self) -> None:
        """The doctor's rules are loaded now, not in the first round."""
        all_rules()

    def round(self, turn: Round) -> None:
        """Commit the round (see commits.py for the order), then look at its numbers."""
        # Rounds overlap under some schedules; of each counts what came after the one before.
        began, self._recorded = max(turn.started, self._recorded), time.monotonic()
        report = joined(turn.reports)
        versions = version_metrics(turn.number, turn.trained, behind=self.plan.max_lag > 0)
        turn.row = (
            {"round": turn.number}
            | versions
            | rollout_metrics(turn.trained, np.concatenate(turn.advantages))
            | update_metrics(report, behind=versions["weights_version"] < turn.number - 1)
            | {"time/learn": report.seconds_learn, "time/old_logprobs": report.seconds_old_logprobs}
            | turn.row
            | dropped_metrics(turn.dropped_by_reason())
            | {
                "fleet/restarts": self.system.pool.restarts,
                "grader/errors": turn.dropped_by_reason()["grader_error"],
                "time/round": self._recorded - began,
                "time/watch": self.console.watch.take(),
            }
        )
        turn.row |= self._speed(turn)
        with self.timeline.span("groups to disk"):
            self._compact(turn)
        self.write(turn.row)
        self._check_skipped()
        score = turn.row.get("eval/correctness")
        with self.timeline.span("checkpoint"):
            committed = self.commits.after(turn.number, self.metrics.offset, turn.prompts, score)
        if committed:
            self.journal.retire(turn.number)
        with self.timeline.span("doctor"), self.console.watch:
            self._diagnose(turn.number)
            for name in self.trackers.check(turn.number):
                self.console.always(f"the tracker {name} has ended; the run goes on (see events.jsonl)")

    def _speed(self, turn: Round) -> dict[str, float]:
        return tokens_per_second(turn.row) | utilisation(
            turn.row,
            self.machine,
            turn.trained,
            np.concatenate(turn.advantages),
            reference=self.config.kl.kind != "none",
            recomputed=self.plan.old_logprobs == "recompute",
        )

    def write(self, row: dict[str, Any]) -> None:
        """One more row of metrics."""
        with self.console.watch:
            self.metrics.append(row)
            self.rows.append(row)
            self.console.row(row)

    def _check_skipped(self) -> None:
        flags = [step["skipped"] for row in self.rows[-4:] for step in row.get("steps", [])]
        if len(flags) >= MAX_SKIPPED_IN_A_ROW and all(flags[-MAX_SKIPPED_IN_A_ROW:]):
            raise BrokenPromise(
                f"the last {MAX_SKIPPED_IN_A_ROW} optimizer steps were not finite on some rank and skipped on all. "
                f"Lower --learner.lr, or look for extreme rewards in the last rounds of the report."
            )

    def _compact(self, turn: Round) -> None:
        ends = np.cumsum([len(scored.total) for scored in turn.trained])[:-1]
        parts = np.split(np.concatenate(turn.advantages), ends)
        advantages = {scored.group.request.key: part for scored, part in zip(turn.trained, parts, strict=True)}
        dropped = {key: reason for key, (reason, _) in turn.dropped.items()}
        self.journal.compact(turn.number, advantages, dropped=dropped, keep_journal=True)

    def _diagnose(self, round_: int) -> None:
        plan = self.plan
        limits = Limits(max_lag=plan.max_lag, max_length=plan.max_new_tokens, vocabulary=plan.model.vocab_size or None)
        fresh = new_findings(self.findings, diagnose(self.rows, limits))
        self.findings.extend(fresh)  # all that was said: what comes and goes is said once
        for finding in fresh:
            self.events.append("finding", round=round_, finding=dataclasses.asdict(finding))
            self.console.finding(finding)
        if self.config.doctor.stop_on == "critical" and any(finding.severity == "critical" for finding in fresh):
            raise DoctorStop(f"the doctor found something critical in round {round_}: {fresh[0].id}\n  {fresh[0].cure}")
