"""The main command on the demo, for several seeds: what it must reach, as a table. Minutes per seed on two cores.

.venv/bin/python tests/acceptance/main_command.py RUNS_DIR [SEED ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    """One run of the main command; what it came to."""
    began = time.monotonic()
    words = ["--rollouts", "8192", "--minibatches", "16", "--seed", str(seed), "--run", str(folder), "--quiet"]
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"seed {seed}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "eval/correctness" in row]
    memory = {key: rows[-1][key] / rows[3][key] - 1 for key in rows[-1] if key.startswith("memory/")}
    return {
        "seed": seed,
        "before": measured[0]["eval/correctness"],
        "after": measured[-1]["eval/correctness"],
        "format": measured[-1]["eval/format"],
        "curve": [round(row["eval/correctness"], 3) for row in measured],
        "mismatch": max(row["mismatch/max"] for row in rows[1:]),
        "memory": max(memory.values()),
        "sync": max(row["sync/seconds"] / row["time/round"] for row in rows[1:]),
        "round": sorted(row["time/round"] for row in rows[1:])[len(rows) // 2],
        "minutes": (time.monotonic() - began) / 60,
        "passed": measured[0]["eval/correctness"] < 0.30
        and measured[-1]["eval/correctness"] >= 0.75
        and measured[-1]["eval/format"] > 0.95,
    }


def main() -> int:
    """Print a line per seed; exit 1 when one fell short."""
    seeds = [int(word) for word in sys.argv[2:]] or [0, 1, 2]
    passed = True
    for seed in seeds:
        result = run_seed(Path(sys.argv[1]) / f"seed-{seed}", seed)
        passed = passed and result["passed"]
        sys.stdout.write(
            f"seed {seed}: held-out {result['before']:.3f} -> {result['after']:.3f}, format {result['format']:.3f}, "
            f"largest mismatch {result['mismatch']:.1e}, memory from round 3 to 12 {result['memory']:+.1%}, "
            f"sync {result['sync']:.1%} of a round at most, median round {result['round']:.1f} s, "
            f"{result['minutes']:.1f} min in all: {'passed' if result['passed'] else 'FELL SHORT'}\n"
            f"  {result['curve']}\n"
        )
        sys.stdout.flush()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
