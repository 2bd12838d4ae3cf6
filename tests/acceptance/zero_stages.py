"""Every ZeRO stage with two ranks and two engines completes two rounds and agrees with its engines.

.venv/bin/python tests/acceptance/zero_stages.py RUNS_DIR
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Print a line per stage."""
    for stage in range(4):
        folder = Path(sys.argv[1]) / f"zero-{stage}"
        words = ["--rollouts", "256", "--rounds", "2", "--rollout.engines", "2", "--learner.ranks", "2"]
        words += ["--learner.zero-stage", str(stage), "--run", str(folder), "--quiet", "--eval.every", "0"]
        done = subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], capture_output=True, text=True)
        if done.returncode != 0:
            sys.stdout.write(f"ZeRO {stage}: exit {done.returncode}\n{done.stderr}\n")
            return 1
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        sys.stdout.write(f"ZeRO {stage}: {len(rows)} rounds, largest mismatch {rows[-1]['mismatch/max']:.1e}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
