"""Whole run directories without a run: metrics, groups, configuration, drawn from a seed. For tests of the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cluster.run.journal import Journal
from cluster.run.manifest import Manifest, folder_name
from cluster.run.metrics import EventLog, MetricsLog
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup

CONFIG = """rollouts = 8192
minibatches = "None"
group_size = {size}
rounds = {rounds}
model = "demo"
prompts = "arithmetic"
preset = "{preset}"
seed = {seed}

[learner]
lr = "{lr}"
clip_high = 0.28

[eval]
size = 512

[kl]
kind = "{kl}"
"""
HOSTILE = (
    "<think></script><script>window.stolen=1</script>\n<img src=x onerror=window.stolen=2></think>\\boxed{1}",
    "<think>\x1b]0;owned\x07\x1b[31mred\x9b0m</think> \u202egnihton\u202c \\boxed{2}",
    '"]}}\u2028\u2029</SCRIPT ><!--<script>&lt;b&gt; javascript:alert(1) \ud800 \u200b\ufeff',
    "{{constructor.constructor('window.stolen=3')()}} ${window.stolen=4} <svg/onload=window.stolen=5> \\boxed{{3}}",
)


def write_run(
    folder: Path,
    *,
    rounds: int = 50,
    prompts: int = 16,
    size: int = 8,
    group_rounds: int | None = None,
    seed: int = 0,
    collapse: int | None = None,
    hostile: bool = False,
    preset: str = "grpo",
    words: int = 12,
) -> Path:
    """A run of so many rounds; from round `collapse` on, KL is the only gradient left. Returns the folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    kl = "k3" if collapse else "none"
    (folder / "config.toml").write_text(
        CONFIG.format(rounds=rounds, seed=seed, size=size, preset=preset, lr=3e-6 if seed else "None", kl=kl)
    )
    (folder / "plan.txt").write_text(f"{prompts} prompts x {size} responses per round\n2 engines, 2 ranks on 2 cores\n")
    write_manifest(folder / "checkpoints" / folder_name(rounds) / "manifest.json", rounds)
    events = EventLog(folder)
    with MetricsLog(folder) as log:
        for round_ in range(rounds + 1):
            log.append(metrics_row(rng, round_, rounds, prompts, size, collapse))
    if rounds > 4:
        events.append("engine_restarted", round=4, engine=1, reason="killed by signal 9")
    every = max(1, rounds // (group_rounds or rounds))
    with Journal(folder) as journal:
        for round_ in range(1, rounds + 1, every):
            accuracy = level(round_, rounds, collapse)
            groups = [draw_group(rng, round_, at, size, accuracy, hostile, words) for at in range(prompts)]
            for scored in groups:
                journal.append(scored)
            spread = [scored.total - scored.total.mean() for scored in groups]
            keys = [scored.group.request.key for scored in groups]
            journal.compact(round_, {key: each / (each.std() + 1e-6) for key, each in zip(keys, spread, strict=True)})
    events.close()
    return folder


def write_manifest(file: Path, rounds: int) -> None:
    """The manifest of a checkpoint, without the files."""
    versions = {"python": "3.11.7", "vllm": "0.32.0", "ray": "2.60.0", "deepspeed": "0.19.8"}
    manifest = Manifest(rounds, rounds, 1, False, "", (), 0, None, {}, "", "", {}, "", versions)
    file.parent.mkdir(parents=True)
    file.write_bytes(manifest.as_bytes())


def level(round_: int, rounds: int, collapse: int | None) -> float:
    """Share of right answers in a round."""
    if collapse and round_ >= collapse:
        return 0.0
    return float(0.25 + 0.6 / (1 + np.exp(-(round_ - rounds / 3) / (rounds / 10))))


def metrics_row(rng, round_, rounds, prompts, size, collapse):
    """One row of metrics.jsonl with the names of the contract."""
    right = level(round_, rounds, collapse)
    row = {"round": round_, "weights_version": max(0, round_ - 1)}
    if round_ % 5 == 0 or round_ == rounds:
        held_out = float(np.clip(right + rng.normal(0, 0.02), 0, 1))
        row |= {"eval/correctness": held_out, "eval/format": 0.97, "time/eval": 2.1}
    if round_ == 0:
        return row
    gone = collapse is not None and round_ >= collapse
    noisy = lambda value, spread: float(max(0.0, value * (1 + rng.normal(0, spread))))  # noqa: E731
    correct = float(np.clip(right + rng.normal(0, 0.03), 0, 1)) * (not gone)
    form = noisy(0.0 if gone else min(0.99, 0.4 + 3 * round_ / rounds), 0.01)
    entropy = 0.9 - 0.5 * round_ / rounds if not gone else 0.9 + 2.5 * (round_ - (collapse or 0)) / rounds
    return row | {
        "responses": prompts * size,
        "tokens/generated": prompts * size * 19,
        "reward/total": correct + 0.1 * form,
        "reward/correctness": correct,
        "reward/format": form,
        "reward/std": 0.0 if gone else noisy(0.35, 0.1),
        "group/zero_signal": 1.0 if gone else noisy(0.3, 0.1),
        "response/length": noisy(19, 0.02),
        "response/truncated": noisy(0.02, 0.5),
        "policy/loss": float(rng.normal(0, 0.01)),
        "policy/entropy": noisy(entropy, 0.02),
        "policy/ratio_mean": float(rng.normal(1, 0.001)),
        "policy/ratio_max": noisy(3, 0.3),
        "policy/clip_fraction_low": noisy(0.002, 0.3),
        "policy/clip_fraction_high": noisy(0.004, 0.3),
        "policy/grad_norm": noisy(0.4 if not gone else 2.5, 0.2),
        "policy/lr": 1e-6,
        "policy/skipped_steps": 0,
        "advantage/mean": 0.0,
        "advantage/std": 0.0 if gone else 0.8,
        "mismatch/mean": noisy(2e-6, 0.3),
        "mismatch/max": noisy(2e-5, 0.3),
        "sync/seconds": noisy(0.1, 0.2),
        "sync/receipt_ok": 1.0,
        "grader/timeouts": 0,
        "grader/errors": 0,
        "fleet/restarts": int(round_ >= 4),
        "time/generate": noisy(4, 0.1),
        "time/score": noisy(0.3, 0.1),
        "time/learn": noisy(3, 0.1),
        "time/old_logprobs": noisy(0.8, 0.1),
        "time/round": noisy(9, 0.1),
        "time/watch": noisy(0.02, 0.1),
        "time/generate_tokens_per_s": noisy(prompts * size * 5, 0.1),
        "time/engines_idle": noisy(0.5, 0.05),
        "time/ranks_idle": noisy(0.6, 0.05),
        "memory/engine0": 1.2e9,
        "memory/rank0": 0.9e9 + 1e5 * round_,
        "steps": [{"step": round_, "minibatch": 0, "skipped": False, "policy/grad_norm": noisy(0.4, 0.2)}],
        **({"policy/kl": 0.02 * round_ / rounds, "policy/kl_loss": 2e-5} if collapse else {}),
    }


def draw_group(rng, round_, at, size, accuracy, hostile=False, words=12):
    """One scored group; prompts repeat every three rounds, so that a prompt can be followed."""
    number = at + 16 * (round_ % 3)
    left, right = 10 + number, 7 + 3 * number
    texts, correct, form = [], [], []
    for k in range(size):
        good, tidy = rng.random() < accuracy, rng.random() < 0.4 + 0.5 * accuracy
        value = left + right + (0 if good else int(rng.integers(1, 9)))
        steps = " ".join(f"{left}+{right} carry {step}" for step in range(int(rng.integers(1, words))))
        text = f"<think>{steps}\nso {value}</think>\n\\boxed{{{value}}}" if tidy else f"{steps} I say {value}"
        texts.append(HOSTILE[k % len(HOSTILE)] if hostile else text)
        correct.append(float(good and tidy))
        form.append(float(tidy))
    lengths = rng.integers(5, 30, size).astype(np.int32)
    tokens = int(lengths.sum())
    question = f"What is {left} + {right}?" + (HOSTILE[0] + "\u202e" if hostile else "")
    prompt = Prompt(f"sum-{number:04d}", question, np.arange(9, dtype=np.int32), str(left + right), "sums")
    request = GroupRequest(prompt, round_, 0, at % 4, size, 1000 * round_ + at)
    group = Group(
        request,
        round_ - 1,
        rng.integers(0, 40, tokens).astype(np.int32),
        -rng.random(tokens).astype(np.float32),
        lengths,
        rng.random(size) < 0.95,
        tuple(texts),
        engine=at % 2,
    )
    parts = {"correctness": np.array(correct), "format": np.array(form)}
    outcomes = tuple("right" if each else "wrong" for each in correct)
    return ScoredGroup(group, parts, parts["correctness"] + 0.1 * parts["format"], outcomes)
