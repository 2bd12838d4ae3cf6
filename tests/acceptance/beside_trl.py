"""The same work here and in TRL, one after the other on the same machine; prints a table.

TRL needs an environment of its own (`python -m venv trl && trl/bin/pip install trl==1.16.0`), because it is a peer, not
a dependency. 0.8 million parameters, responses of exactly 32 tokens, no evaluation, learning rate about 0.

.venv/bin/python tests/acceptance/beside_trl.py FOLDER trl/bin/python [1x8 64x16 512x16]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"1x8": (8, 1, 8), "64x16": (1024, 16, 16), "512x16": (8192, 16, 16)}
"""Name -> rollouts, minibatches, group size."""
TOKENS = 32
ROUNDS = {"1x8": 20, "64x16": 5, "512x16": 2}
DEMO = ROOT / "rollout" / "tasks" / "demo"


def main() -> int:
    """Time every size on both sides."""
    folder, peer = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    model, prompts = make_model(folder / "model"), make_prompts(folder / "prompts.jsonl")
    lines = [f"{'work':<8}{'here':>9}{'limit':>9}{'limit/here':>12}{'TRL':>9}{'here/TRL':>10}   (s)"]
    for name in sys.argv[3:] or SIZES:
        ours, theirs = here(name, model, prompts, folder), trl(name, model, prompts, peer)
        lines.append(
            f"{name:<8}{ours['round']:>9.3f}{ours['limit']:>9.3f}{ours['efficiency']:>12.2f}{theirs:>9.3f}"
            f"{ours['round'] / theirs:>10.2f}"
        )
        sys.stdout.write("\n".join(lines) + "\n\n")
        sys.stdout.flush()
    return 0


def here(name: str, model: Path, prompts: Path, folder: Path) -> dict[str, float]:
    """Figures of `launch.py bench`."""
    rollouts, minibatches, group = SIZES[name]
    figures = folder / f"{name}.json"
    words = ["bench", "--rollouts", str(rollouts), "--minibatches", str(minibatches), "--group-size", str(group)]
    words += ["--model", str(model), "--prompts", str(prompts), "--max-new-tokens", str(TOKENS), "--fixed-length"]
    shutil.rmtree(folder / f"run-{name}", ignore_errors=True)
    words += ["--repeats", str(ROUNDS[name]), "--json", str(figures), "--run", str(folder / f"run-{name}")]
    subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], check=True, stdout=subprocess.DEVNULL)
    measured: dict[str, float] = json.loads(figures.read_text())
    return measured


def trl(name: str, model: Path, prompts: Path, peer: str) -> float:
    """Seconds of a round in TRL."""
    rollouts, minibatches, group = SIZES[name]
    words = [str(model), str(prompts), *map(str, (rollouts, minibatches, group, TOKENS, ROUNDS[name]))]
    script = str(ROOT / "tests" / "acceptance" / "trl_rounds.py")
    done = subprocess.run([peer, script, *words], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["round"])


def make_model(folder: Path) -> Path:
    """An untrained model of 0.8 million parameters with the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(DEMO)
    shape.hidden_size, shape.intermediate_size = 128, 384
    shape.num_attention_heads, shape.num_key_value_heads = 4, 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def make_prompts(path: Path) -> Path:
    """512 additions."""
    rows = [{"prompt": f"{11 + i % 80}+{12 + i // 7}=", "answer": str(23 + i % 80 + i // 7)} for i in range(512)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    sys.exit(main())
