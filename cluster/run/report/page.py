"""Putting the report together: one HTML file with its style, its scripts, its data and nothing from outside.

Model text is data: it stands in a JSON block in which nothing can end the block, reaches the page as text nodes only,
and the page's own policy (Content-Security-Policy) lets no script run but those that are named by their hash.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cluster.run.cli import version
from cluster.run.report.charts import charts_for
from cluster.run.report.collect import RunRecord, read_runs
from cluster.run.report.columns import rounds_per_point, run_columns
from cluster.run.report.groups import browse, follow
from cluster.run.report.summary import summarise

_BUDGET = 5_000_000
"""Characters of model text in a report; with curves and the plotting library a file stays under about 8 MB."""
_MOST_EVENTS = 300
_SCRIPTS = ("text.js", "hover.js", "curves.js", "groups.js", "page.js")


def build_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, and return the file.

    Without `out` it is `report.html` in the run, or `comparison.html` beside the first of several.
    """
    folders = [Path(run) for run in runs]
    records = read_runs(folders)
    if out is None:
        out = folders[0] / "report.html" if len(folders) == 1 else folders[0].resolve().parent / "comparison.html"
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.write_text(render(report_data(records)), encoding="utf-8")
    os.replace(temporary, out)
    return out


def report_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything the page shows, as JSON."""
    runs = [_run_data(record, _BUDGET // len(records)) for record in records]
    return {
        "made": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "rollearn": version(),
        "charts": charts_for(key for run in runs for key in run["columns"]),
        "runs": runs,
        "settings": _settings_table(records),
    }


def render(data: dict[str, Any]) -> str:
    """The page with its data."""
    assets = files("cluster.run.report") / "assets"
    scripts = [*_bokeh(), *((assets / name).read_text("utf-8") for name in _SCRIPTS)]
    pieces = {
        "%POLICY%": " ".join(f"'sha256-{_sha256(script)}'" for script in scripts),
        "%STYLE%": (assets / "page.css").read_text("utf-8"),
        "%DATA%": as_json_block(data),
        "%SCRIPTS%": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    template = (assets / "page.html").read_text("utf-8")
    # In one pass, so that nothing in the data is taken for a mark.
    return "".join(pieces.get(piece, piece) for piece in re.split("(%[A-Z]+%)", template))


def as_json_block(data: Any) -> str:
    """JSON that no text in it can break out of, whatever a browser makes of its surroundings."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _run_data(record: RunRecord, budget: int) -> dict[str, Any]:
    return {
        "name": record.name,
        "summary": summarise(record),
        "columns": run_columns(record),
        "per_point": rounds_per_point(record),
        "findings": [
            {
                "id": each.id,
                "severity": each.severity,
                "since": each.since_round,
                "evidence": dict(each.evidence),
                "cause": each.cause,
                "cure": each.cure,
            }
            for each in record.findings
        ],
        "skipped": [[each.id, list(each.missing)] for each in record.skipped],
        "events": [_event(row) for row in record.events[-_MOST_EVENTS:]],
        "events_of": len(record.events),
        "differences": [[each.name, _text(each.preset), _text(each.run)] for each in record.differences],
        "preset": str(record.settings.get("preset", "")),
        "settings": {name: _text(value) for name, value in record.settings.items()},
        "plan": record.plan,
        "versions": dict(record.versions),
        "groups": browse(record, int(budget * 0.88)),
        "followed": follow(record, int(budget * 0.12)),
    }


def _settings_table(records: Sequence[RunRecord]) -> list[list[Any]]:
    """Settings in which the runs differ: name, then the value in each run."""
    names = dict.fromkeys(name for record in records for name in record.settings)
    table = [[name, *(_text(record.settings.get(name, "–")) for record in records)] for name in names if name != "run"]
    return [row for row in table if len(set(row[1:])) > 1]


def _event(row: dict[str, Any]) -> dict[str, str]:
    details = {key: value for key, value in row.items() if key not in ("time", "round", "kind")}
    told = ", ".join(f"{key} {each if isinstance(each, str) else json.dumps(each)}" for key, each in details.items())
    head = {key: "" if row.get(key) is None else str(row.get(key)) for key in ("time", "round", "kind")}
    return {**head, "details": told[:1000]}


def _text(value: Any) -> str:
    """A setting for people; what is not set is decided by the plan or the model directory."""
    return "auto" if value is None or value == "None" else str(value)


def _bokeh() -> list[str]:
    """The plotting library as scripts, from the installed package."""
    from bokeh.resources import Resources

    return list(Resources(mode="inline", minified=True, log_level="error", components=["bokeh", "bokeh-api"]).js_raw)


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode()
