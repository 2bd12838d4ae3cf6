"""The simulator's rounds against real ones on a CPU. Minutes on two cores.

.venv/bin/python tests/acceptance/simulator_time.py BENCHES_DIR

Runs `launch.py bench` where its figures are not in BENCHES_DIR yet, fits the costs of the machine to the `cal` ones,
and plays the others, of other sizes, out. Exits 1 when the median round of one is off by more than 15 %.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.planner.architecture import read_architecture
from cluster.planner.calibrate import Measured, calibrate
from cluster.planner.cpu import CpuCosts, CpuSplit
from cluster.planner.work import Work
from cluster.simulator.build import on_cores
from cluster.simulator.lengths import Lengths
from cluster.simulator.outcome import Outcome
from cluster.simulator.world import simulate
from rollout.tasks import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.15
PROMPT = 6  # tokens of the demo's prompts
CASES: dict[str, tuple[str, str]] = {
    "cal-demo-256": ("demo", "--rollouts 256 --minibatches 4 --fixed-length --max-new-tokens 32"),
    "cal-demo-2048": ("demo", "--rollouts 2048 --minibatches 16 --fixed-length --max-new-tokens 32"),
    "cal-20M-64": ("20M", "--rollouts 64 --group-size 8 --minibatches 4 --fixed-length --max-new-tokens 32"),
    "cal-demo-512-natural": ("demo", "--rollouts 512 --minibatches 8"),
    "pred-demo-8192": ("demo", "--rollouts 8192 --minibatches 16"),
    "pred-demo-1024-64": ("demo", "--rollouts 1024 --minibatches 8 --fixed-length --max-new-tokens 64"),
    "pred-20M-256": ("20M", "--rollouts 256 --group-size 8 --minibatches 4 --fixed-length --max-new-tokens 24"),
    "pred-100M-32": ("100M", "--rollouts 32 --group-size 8 --minibatches 2 --fixed-length --max-new-tokens 24"),
}


def figures(folder: Path, case: str) -> dict[str, Any]:
    """Figures of a case, measured when they are not there yet."""
    file = folder / f"{case}.json"
    if not file.exists():
        model, words = CASES[case]
        command = [sys.executable, str(ROOT / "launch.py"), "bench", "--json", str(file), *words.split()]
        command += [] if model == "demo" else ["--model", str(directory(folder, model))]
        subprocess.run([*command, "--run", str(folder / f"run-{case}")], check=True)
    return dict(json.loads(file.read_text()))


def directory(folder: Path, model: str) -> Path:
    """The demo, or a random model that planner_memory.py builds."""
    if model == "demo":
        return DEMO_MODEL
    if not (folder / model).exists():
        sys.path.insert(0, str(Path(__file__).parent))
        from planner_memory import build_model  # type: ignore[import-not-found]

        build_model(model, folder / model)
    return folder / model


def predict(folder: Path, case: str, found: dict[str, Any], costs: CpuCosts, natural: float) -> Outcome:
    """The same round on the virtual clock; where lengths are the model's own, their mean is that of a smaller bench."""
    model = read_architecture(str(directory(folder, CASES[case][0])))
    longest = int(found["max_new_tokens"])
    mean = float(longest) if found["fixed_length"] else natural
    minibatches = int(found["minibatches"])
    work = Work(
        prompts=int(found["rollouts"]) // int(found["group_size"]),
        group_size=int(found["group_size"]),
        minibatches=minibatches,
        prompt_tokens=PROMPT,
        response_tokens=mean,
        longest=longest,
        longest_row=PROMPT + longest,
        microbatch_tokens=4096,
        max_num_seqs=1024,
        old_logprobs=True,
        reference=False,
    )
    split = CpuSplit(int(found["engines"]), int(found["ranks"]), cores=2, kv_gib=1.0, zero_stage=0, checkpointing=False)
    return simulate(on_cores(model, work, split, costs, Lengths("fixed", mean, longest), rounds=3))


def main() -> int:
    """Calibrate, predict, print."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    benches = {case: figures(folder, case) for case in CASES}
    measured = {
        case: Measured(read_architecture(str(directory(folder, CASES[case][0]))), PROMPT, found)
        for case, found in benches.items()
    }
    costs = calibrate([bench for case, bench in measured.items() if case.startswith("cal")])
    sys.stdout.write(f"{costs}\n\n| bench | generate | learn | round, measured | round, simulated | off |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    worst = 0.0
    for case, found in benches.items():
        outcome = predict(folder, case, found, costs, measured["cal-demo-512-natural"].length)
        middle = outcome.rounds[1]
        off = outcome.round_seconds / found["round"] - 1
        worst = max(worst, abs(off)) if case.startswith("pred") else worst
        sys.stdout.write(
            f"| {case} | {found['generate_and_score']:.2f} / {middle.generate:.2f} | {found['learn']:.2f} / "
            f"{middle.learn:.2f} | {found['round']:.2f} | {outcome.round_seconds:.2f} | {off:+.0%} |\n"
        )
    sys.stdout.write(f"\nlargest difference of a prediction {worst:.0%}\n")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
