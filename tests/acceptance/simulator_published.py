"""The simulator beside published figures: verl's fully asynchronous page (Qwen2.5-Math-7B on H20, steps of 512 x 16).

.venv/bin/python tests/acceptance/simulator_published.py

One number is fitted for each run: the mean length of a response, which the page does not give, so that the learner's
time is as published. Generation and the whole step are predicted. docs/simulator.md discusses the differences.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.planner import timing
from cluster.planner.architecture import Architecture, read_architecture
from cluster.planner.devices import device_named
from cluster.planner.split import Cluster, Split
from cluster.planner.work import Work
from cluster.simulator.build import on_gpus
from cluster.simulator.lengths import Lengths
from cluster.simulator.outcome import Outcome
from cluster.simulator.world import simulate

MODEL = Path(__file__).resolve().parents[1] / "data" / "models" / "qwen2.5-7b"  # Qwen2.5-Math-7B has the same shape
SOURCE = "https://verl.readthedocs.io/en/latest/advance/fully_async.html"
COLOCATED = {32: (790.1, 357.4, 107.7, 313.8), 64: (365.3, 150.7, 70.3, 133.4), 128: (356.3, 177.9, 53.9, 113.8)}
"""GPUs -> published seconds: step, generation, old log-probs, update of the policy."""
ASYNC = {32: (294.8, 269.8), 64: (189.3, 157.0), 128: (150.6, 113.2)}
"""GPUs -> step, update; half of the GPUs generate. At most half a step stale, unfinished responses are carried over."""
STREAMED = {128: (231.3, 98.8)}
"""The same without stale responses and without carrying over ("stream off policy pipeline")."""
LONGEST, PROMPT, ROUNDS = 28_672, 150, 6


def work(mean: float) -> Work:
    """Their round: 512 prompts x 16 responses, 16 steps of 32 prompts."""
    return Work(512, 16, 16, PROMPT, mean, LONGEST, PROMPT + LONGEST, 32_768, 1024, True, False)


def fitted_mean(model: Architecture, ranks: int, update: float) -> float:
    """Mean length with which three passes over all rows take so many ranks as long as published."""
    low, high = 50.0, 20_000.0
    for _ in range(60):
        middle = (low + high) / 2
        seconds = 3 * timing.pass_seconds(model, device_named("h20"), work(middle), ranks)
        low, high = (middle, high) if seconds < update else (low, middle)
    return low


def play(model: Architecture, mean: float, gpus: int, placement: str, schedule: str) -> Outcome:
    """Rounds of a split in halves, or of engines and ranks on the same GPUs."""
    own = gpus if placement == "colocated" else gpus // 2
    split = Split(placement, schedule, own, 1, own, 3, False, False, 32_768)
    lengths = Lengths("lognormal", mean, LONGEST)
    return simulate(on_gpus(model, work(mean), Cluster(device_named("h20"), gpus, 8), split, lengths, rounds=ROUNDS))


def main() -> int:
    """Print the table."""
    model = read_architecture(str(MODEL))
    sys.stdout.write(
        "| run | GPUs | fitted mean length | | published s | simulated s | off |\n|---|---|---|---|---|---|---|\n"
    )
    for gpus, (step, generation, old, update) in COLOCATED.items():
        mean = fitted_mean(model, gpus, update)
        outcome = play(model, mean, gpus, "colocated", "phased")
        middle = outcome.rounds[len(outcome.rounds) // 2]
        row("colocated", gpus, mean, "generation", generation, middle.generate)
        row("colocated", gpus, mean, "old log-probs + update", old + update, middle.learn)
        row("colocated", gpus, mean, "step", step, outcome.round_seconds)
    for name, schedule, published in (("streamed", "streamed", STREAMED), ("asynchronous", "async", ASYNC)):
        for gpus, (step, update) in published.items():
            mean = fitted_mean(model, gpus // 2, update)
            outcome = play(model, mean, gpus, "separate", schedule)
            row(f"{name}, halves", gpus, mean, "step", step, outcome.round_seconds)
    sys.stdout.write(f"\npublished: {SOURCE}\n")
    return 0


def row(run: str, gpus: int, mean: float, what: str, published: float, simulated: float) -> None:
    """One line of the table."""
    off = f"{simulated / published - 1:+.0%}"
    sys.stdout.write(f"| {run} | {gpus} | {mean:,.0f} | {what} | {published:,.0f} | {simulated:,.0f} | {off} |\n")


if __name__ == "__main__":
    sys.exit(main())
