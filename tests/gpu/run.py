"""Everything one GPU can show, in about ten minutes, as a table: python tests/gpu/run.py [--json FILE]

Each part is a run of pytest with its own time limit, so that a part that hangs takes no other with it. Ends with what a
single GPU cannot show. Exit code: 0 all passed, 1 something failed or hung, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    ("engine: bf16, sync, sleep and wake", ["tests/gpu/test_engine.py"], 120),
    ("learner: packing, pieces, parking", ["tests/gpu/test_learner.py"], 90),
    ("run: all weights", ["tests/gpu/test_runs.py", "-k", "all"], 130),
    ("run: adapter", ["tests/gpu/test_runs.py", "-k", "adapter"], 130),
    ("run: ZeRO 3, off-load", ["tests/gpu/test_runs.py", "-k", "ZeRO"], 130),
)
NEEDS_TWO = (
    "weights by NCCL broadcast (separate placement), to one engine and to several",
    "tensor-parallel engines: receipts gathered over their devices, weights and adapters cut for each",
    "ranks that share work: ZeRO 1 to 3 over NCCL, and the colocated hand-over with several of them",
    "streamed and async schedules where engines and ranks really work at the same time",
    "several nodes",
)


def main() -> int:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write results and figures to this file")
    asked = parser.parse_args()
    gpus = _gpus()
    if not gpus:
        print("There is no GPU here (nvidia-smi lists none), so there is nothing to run.")  # noqa: T201
        return 2
    results = [_run(*part) for part in PARTS]
    print(table(gpus, results))  # noqa: T201
    if asked.json:
        asked.json.write_text(json.dumps({"gpus": gpus, "parts": results, "needs_two": NEEDS_TWO}, indent=2) + "\n")
    return 0 if all(result["outcome"] == "passed" for result in results) else 1


def table(gpus: list[str], results: list[dict[str, Any]]) -> str:
    """Parts, figures, and what was not shown."""
    lines = ["", *gpus, ""]
    for result in results:
        lines.append(f"{result['part']:<44}{result['outcome']:<10}{result['seconds']:>8.0f} s")
        lines += [f"    {f['what']:<64}{f['value']:>12.4g} {f['unit']}" for f in result["figures"]]
        lines += [f"    | {line}" for line in result["tail"]]
    lines += ["", "Not shown, because it needs two GPUs or more:", *(f"    {what}" for what in NEEDS_TWO)]
    return "\n".join(lines)


def _gpus() -> list[str]:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return []
    return [line.split(" (UUID")[0] for line in listing.stdout.splitlines() if line.startswith("GPU ")]


def _run(part: str, words: list[str], limit: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as figures:
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", *words]
        # A session of its own: when time is up, everything it started goes with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"ROLLEARN_GPU_FIGURES": figures.name}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            outcome = "passed" if process.returncode == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            outcome = "HUNG"
        seconds = time.monotonic() - began
        found = [json.loads(line) for line in Path(figures.name).read_text().splitlines()]
    tail = [] if outcome == "passed" else output.strip().splitlines()[-25:]
    return {"part": part, "outcome": outcome, "seconds": seconds, "figures": found, "tail": tail}


if __name__ == "__main__":
    sys.exit(main())
