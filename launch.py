"""rollearn: the whole system on one page. Parse, plan, start, loop, close.

    python launch.py --rollouts 8192 --minibatches 16     DeepSeek-R1's scheme: 512 prompts x 16 responses, 16 steps
    python launch.py --rollouts 8                         the cheap scheme: 1 prompt x 8 responses, 1 step

Heavy libraries are imported where they are used: --help and plan answer in about a second.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.run.environment import ensure_environment

if TYPE_CHECKING:
    from cluster.run.config import Config
    from cluster.run.stages import Run


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code (CONTRACT: 0, 2, 3, 4, 5 or 130)."""
    words = sys.argv[1:] if argv is None else argv
    ensure_environment(words)
    from cluster.run.commands import dispatch

    return dispatch(words, train)


def train(config: Config, resume: Path | None) -> int:
    """Train as configured, in a new run directory or on from the last commit of an old one."""
    from cluster.run.opening import open_run

    with open_run(config, resume) as run:
        loop(run)
        run.finish()
    return 0


def loop(run: Run) -> None:
    """One turn is one round: prompts, groups, scored groups, batch, update, weights, receipts."""
    run.sync(version=run.weights_version)
    run.evaluate_start()
    for turn in run.rounds():
        requests = run.next_requests(turn)
        groups = run.generate_and_score(turn, requests)
        batch = run.build_batch(turn, groups)
        run.update(turn, batch)
        turn.row |= run.sync(version=turn.number)
        run.evaluate(turn)
        run.record(turn, groups)


if __name__ == "__main__":
    sys.exit(main())
