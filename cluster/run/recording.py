"""What a run writes down about a round, when the round counts, and what the doctor says to it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
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
from cluster.run.rows import dropped_metrics, rollout_metrics
from cluster.run.trackers import Trackers
from cluster.start import System
from rollout.stream import PromptStream
from rollout.types import ScoredGroup

MAX_SKIPPED_IN_A_ROW = 3


class DoctorStop(BrokenPromise):
    """A finding stopped the run, as --doctor.stop-on asked."""


@dataclass
class Recording:
    """Rows, commits and findings of one run."""

    config: Config
    plan: Plan
    system: System
    prompts: PromptStream
    journal: Journal
    console: Console
    metrics: MetricsLog
    events: EventLog
    trackers: Trackers
    commits: Commits
    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def round(self, turn: Round, groups: Sequence[ScoredGroup]) -> None:
        """Commit the round (see commits.py for the order), then look at its numbers."""
        assert turn.advantages is not None
        turn.row = (
            {"round": turn.number, "weights_version": turn.number - 1}
            | rollout_metrics(groups, turn.advantages)
            | turn.row
            | dropped_metrics(turn.dropped_by_reason())
            | {f"memory/{name}": size for name, size in self.system.memory().items()}
            | {
                "fleet/restarts": self.system.pool.restarts,
                "grader/errors": turn.dropped_by_reason()["grader_error"],
                "time/round": time.monotonic() - turn.started,
            }
        )
        self._compact(turn, groups)
        self.write(turn.row)
        self._check_skipped()
        score = turn.row.get("eval/correctness")
        if self.commits.after(turn.number, self.metrics.offset, self.prompts.state(), score):
            self.journal.retire(turn.number)
        self._diagnose(turn.number)
        for name in self.trackers.check(turn.number):
            self.console.always(f"the tracker {name} has ended; the run goes on (see events.jsonl)")

    def write(self, row: dict[str, Any]) -> None:
        """One more row of metrics."""
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

    def _compact(self, turn: Round, groups: Sequence[ScoredGroup]) -> None:
        assert turn.advantages is not None
        parts = np.split(turn.advantages, np.cumsum([len(scored.total) for scored in groups])[:-1])
        advantages = {scored.group.request.key: part for scored, part in zip(groups, parts, strict=True)}
        dropped = {key: reason for key, (reason, _) in turn.dropped.items()}
        self.journal.compact(turn.number, advantages, dropped=dropped, keep_journal=True)

    def _diagnose(self, round_: int) -> None:
        limits = Limits(max_lag=0, max_length=self.plan.max_new_tokens, vocabulary=self.plan.model.vocab_size or None)
        fresh = new_findings(self.findings, diagnose(self.rows, limits))
        self.findings.extend(fresh)  # all that was said: what comes and goes is said once
        for finding in fresh:
            self.events.append("finding", round=round_, finding=dataclasses.asdict(finding))
            self.console.always(f"{finding.severity}: {finding.id} since round {finding.since_round}: {finding.cause}")
        if self.config.doctor.stop_on == "critical" and any(finding.severity == "critical" for finding in fresh):
            raise DoctorStop(f"the doctor found something critical in round {round_}: {fresh[0].id}\n  {fresh[0].cure}")
