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

    return dispatch(words, train, loop)


def train(config: Config, resume: Path | None) -> int:
    """Train as configured, in a new run directory or on from the last commit of an old one."""
    from cluster.run.opening import open_run

    with open_run(config, resume) as run:
        loop(run)
        run.finish()
    return 0


def loop(run: Run) -> None:
    """One turn is one round: prompts, groups, scored groups, batch, update, weights, receipts, record.

    What may start next is the schedule's to say; what was begun goes on beside the rest (cluster/schedule.py).
    """
    from cluster.schedule import Generate, Record, Sync, Train

    run.sync(version=run.weights_version)
    run.evaluate_start()
    for task in run.tasks():
        turn = run.turn(task.round)
        match task:
            case Generate():
                requests = run.next_requests(turn)
                run.begin(task, run.generate_and_score(turn, requests))
            case Train():
                batch = run.build_batch(turn, task.minibatches)
                run.begin(task, run.update(turn, batch, first=task.first))
            case Sync():
                turn.row |= run.sync(version=turn.number)
                run.evaluate(turn)
            case Record():
                run.record(turn)


if __name__ == "__main__":
    sys.exit(main())
