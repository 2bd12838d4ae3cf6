"""One lesson end to end, as it is typed: it trains through the ordinary loop and says what came out of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system


def test_the_lesson_format_hack_shows_its_outcome_and_the_doctor_names_it(tmp_path: Path) -> None:
    run, report = tmp_path / "hack", tmp_path / "hack.json"
    words = ["lesson", "format-hack", "--run", str(run), "--json", str(report)]
    command = [sys.executable, str(ROOT / "launch.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert result["shown"], result["said"]
    assert result["doctor_right"], result["findings"]
    assert "format-hacked names it" in " ".join(done.stdout.split())
    assert "launch.py lesson format-hack --healthy --seed 0" in done.stdout
    # What is said is what stands in the run's own files.
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "eval/format" in row]
    form = next(each for each in result["figures"] if each["what"] == "held-out format")
    assert (form["before"], form["after"]) == (measured[0]["eval/format"], measured[-1]["eval/format"])
