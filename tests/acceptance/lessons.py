"""Every lesson and its healthy twin, for several seeds: outcome, the doctor's verdict and seconds, as a table.

.venv/bin/python tests/acceptance/lessons.py RUNS_DIR [--lessons NAME ...] [--seeds N ...]

One or two minutes per run on two quiet cores; exit 1 when one did not show its outcome or the doctor was wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LESSONS = ("clip", "kl-collapse", "format-hack")
LONGEST = 360.0
"""Seconds one run may take."""


def run_twin(folder: Path, lesson: str, seed: int, *, healthy: bool) -> dict[str, Any]:
    """One run of one twin, through the command line; what it wrote about itself, and how long it took."""
    name = f"{lesson}{'-healthy' if healthy else ''}-{seed}"
    report, run = folder / f"{name}.json", folder / name
    words = ["lesson", lesson, "--seed", str(seed), "--run", str(run), "--json", str(report), "--quiet"]
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "launch.py"), *words, *(["--healthy"] if healthy else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{name}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    (folder / f"{name}.txt").write_text(done.stdout)
    result: dict[str, Any] = json.loads(report.read_text())
    return result | {"seconds": time.monotonic() - began}


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    loud = [each["id"] for each in result["findings"] if each["severity"] != "info"]
    figures = ", ".join(f"{each['what']} {each['before']:.3g} -> {each['after']:.3g}" for each in result["figures"][:3])
    return (
        f"{result['lesson']:<12}{result['twin']:<8}seed {result['seed']}  {result['seconds']:>4.0f} s  "
        f"{'shown' if result['shown'] else 'NOT SHOWN':<10}doctor {'right' if result['doctor_right'] else 'WRONG'} "
        f"({', '.join(loud) or 'nothing'})  {figures}\n"
    )


def passed(result: dict[str, Any]) -> bool:
    """Whether a run did what its lesson promises."""
    return bool(result["shown"] and result["doctor_right"] and result["seconds"] <= LONGEST)


def main() -> int:
    """Print a line per run; exit 1 when one fell short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--lessons", nargs="+", default=LESSONS, choices=LESSONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    asked = parser.parse_args()
    asked.runs.mkdir(parents=True, exist_ok=True)
    fine = True
    for lesson in asked.lessons:
        for seed in asked.seeds:
            for healthy in (False, True):
                result = run_twin(asked.runs, lesson, seed, healthy=healthy)
                fine = fine and passed(result)
                sys.stdout.write(line(result))
                sys.stdout.flush()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
