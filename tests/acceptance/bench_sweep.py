"""How a round scales: responses, lengths, engines and ranks, transports by model size. About a minute per bench.

.venv/bin/python tests/acceptance/bench_sweep.py BENCHES_DIR [--plot docs/bench.svg] [--only NAME ...] [--long]

Runs `launch.py bench` where its figures are not in BENCHES_DIR yet and prints the tables of docs/bench.md; `--long`
adds 65,536 responses in one round, which takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from planner_memory import build_model  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Case:
    """One bench."""

    sweep: str
    """Which table it belongs to."""
    label: str
    """What varies."""
    words: str
    """Options of bench."""
    model: str = "demo"
    """demo, 20M or 100M."""

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.sweep}-{self.label}".replace(" ", "-").replace(",", "")


RESPONSES = {8: 1, 64: 4, 512: 16, 8192: 16}
LENGTHS = (16, 128, 512, 2048)
CASES = [
    *(Case("responses", f"{n}", f"--rollouts {n} --minibatches {m}") for n, m in RESPONSES.items()),
    *(
        Case("lengths", f"{n}", f"--rollouts 64 --minibatches 4 --fixed-length --max-new-tokens {n} --repeats 2")
        for n in LENGTHS
        if n < 2048
    ),
    # the demo's positions end at 2048, prompt included
    Case("lengths", "2040", "--rollouts 64 --minibatches 4 --fixed-length --max-new-tokens 2040 --repeats 1"),
    *(
        Case(
            "processes",
            f"{n} engine {n} rank" if n == 1 else f"{n} engines {n} ranks",
            f"--rollouts 1024 --minibatches 16 --rollout.engines {n} --learner.ranks {n}",
        )
        for n in (1, 2)
    ),
    *(
        Case(
            "transports",
            f"{model} {transport}",
            f"--rollouts 32 --group-size 8 --minibatches 1 --fixed-length --max-new-tokens 16 "
            f"--cluster.transport {transport}",
            model,
        )
        for model in ("demo", "20M", "100M")
        for transport in ("object_store", "broadcast")
    ),
]
LONG = [Case("responses", "65536", "--rollouts 65536 --minibatches 16 --repeats 1")]


def figures(folder: Path, case: Case) -> dict[str, Any]:
    """Figures of a case, measured when they are not there yet."""
    file = folder / f"{case.name}.json"
    if not file.exists():
        command = [sys.executable, str(ROOT / "launch.py"), "bench", "--json", str(file), *case.words.split()]
        if case.model != "demo":
            directory = folder / case.model
            if not directory.exists():
                build_model(case.model, directory)
            command += ["--model", str(directory)]
        subprocess.run([*command, "--run", str(folder / f"run-{case.name}")], check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(file.read_text()))


def table(cases: list[tuple[Case, dict[str, Any]]]) -> str:
    """Rows of one sweep."""
    lines = [
        f"| {cases[0][0].sweep} | engines alone s | learner alone s | sync s | round s | ms per response | tokens/s | "
        f"efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, found in cases:
        each = 1000 * found["round"] / found["rollouts"]
        lines.append(
            f"| {case.label} | {found['generate_alone']:.2f} | {found['learn_alone']:.2f} | {found['sync']:.3f} | "
            f"{found['round']:.2f} | {each:.2f} | {found['tokens_per_second']:,.0f} | {found['efficiency']:.2f} |"
        )
    return "\n".join(lines)


def plot(file: Path, measured: dict[str, list[tuple[Case, dict[str, Any]]]]) -> None:
    """Seconds of a round and its parts over responses and over lengths, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = [name for name in ("responses", "lengths") if len(measured.get(name, [])) > 1]
    figure, axes = pyplot.subplots(1, len(sweeps), figsize=(5 * len(sweeps), 3.6), squeeze=False)
    for axis, name in zip(axes[0], sweeps, strict=True):
        across = [float(case.label) for case, _ in measured[name]]
        for key, label in (
            ("round", "whole round"),
            ("generate_alone", "engines alone"),
            ("learn_alone", "learner alone"),
        ):
            axis.loglog(across, [found[key] for _, found in measured[name]], marker="o", label=label)
        axis.set_xlabel("responses per round" if name == "responses" else "tokens per response, 64 responses")
        axis.set_ylabel("seconds")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    """Measure what is missing, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES + (LONG if options.long else []) if not options.only or case.name in options.only]
    measured: dict[str, list[tuple[Case, dict[str, Any]]]] = {}
    for case in cases:
        measured.setdefault(case.sweep, []).append((case, figures(options.folder, case)))
    for found in measured.values():
        sys.stdout.write(table(found) + "\n\n")
    if options.plot:
        plot(options.plot, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
