"""Every preset completes two rounds of the real loop on the demo, at small size, as a table. Half a minute per preset.

.venv/bin/python tests/acceptance/presets.py RUNS_DIR [PRESET ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from learner.variants import PRESETS  # noqa: E402  (the script may be started from anywhere)

ROUNDS = 2
SMALL = ["--rounds", str(ROUNDS), "--eval.every", "0", "--rollout.engines", "1", "--learner.ranks", "1", "--quiet"]
SIZE = ["--rollouts", "64", "--group-size", "8", "--minibatches", "2"]


def run_preset(folder: Path, name: str) -> dict[str, Any]:
    """Two rounds of one preset; presets that bring the size of a round keep it."""
    size = [] if "rollouts" in PRESETS[name].settings else SIZE
    began = time.monotonic()
    words = ["--preset", name, *SMALL, *size, "--run", str(folder / name)]
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], capture_output=True, text=True)
    result: dict[str, Any] = {"preset": name, "exit": done.returncode, "seconds": time.monotonic() - began}
    if done.returncode != 0:
        return result | {"passed": False, "said": (done.stderr or done.stdout).strip()[-400:]}
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    skipped = sum(row["policy/skipped_steps"] for row in rows)
    fine = [row["round"] for row in rows] == list(range(1, ROUNDS + 1)) and skipped == 0
    fine = fine and all(row["sync/receipt_ok"] == 1.0 for row in rows)
    last = rows[-1]
    kl = f", KL {last['policy/kl']:.2e}" if "policy/kl" in last else ""
    said = (
        f"{last['responses']} responses and {len(last['steps'])} step(s) per round, loss {last['policy/loss']:+.4f}, "
        f"gradient norm {last['policy/grad_norm']:.3f}, largest ratio {last['policy/ratio_max']:.3f}{kl}"
    )
    return result | {"passed": fine, "said": said}


def main() -> int:
    """Print a line per preset; exit 1 when one fell short."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(PRESETS)
    fine = True
    for name in names:
        result = run_preset(folder, name)
        fine = fine and result["passed"]
        sys.stdout.write(
            f"{name:<16}{'passed' if result['passed'] else 'FELL SHORT':<12}exit {result['exit']}  "
            f"{result['seconds']:>4.0f} s  {result['said']}\n"
        )
        sys.stdout.flush()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
