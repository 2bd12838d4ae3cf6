"""Rebuilds the shipped demo model: `python -m rollout.tasks.build_demo --out DIR`.

A small transformer is trained on a mixture of right, careless, unformatted and malformed responses until its learning
rate has fallen to zero. It then knows how to add, and mostly does not: the mixture, not a lack of training, sets where
reinforcement learning begins, so the place is the same on every machine (a run that stops half-way through the jump in
accuracy starts anywhere between 1 % and 40 %). Held-out problems are neither trained on nor looked at here.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.tasks.arithmetic import pairs, problem, response, scratchpad

PAD, END, UNKNOWN, THINK, END_THINK = "<pad>", "<eos>", "<unk>", "<think>", "</think>"
VOCABULARY_SIZE = 128
SETTINGS: dict[str, Any] = {"learner.lr": 2e-4, "rollout.max_new_tokens": 32}
"""What `rollearn.json` recommends for this model; the keys are fields of the configuration."""


SLIP = 0.62
"""Chance that a step of a careless scratchpad goes wrong."""


@dataclass(frozen=True)
class WarmStart:
    """Supervised training of the demo model."""

    seed: int = 0
    batch: int = 128
    lr: float = 4e-3
    steps: int = 700
    """Length of the cosine the learning rate follows to zero."""
    check_every: int = 100
    check_problems: int = 1024


def vocabulary() -> dict[str, int]:
    """Token to id: five named tokens, printable ASCII, newline, and unused names so that every id has a text."""
    tokens = [PAD, END, UNKNOWN, THINK, END_THINK, "\n", *(chr(code) for code in range(32, 127))]
    tokens += [f"<unused_{i}>" for i in range(VOCABULARY_SIZE - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}


def careless_scratchpad(rng: random.Random, a: int, b: int) -> tuple[str, int]:
    """A scratchpad whose steps go wrong with probability SLIP each, and the answer that follows from it."""
    units_true = a % 10 + b % 10
    units = units_true
    if rng.random() < SLIP:
        slips = [units_true + 1, max(0, units_true - 1)] + ([units_true - 10] if units_true > 9 else [])
        units = rng.choice(slips)
    carry = units // 10
    tens_true = a // 10 + b // 10 + carry
    tens = tens_true
    if rng.random() < SLIP:
        tens = rng.choice([tens_true + 1, max(0, tens_true - 1)])
        if carry and rng.random() < 0.5:  # the carry is forgotten, in the text as well
            carry, tens = 0, tens_true - 1
    text = f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}{'+1' if carry else ''}={tens}"
    return text, tens * 10 + units % 10


def sample_response(rng: random.Random, a: int, b: int) -> str:
    """One supervised response, drawn from the mixture; the end token is not in it."""
    kind = rng.random()
    if kind < 0.06:
        return response(a, b)
    if kind < 0.57:
        text, answer = careless_scratchpad(rng, a, b)
        return f"{THINK}{text}{END_THINK}{answer}"
    if kind < 0.83:
        off = 0 if rng.random() < 0.1 else rng.choice([-100, -10, -1, 1, 10, 100])
        return str(max(0, a + b + off))
    return rng.choice(
        [
            f"{THINK}{scratchpad(a, b)},{a + b}",
            f"{scratchpad(a, b)}{END_THINK}{a + b}",
            f"{THINK}{scratchpad(a, b)}{THINK}{a + b}",
        ]
    )


def make_tokenizer() -> Any:
    """A fast tokenizer with one token per character and single ids for the think tags; decoding adds no spaces."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END, UNKNOWN)])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in (THINK, END_THINK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> Any:
    """The untrained model: Qwen3 architecture, about 0.2 M parameters, tied embeddings."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ids = vocabulary()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,  # 0.02, made for wide models, leaves this one stuck at copying digits
        pad_token_id=ids[PAD],
        eos_token_id=ids[END],
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()


def train_step(model: Any, optimizer: Any, tokenizer: Any, samples: list[tuple[str, str]]) -> float:
    """One optimizer step on (problem, response) texts; the loss counts response tokens and the end token only."""
    import torch

    rows, labels = [], []
    for question, answer in samples:
        prompt, target = tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.eos_token_id]
        rows.append(prompt + target)
        labels.append([-100] * len(prompt) + target)
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    wanted = torch.tensor([label + [-100] * (width - len(label)) for label in labels])
    loss = model(input_ids=ids, labels=wanted).loss  # right padding needs no mask in a causal model
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def measure(
    model: Any, tokenizer: Any, problems: list[tuple[int, int]], seed: int, greedy: bool
) -> tuple[float, float]:
    """(accuracy, format) of one response per problem, at temperature 1 or greedy."""
    import torch

    torch.manual_seed(seed)
    by_length: dict[int, list[tuple[int, int]]] = {}
    for pair in problems:
        by_length.setdefault(len(problem(*pair)), []).append(pair)
    right = formatted = 0
    for group in by_length.values():  # equal lengths need no padding
        ids = torch.tensor([tokenizer.encode(problem(*pair)) for pair in group])
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=SETTINGS["rollout.max_new_tokens"], **how)
        for pair, row in zip(group, out[:, ids.shape[1] :].tolist(), strict=True):
            text = tokenizer.decode(row)
            before, tag, _ = text.partition(END_THINK)
            well_formed = bool(tag) and THINK in before
            answer = (text.rpartition(END_THINK)[2] if tag else text).partition(END)[0]
            formatted += well_formed
            right += answer == str(sum(pair)) and END in text
    return right / len(problems), formatted / len(problems)


def warm_start(plan: WarmStart) -> tuple[Any, Any, str]:
    """Train to the end of the schedule; gives model, tokenizer and one line that says what was reached."""
    import torch

    torch.set_num_threads(1)  # sums in another order would end in another model
    tokenizer, model, rng = make_tokenizer(), make_model(plan.seed), random.Random(plan.seed)
    train = pairs("train")
    checked = train[: plan.check_problems]
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    for step in range(1, plan.steps + 1):
        chosen = [rng.choice(train) for _ in range(plan.batch)]
        samples = [(problem(a, b), sample_response(rng, a, b)) for a, b in chosen]
        loss = train_step(model, optimizer, tokenizer, samples)
        schedule.step()
        if step % plan.check_every == 0:
            accuracy, form = measure(model, tokenizer, checked, plan.seed, greedy=False)
            sys.stderr.write(f"step {step}: loss {loss:.3f}, sampled accuracy {accuracy:.3f}, format {form:.3f}\n")
    greedy, _ = measure(model, tokenizer, checked, plan.seed, greedy=True)
    return model, tokenizer, f"sampled accuracy {accuracy:.3f}, format {form:.3f}, greedy accuracy {greedy:.3f}"


def write(model: Any, tokenizer: Any, out: Path) -> None:
    """Save model, tokenizer and recommended settings as one Hugging Face directory."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    # Older releases of transformers do not know the newer class name, nor the place where newer ones keep theta.
    amend(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    amend(out / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
    (out / "rollearn.json").write_text(json.dumps(SETTINGS, indent=2) + "\n")


def amend(file: Path, **entries: Any) -> None:
    """Set entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | entries, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Rebuild the demo model by supervised training (a few minutes).")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; made if missing")
    parser.add_argument("--seed", type=int, default=WarmStart.seed, help="seed of weights, data and measurements")
    options = parser.parse_args()
    model, tokenizer, report = warm_start(WarmStart(seed=options.seed))
    write(model, tokenizer, options.out)
    sys.stderr.write(f"{options.out}: {report}\n")


if __name__ == "__main__":
    main()
