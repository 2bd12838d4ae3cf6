"""The doctor: from metric rows to a diagnosis. Pure, cheap enough to run after every round.

`diagnose(rows)` applies every rule of `cluster/run/rules/` whose metrics are logged; `skipped_rules(rows)` names the
others. Rows are those of metrics.jsonl, or of another system's log read through `cluster.run.logs.read_log`.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.run.findings import (
    Finding,
    Severity,
    Skipped,
    findings_as_json,
    findings_as_text,
    ranked,
    worst_severity,
)
from cluster.run.rules import all_rules
from cluster.run.series import Limits, Row, RunView

__all__ = [
    "Finding",
    "Limits",
    "Severity",
    "Skipped",
    "diagnose",
    "findings_as_json",
    "findings_as_text",
    "new_findings",
    "skipped_rules",
    "worst_severity",
]


def diagnose(rows: Sequence[Row], limits: Limits | None = None) -> list[Finding]:
    """Every failure mode that the rows show, worst first; empty when the run looks healthy."""
    if not rows:
        return []
    view = RunView(rows, limits or Limits())
    findings = (rule.finding(view) for rule in all_rules() if not rule.missing(view))
    return ranked([finding for finding in findings if finding is not None])


def skipped_rules(rows: Sequence[Row], limits: Limits | None = None) -> list[Skipped]:
    """The failure modes that were not looked for, and the metrics each of them needs."""
    view = RunView(rows, limits or Limits())
    missing = ((rule.id, rule.missing(view)) for rule in all_rules())
    return [Skipped(name, keys) for name, keys in missing if keys]


def new_findings(before: Sequence[Finding], now: Sequence[Finding]) -> list[Finding]:
    """What a live view has to say: findings that are not among those of earlier rounds, or have become worse.

    Give all findings said so far: one that goes and comes back (a plateau) is then said once.
    """
    known = {(finding.id, finding.severity) for finding in before}
    return [finding for finding in now if (finding.id, finding.severity) not in known]
