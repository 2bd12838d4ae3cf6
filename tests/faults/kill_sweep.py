"""Kills runs at random moments, resumes them until they end, and compares the end with the undisturbed run.

python tests/faults/kill_sweep.py [--kills 20] [--who driver,engine-0,learner-1] [--out DIR] [--seed 0] [-- FLAGS]

Each line of the table is one run in which one process was killed once; a run that was ended by it is resumed. Every
fifth kill comes while the run starts; the others at a moment drawn evenly over what comes after its start was committed
(`+` in the table). Exit code 1 when any of them ends in another state, or leaves a process, shared memory or a
temporary directory behind for 90 s. With `--zero 0,1,2,3 --ranks 1,2` the sweep is repeated for every combination.

It takes well over an hour. What always runs of it are two tests, with kills at chosen moments: test_resume.py kills the
driver three times in one run, test_supervision.py an engine and a rank in one run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.leftovers import Leftovers
from tests.faults.runs import Command, Ended, differences, launch, rows_of, salvaged_groups, state_of

RESUMABLE = (-signal.SIGKILL, 3)


def await_start(run: Path, command: Command) -> float:
    """Seconds until the start of a run was committed (or the command had ended)."""
    began = time.monotonic()
    while not (run / "checkpoints" / "LATEST").exists() and command.process.poll() is None:
        time.sleep(0.02)
    return time.monotonic() - began


def kill(run: Path, who: str, command: Command, seconds: float) -> None:
    """SIGKILL to the driver, or to an actor whose pid the run has written down (nothing when it has none yet)."""
    if who == "driver":
        command.kill_after(seconds)
        return
    time.sleep(seconds)
    with suppress(FileNotFoundError, StopIteration, ProcessLookupError):
        pids = dict(line.split() for line in (run / "pids.txt").read_text().splitlines())
        os.kill(int(next(pid for name, pid in pids.items() if name == who)), signal.SIGKILL)


def resume_to_the_end(run: Path, ended: Ended, environment: dict[str, str], tries: int = 5) -> tuple[Ended, int]:
    """Resume until a command ends well or in a way that cannot be resumed; how it ended, and how many it took."""
    for attempt in range(tries):
        if ended.code not in RESUMABLE:
            return ended, attempt
        ended = launch("resume", str(run), "--quiet", environment=environment)
    return ended, tries


def sweep(flags: list[str], kills: int, who: str, out: Path, draw: random.Random) -> int:
    """One table; how many runs ended in another state."""
    whole = out / "undisturbed"
    command = Command(*flags, "--run", str(whole), "--quiet")
    start = await_start(whole, command)
    first = command.end()
    if first.code:
        raise SystemExit(f"the undisturbed run failed:\n{first.text}")
    expected, rows = state_of(whole), rows_of(whole)
    print_(f"{' '.join(flags)}, killing {who}")
    print_(f"undisturbed: {first.seconds:.0f} s, round {expected[0]}, weights {expected[1][:16]}")
    print_(f"{'run':>4} {'killed at':>9} {'committed':>9} {'resumes':>7} {'salvaged':>8}  {'weights':<16}  result")
    wrong = 0
    for number in range(1, kills + 1):
        run = out / f"killed-{number}"
        early = number % 5 == 0
        moment = draw.uniform(0.0, start if early else first.seconds - start)
        when = f"{'' if early else '+'}{moment:.1f} s"
        leftovers = Leftovers()
        command = Command(*flags, "--run", str(run), "--quiet", environment=leftovers.environment)
        if not early:
            await_start(run, command)
        kill(run, who, command, moment)
        ended = command.end()
        began = (run / "config.toml").exists()
        at = state_of(run)[0] if (run / "checkpoints" / "LATEST").exists() else None
        if began:
            ended, resumes = resume_to_the_end(run, ended, leftovers.environment)
        else:  # killed before there was a directory: the user types the command again
            ended, resumes = launch(*flags, "--run", str(run), "--quiet", environment=leftovers.environment), 0
        if ended.code:
            wrong += 1
            print_(f"{number:>4} {when:>9} {at!s:>9} {resumes:>7}: ended with {ended.code}\n{ended.text}")
            continue
        state, other = state_of(run), differences(rows, rows_of(run))
        other += leftovers.found()
        same = state == expected and not other
        wrong += not same
        print_(
            f"{number:>4} {when:>9} {at!s:>9} {resumes:>7} {sum(salvaged_groups(run)):>8}  {state[1][:16]}  "
            + ("same" if same else f"OTHER: {'; '.join(other[:3])}")
        )
    print_(f"{kills - wrong} of {kills} runs ended in the same state\n")
    return wrong


def print_(text: str) -> None:
    """A line of the table, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Parse, sweep, say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--who", default="driver,engine-0,learner-1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero", default="0")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    flags = options.flags or ["--rollouts", "256", "--rounds", "3", "--eval.size", "64"]
    out = options.out or Path(tempfile.mkdtemp(prefix="kill-sweep-"))
    wrong = 0
    for zero in options.zero.split(","):
        for ranks in options.ranks.split(","):
            own = [*flags, "--learner.zero-stage", zero, "--learner.ranks", ranks]
            for who in options.who.split(","):
                draw = random.Random(f"{options.seed} {zero} {ranks}")
                wrong += sweep(own, options.kills, who, out / f"zero{zero}-ranks{ranks}-{who}", draw)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
