"""The planner's memory against that of real processes: the demo, a 20 M and a 100 M model. Minutes on two cores.

.venv/bin/python tests/acceptance/planner_memory.py [demo 20M 100M]

Prints a table (MiB, predicted / measured): what a process holds between rounds (metrics.jsonl) and its worst moment
(VmHWM of /proc). Exits 1 when one is off by more than 20 %.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster.model_facts import read_model_facts
from cluster.plan import make_plan
from cluster.planner.architecture import read_architecture
from cluster.planner.capacity import MeanLengths, cpu_split, work_of
from cluster.planner.cpu import CpuMemory, cpu_memory
from cluster.resources import local_resources
from cluster.run.cli import parse
from rollout.tasks import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.20
MIB = 1 << 20
SHAPES: dict[str, dict[str, int]] = {
    "20M": {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 9}
    | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64},
    "100M": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
}
# rollouts, longest response, tokens of a microbatch: so that every run is minutes, and microbatches are full
SIZES = {"demo": (512, 32, 4096), "20M": (64, 32, 1024), "100M": (32, 26, 512)}
REWARD = '''
import zlib

def spread(token_ids, final_answers, answer):
    """1 for the right answer, else a little that differs: models without training give some signal to train on."""
    return [1.0 if a == answer else 0.04 * (zlib.crc32(bytes(str(list(t)), "ascii")) % 997) / 997
            for t, a in zip(token_ids, final_answers)]
'''


def build_model(name: str, directory: Path) -> Path:
    """A model directory with random weights and the demo's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    rest: Any = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen3Config(**SHAPES[name], **rest, bos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, directory)
    return directory


def measure(words: list[str], run: Path) -> dict[str, tuple[int, int]]:
    """Process name -> bytes (held between rounds, worst moment) of a run."""
    began = subprocess.Popen([sys.executable, str(ROOT / "launch.py"), *words, "--run", str(run), "--quiet"])
    peaks: dict[str, int] = {}
    while began.poll() is None:
        for name, pid in pids(run).items():
            peaks[name] = max(peaks.get(name, 0), peak(pid))
        time.sleep(0.1)
    if began.returncode:
        raise SystemExit(f"the run ended with {began.returncode}")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: (int(row[f"memory/{name}"]), peaks[name]) for name in sorted(peaks)}


def pids(run: Path) -> dict[str, int]:
    """Actor name -> pid, of those that are up."""
    file = run / "pids.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return {line.split()[0]: int(line.split()[1]) for line in lines}


def peak(pid: int) -> int:
    """VmHWM of a process, bytes; 0 when it has gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) << 10 if found else 0


def predict(words: list[str]) -> CpuMemory:
    """What the planner says about the same command."""
    config = parse(words)
    resources = local_resources()
    plan = make_plan(config, resources, read_model_facts(config.model))
    model = read_architecture(plan.model.path)
    return cpu_memory(model, work_of(config, plan, model, MeanLengths()), cpu_split(config, plan, resources))


def main() -> int:
    """Run, compare, print."""
    names = sys.argv[1:] or list(SIZES)
    worst = 0.0
    sys.stdout.write("| model | process | between rounds | off | worst moment | off |\n|---|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "spread.py").write_text(REWARD)
        for name in names:
            model = "demo" if name == "demo" else str(build_model(name, base / name))
            rollouts, longest, tokens = SIZES[name]
            words = ["--model", model, "--rollouts", str(rollouts), "--group-size", "8", "--minibatches", "1"]
            words += ["--rounds", "2", "--eval.every", "0", "--rollout.max-new-tokens", str(longest)]
            words += ["--learner.microbatch-tokens", str(tokens), "--reward", f"{base / 'spread.py'}:spread"]
            predicted = predict(words)
            of = {"learner-0": predicted.first_rank}
            for process, (held, high) in measure(words, base / f"run-{name}").items():
                memory = predicted.engine if process.startswith("engine") else of.get(process, predicted.other_rank)
                off = [memory.held / held - 1, memory.peak / high - 1]
                worst = max(worst, *(abs(value) for value in off))
                sys.stdout.write(
                    f"| {name} | {process} | {memory.held / MIB:,.0f} / {held / MIB:,.0f} | {off[0]:+.0%} | "
                    f"{memory.peak / MIB:,.0f} / {high / MIB:,.0f} | {off[1]:+.0%} |\n"
                )
                sys.stdout.flush()
    sys.stdout.write(f"largest difference {worst:.0%}\n")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
