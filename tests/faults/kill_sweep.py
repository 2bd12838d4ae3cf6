"""Kills runs at random moments, resumes them until they end, and compares the end with the undisturbed run.

python tests/faults/kill_sweep.py [--kills 20] [--who driver,engine-0+learner-1] [--out DIR] [--seed 0] [-- FLAGS]

Each line of the table is one run in which one process was killed once (`a+b`: each of them once); a run that was ended
by it is resumed. Every fifth kill comes while the run starts (`3.1 s`); the others some time after a round of the run
has been recorded (`1 +0.42 s`: after round 1), both drawn evenly. Only kills that hit are counted: one that came when
there was nothing left to lose is marked `late`, and another one is drawn. Exit code 1 when a run ends in another state,
or leaves a process, shared memory or a temporary directory behind for 90 s. With `--zero 0,1,2,3 --ranks 1,2` the sweep
is repeated for every combination.

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
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.leftovers import Leftovers
from tests.faults.runs import (
    Command,
    Ended,
    differences,
    events_of,
    launch,
    pid_of,
    rows_of,
    salvaged_groups,
    state_of,
)

RESUMABLE = (-signal.SIGKILL, 3)


@dataclass(frozen=True)
class Moment:
    """When a process is killed."""

    after: int | None
    """Once this round has been recorded (0: the evaluation before any); None: once the command has begun."""
    seconds: float
    """So much later."""

    def __str__(self) -> str:
        """As in the table."""
        return f"{self.seconds:.1f} s" if self.after is None else f"{self.after} +{self.seconds:.2f} s"


def draw_moment(draw: random.Random, early: bool, paces: Sequence[float]) -> Moment:
    """While the run starts, or within one of its rounds; `paces` are the seconds from the command to each record."""
    if early:
        return Moment(None, draw.uniform(0.0, paces[0]))
    after = draw.randrange(len(paces) - 1)
    return Moment(after, draw.uniform(0.0, paces[after + 1] - paces[after]))


def watch(run: Path, command: Command) -> list[float]:
    """Seconds from now until each row of the metrics was there, of a run that nobody disturbs."""
    began, paces = time.monotonic(), list[float]()
    while command.process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(rows_of(run)) > len(paces):
            paces.append(time.monotonic() - began)
        time.sleep(0.02)
    return paces


def kill(run: Path, who: str, command: Command, moment: Moment) -> None:
    """SIGKILL to the driver, or to an actor whose pid the run has written down (nothing when it has none yet)."""
    while moment.after is not None and command.process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(rows_of(run)) > moment.after:
            break
        time.sleep(0.01)
    time.sleep(moment.seconds)
    if who == "driver":
        command.process.kill()
        return
    with suppress(FileNotFoundError, KeyError, ProcessLookupError):
        os.kill(pid_of(run, who), signal.SIGKILL)


def hit(run: Path, who: str, code: int) -> bool:
    """Whether the kill cost the run something."""
    if who == "driver":
        return code == -signal.SIGKILL
    return any(who in event["names"] for event in events_of(run, "lost"))


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
    paces = watch(whole, command)
    first = command.end()
    if first.code:
        raise SystemExit(f"the undisturbed run failed:\n{first.text}")
    expected, rows = state_of(whole), rows_of(whole)
    print_(f"{' '.join(flags)}, killing {who}")
    print_(f"undisturbed: {first.seconds:.0f} s, round {expected[0]}, weights {expected[1][:16]}")
    print_(f"{'run':>4} {'killed at':>24} {'resumes':>7} {'salvaged':>8}  {'weights':<16}  result")
    wrong, hits, number = 0, 0, 0
    while hits < kills and number < 2 * kills:
        number += 1
        moments = {name: draw_moment(draw, number % 5 == 0, paces) for name in who.split("+")}
        told, result = one_run(flags, moments, out / f"killed-{number}", expected, rows)
        hits += result != "late"
        wrong += result not in ("same", "late")
        print_(f"{number:>4} {', '.join(map(str, moments.values())):>24} {told}  {result}")
    print_(f"{hits - wrong} of {hits} runs in which a kill hit ended in the same state\n")
    return wrong


def one_run(
    flags: list[str], moments: dict[str, Moment], run: Path, expected: tuple[int, str], rows: list[dict[str, Any]]
) -> tuple[str, str]:
    """One run, its kills and its resumes: columns of the table, and `same`, `late` or what is other."""
    leftovers = Leftovers()
    command = Command(*flags, "--run", str(run), "--quiet", environment=leftovers.environment)
    killers = [threading.Thread(target=kill, args=(run, name, command, at)) for name, at in moments.items()]
    for each in killers:
        each.start()
    for each in killers:
        each.join()
    ended = command.end()
    late = not all(hit(run, name, ended.code) for name in moments)
    if (run / "config.toml").exists():
        ended, resumes = resume_to_the_end(run, ended, leftovers.environment)
    else:  # killed before there was a directory: the user types the command again
        ended, resumes = launch(*flags, "--run", str(run), "--quiet", environment=leftovers.environment), 0
    if ended.code:
        return f"{resumes:>7} {'':>8}  {'':<16}", f"ended with {ended.code}\n{ended.text}"
    state, other = state_of(run), differences(rows, rows_of(run))
    other += leftovers.found()
    told = f"{resumes:>7} {sum(salvaged_groups(run)):>8}  {state[1][:16]}"
    if state != expected or other:
        return told, f"OTHER: {'; '.join(other[:3])}"
    return told, "late" if late else "same"


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
