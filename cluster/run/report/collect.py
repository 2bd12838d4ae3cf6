"""Everything a run directory says about a run, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.run.doctor import diagnose, skipped_rules
from cluster.run.findings import Finding, Skipped
from cluster.run.manifest import Damaged, Manifest, round_of
from cluster.run.metrics import Row, read_events, read_metrics
from cluster.run.saved_config import Difference, preset_differences, saved_settings
from cluster.run.series import Limits
from rollout.types import UserError


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as the report sees it."""

    name: str
    """Name to show; unique within the report."""
    folder: Path
    """Run directory."""
    rows: list[Row]
    """Rows of metrics.jsonl."""
    events: list[Row]
    """Rows of events.jsonl."""
    settings: Mapping[str, Any]
    """Resolved configuration by dotted name."""
    differences: list[Difference]
    """Settings that are not the preset's."""
    findings: list[Finding]
    """What the doctor says, worst first."""
    skipped: list[Skipped]
    """What it could not look for."""
    plan: str
    """plan.txt, or empty."""
    versions: Mapping[str, str]
    """Library -> version, as the newest checkpoint names them; empty without a checkpoint."""

    @property
    def group_size(self) -> int:
        """Responses per prompt."""
        given = self.settings.get("group_size")
        if isinstance(given, int):
            return given
        sizes = [int(row["responses"]) for row in self.rows if row.get("responses")]
        return min(16, sizes[0]) if sizes else 16


def read_runs(folders: list[Path]) -> list[RunRecord]:
    """Read the runs; names that occur twice get their parent directory's name in front."""
    names = [folder.resolve().name for folder in folders]
    unique = [
        f"{folder.resolve().parent.name}/{name}" if names.count(name) > 1 else name
        for folder, name in zip(folders, names, strict=True)
    ]
    twice = sorted({name for name in unique if unique.count(name) > 1})
    if twice:
        raise UserError(f"The same run was given twice: {', '.join(twice)}.")
    return [_read_run(folder, name) for folder, name in zip(folders, unique, strict=True)]


def _read_run(folder: Path, name: str) -> RunRecord:
    if not folder.is_dir():
        raise UserError(f"{folder} is no run directory: give one that `launch.py` made, such as runs/<time>-grpo.")
    rows = read_metrics(folder)
    settings = saved_settings(folder)
    plan, limits = folder / "plan.txt", limits_of(settings)
    return RunRecord(
        name=name,
        folder=folder,
        rows=rows,
        events=read_events(folder),
        settings=settings,
        differences=preset_differences(settings),
        findings=diagnose(rows, limits),
        skipped=skipped_rules(rows, limits) if rows else [],
        plan=plan.read_text(errors="replace") if plan.exists() else "",
        versions=_versions(folder / "checkpoints"),
    )


def limits_of(settings: Mapping[str, Any]) -> Limits:
    """What the configuration promises, for the doctor."""
    length, lag = settings.get("rollout.max_new_tokens"), settings.get("cluster.max_lag")
    if settings.get("cluster.schedule", "async") != "async":
        lag = 0  # the others allow none, whatever the option says
    return Limits(
        max_lag=lag if isinstance(lag, int) else Limits().max_lag,
        max_length=length if isinstance(length, int) else None,
    )


def _versions(checkpoints: Path) -> dict[str, str]:
    """From the newest manifest that is whole; a report needs no checkpoint that could be resumed."""
    found = ((round_of(file.parent.name), file) for file in checkpoints.glob("*/manifest.json"))
    for _, file in sorted(((number, file) for number, file in found if number is not None), reverse=True):
        try:
            return dict(Manifest.from_bytes(file.read_bytes()).versions)
        except Damaged:
            continue
    return {}
