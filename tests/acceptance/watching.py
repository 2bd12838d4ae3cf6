"""What watching costs: doctor, metrics, live view and trackers, beside the rounds they watch.

    python tests/acceptance/watching.py [--rounds 500]

A run of the given length is made up, its rows go through everything that looks at a round, and the time is measured:
on the driver's main thread (`time/watch` of a run), and as CPU time of a live view that stands idle on a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from cluster.run.console import Console  # noqa: E402
from cluster.run.doctor import diagnose, new_findings  # noqa: E402
from cluster.run.findings import Finding  # noqa: E402
from cluster.run.metrics import MetricsLog  # noqa: E402
from tests.pure.synthetic_run_folder import metrics_row  # noqa: E402


class Terminal(io.StringIO):
    """A terminal that forgets what was written to it."""

    def isatty(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Nothing is kept."""
        return len(text)


def per_round(rounds: int) -> list[float]:
    """Seconds of the driver's main thread for each round: row, doctor, findings, 40 signs of progress."""
    rng, rows, said, spent = np.random.default_rng(0), [], list[Finding](), []
    with tempfile.TemporaryDirectory() as folder, MetricsLog(Path(folder)) as log:
        console = Console(quiet=False, log_json=False, rounds=rounds)
        for round_ in range(rounds + 1):
            row = metrics_row(rng, round_, rounds, 512, 16, None)
            began = time.perf_counter()
            console.phase("generate", total=512, round_=round_, lane="engines")
            for done in range(40):
                console.advance(done, "groups, 1,000 tokens", "engines")
            log.append(row)
            rows.append(row)
            console.row(row)
            fresh = new_findings(said, diagnose(rows))
            said += fresh
            for finding in fresh:
                console.finding(finding)
            spent.append(time.perf_counter() - began)
        console.close()
    return spent


def idle_view(seconds: float) -> float:
    """CPU seconds per second of a live view that nothing happens to (it is drawn four times a second)."""
    console = Console(quiet=False, log_json=False, rounds=10)
    console.phase("generate", total=512, round_=1, lane="engines")
    began = time.process_time()
    time.sleep(seconds)
    spent = time.process_time() - began
    console.close()
    return spent / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    rounds = parser.parse_args().rounds
    with contextlib.redirect_stdout(Terminal()):
        spent, idle = per_round(rounds), idle_view(10.0)
    tenth = max(1, rounds // 10)
    for name, part in (("first", spent[:1]), ("early", spent[1 : tenth + 1]), ("late", spent[-tenth:])):
        usual, most = 1000 * statistics.median(part), 1000 * max(part)
        sys.stdout.write(f"{name:<6} rounds: {usual:.1f} ms per round, at most {most:.0f} ms\n")
    sys.stdout.write(f"live view at rest: {100 * idle:.2f} % of one core\n")


if __name__ == "__main__":
    main()
