"""Memory over many rounds, of very large rounds and of long responses; and the time of cheap rounds. Prints a table.

.venv/bin/python tests/acceptance/memory_and_rate.py RUNS_DIR [many large long]
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def main() -> int:
    """Run what was asked for."""
    runs = Path(sys.argv[1])
    parts = {"many": many_rounds, "large": large_rounds, "long": long_responses}
    for name in sys.argv[2:] or parts:
        sys.stdout.write(parts[name](runs) + "\n")
        sys.stdout.flush()
    return 0


def many_rounds(runs: Path) -> str:
    """200 cheap rounds: resident memory of every process at round 3 and at the end, seconds per round."""
    rows = run(runs / "many", "--rollouts", "8", "--rounds", "200", "--eval.every", "0")
    lines = [f"200 rounds of 8: median {statistics.median(r['time/round'] for r in rows[2:]):.3f} s per round"]
    for key in sorted(key for key in rows[-1] if key.startswith("memory/")):
        first, last = rows[2][key], rows[-1][key]
        lines.append(f"  {key:<20} {first / MIB:8.0f} -> {last / MIB:8.0f} MiB   {last / first - 1:+.2%}")
    return "\n".join(lines)


def large_rounds(runs: Path) -> str:
    """One round of 8,192 and one of 65,536 responses: what the driver holds, and the time per response."""
    lines = ["one round of n responses:  driver      time per 1,000 responses"]
    for rollouts in (8192, 65536):
        row = run(runs / f"large-{rollouts}", "--rollouts", str(rollouts), "--rounds", "1", "--eval.every", "0")[-1]
        per_thousand = row["time/round"] / rollouts * 1000
        lines.append(f"  {rollouts:>10} {row['memory/driver'] / MIB:15.0f} MiB {per_thousand:12.2f} s")
    return "\n".join(lines)


def long_responses(runs: Path) -> str:
    """Responses of exactly 1,024 tokens against 32: what a round costs beside the engines and the learner alone."""
    lines = ["256 responses of n tokens:  engines + learner alone      round"]
    for tokens in (32, 1024):
        folder, figures = runs / f"long-{tokens}", runs / f"long-{tokens}.json"
        shutil.rmtree(folder, ignore_errors=True)
        words = ["bench", "--rollouts", "256", "--max-new-tokens", str(tokens), "--fixed-length", "--run", str(folder)]
        subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), *words, "--json", str(figures)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(figures.read_text())
        lines.append(f"  {tokens:>6} {found['limit']:36.2f} s {found['round']:8.2f} s")
    return "\n".join(lines)


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """One run; its rows, row 0 left out."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, str(ROOT / "launch.py"), *words, "--quiet", "--run", str(folder)], check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["round"] > 0]


if __name__ == "__main__":
    sys.exit(main())
