"""What the doctor says: a Finding, and how findings are written for people (text) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")


@dataclass(frozen=True, slots=True)
class Finding:
    """One failure mode that the metrics show."""

    id: str
    """Name of the failure mode (CONTRACT: Doctor)."""
    severity: Severity
    """info explains, warning asks for a look, critical means that the run is not learning what it should."""
    since_round: int
    """Round in which it began, as far as the metrics tell."""
    evidence: Mapping[str, str]
    """Metric name -> what it did, with values; the names say which curves to look at."""
    cause: str
    """Why this happens."""
    cure: str
    """What to do, most likely cure first."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A rule that could not be applied because the log lacks what it reads."""

    id: str
    """Name of the failure mode that was not looked for."""
    missing: tuple[str, ...]
    """What it needs; alternatives are joined by ` or `."""


def worst_severity(findings: Sequence[Finding]) -> Severity | None:
    """The highest severity among the findings, None when there are none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=None)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first, then the one that began earlier: the first is usually the cause of the others."""
    return sorted(findings, key=lambda finding: (-SEVERITIES.index(finding.severity), finding.since_round, finding.id))


def findings_as_text(findings: Sequence[Finding], skipped: Sequence[Skipped] = ()) -> str:
    """Findings for a terminal, without markup; `skipped` adds what was not looked for."""
    blocks = []
    for finding in ranked(findings):
        lines = [f"{finding.severity.upper()}  {finding.id}, since round {finding.since_round}"]
        lines += [f"    {name}: {seen}" for name, seen in finding.evidence.items()]
        lines += [f"  why: {finding.cause}", f"  do:  {finding.cure}"]
        blocks.append("\n".join(lines))
    if not blocks:
        blocks.append("Nothing found: no known failure mode shows in these metrics.")
    if skipped:
        lines = [f"    {each.id}: needs {', '.join(each.missing)}" for each in skipped]
        blocks.append("\n".join(["Not looked for, because the log lacks the metrics:", *lines]))
    return "\n\n".join(blocks) + "\n"


def findings_as_json(findings: Sequence[Finding], skipped: Sequence[Skipped] = ()) -> str:
    """Findings for a program: `{"findings": [...], "skipped": [...]}`, worst first, ASCII only."""
    document = {
        "findings": [asdict(finding) for finding in ranked(findings)],
        "skipped": [{"id": each.id, "missing": list(each.missing)} for each in skipped],
    }
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"
