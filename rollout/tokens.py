"""Think tags and end tokens: one id per tag for engine and learner alike, and a model directory that both can load.

A base model's tokenizer often splits `<think>` into pieces. The format reward counts tokens, so the tags are added as
single tokens; their rows in the embedding are spare ones where the model has them, else new ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.types import UserError

THINK, END_THINK = "<think>", "</think>"
RECORD = "prepared.json"
"""File in a prepared directory that says what it was made from."""
_SAMPLE = 2**20
_KEPT = ("rollearn.json", "LICENSE*", "NOTICE*")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose tokenizer has one id per tag."""

    path: str
    """Directory (or hub id) to load model and tokenizer from."""
    think_id: int
    """Id of <think>."""
    end_think_id: int
    """Id of </think>."""
    stop_ids: tuple[int, ...]
    """Ids that end a response."""
    warnings: tuple[str, ...] = ()
    """What the user should be told."""


def single_id(tokenizer: Any, text: str) -> int | None:
    """Id of a text that the tokenizer writes as one token wherever it stands, else None."""
    alone = tokenizer.encode(text, add_special_tokens=False)
    token: int | None = tokenizer.convert_tokens_to_ids(text)
    if token is None or token == tokenizer.unk_token_id or token not in alone:
        return None
    inside = tokenizer.encode(f"a{text}b", add_special_tokens=False)
    return token if inside.count(token) == 1 and tokenizer.decode([token]).strip() == text else None


def stop_token_ids(tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's end token and all of the generation config's, sorted."""
    ids: set[int] = set()
    for source in (tokenizer, generation_config):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    if not ids:
        raise UserError(
            "Neither the tokenizer nor generation_config.json names an end token, so no response would ever end.\n"
            "  Set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json."
        )
    return tuple(sorted(ids))


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a directory or hub id; code that comes with a model is never run."""
    from transformers import AutoTokenizer

    path = Path(model)
    if path.is_absolute() and not path.is_dir():
        raise UserError(f"--model {model}: there is no such directory.")
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--model {model}: its tokenizer cannot be loaded. {first}") from error


def prepare_model(model_dir: str | Path, out_dir: str | Path) -> PreparedModel:
    """The model as it is when its tags are single tokens, else a copy in `out_dir` with the tags added.

    A copy that was made from the same files is used again; nothing is written when nothing has to change.
    """
    model = str(model_dir)
    tokenizer = load_tokenizer(model)
    stops = stop_token_ids(tokenizer, _generation_config(model))
    tags = [single_id(tokenizer, tag) for tag in (THINK, END_THINK)]
    if tags[0] is not None and tags[1] is not None and max(tags[0], tags[1]) < _embedding_rows(model):
        return PreparedModel(model, tags[0], tags[1], stops)
    out = Path(out_dir)
    origin = _fingerprint(model)
    record = out / RECORD
    if record.is_file():
        made = json.loads(record.read_text())
        if made["origin"] != origin:
            raise UserError(
                f"{out} holds a model prepared from other files than {model}. Remove it or choose another place."
            )
        return PreparedModel(str(out), made["think_id"], made["end_think_id"], stops, tuple(made["warnings"]))
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and is no prepared model. Remove it or choose another place.")
    return _write_prepared(model, tokenizer, out, origin, stops)


def _write_prepared(model: str, tokenizer: Any, out: Path, origin: str, stops: tuple[int, ...]) -> PreparedModel:
    """Add the tags, save everything beside `out`, and only then give it its name."""
    pieces = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in (THINK, END_THINK)}
    missing = [tag for tag in (THINK, END_THINK) if single_id(tokenizer, tag) is None]
    think_id, end_think_id = add_tags(tokenizer)
    policy, grown = _with_rows(model, {think_id: pieces[THINK], end_think_id: pieces[END_THINK]})
    warnings = _warnings(model, missing, grown)
    part = out.with_name(f".{out.name}.part")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    generation = _generation_config(model)
    policy.generation_config = type(policy.generation_config).from_model_config(policy.config)
    policy.save_pretrained(part)
    if hasattr(generation, "to_diff_dict"):
        # Written as it was: saving through the model would refuse sampling settings that contradict each other.
        (part / "generation_config.json").write_text(generation.to_json_string(use_diff=True))
    tokenizer.save_pretrained(part)
    if Path(model).is_dir():
        for pattern in _KEPT:
            for file in Path(model).glob(pattern):
                shutil.copy2(file, part / file.name)
    made = {"origin": origin, "think_id": think_id, "end_think_id": end_think_id, "warnings": warnings}
    (part / RECORD).write_text(json.dumps(made, indent=2) + "\n")
    if out.exists():
        out.rmdir()
    part.rename(out)
    return PreparedModel(str(out), think_id, end_think_id, stops, tuple(warnings))


def add_tags(tokenizer: Any) -> tuple[int, int]:
    """Make each tag one token of the tokenizer, in place; gives (id of <think>, id of </think>).

    The tags are ordinary tokens, not special ones: decoding for people and for rewards keeps them.
    """
    from transformers import AddedToken

    tags = (THINK, END_THINK)
    missing = [tag for tag in tags if single_id(tokenizer, tag) is None]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in missing])
    ids = [single_id(tokenizer, tag) for tag in tags]
    if ids[0] is None or ids[1] is None:
        raise UserError("The tokenizer does not take <think> and </think> as single tokens. Use a model that has them.")
    return ids[0], ids[1]


def _with_rows(model: str, pieces: dict[int, list[int]]) -> tuple[Any, bool]:
    """(the model with a row for every tag, whether its embedding had to grow).

    A new tag starts as the mean of the pieces it used to be written with, in the input embedding and, where it is a
    matrix of its own, in the output one: about as likely, and about as meaningful, as the pieces were.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
    have = policy.get_input_embeddings().weight.shape[0]
    need = max(pieces) + 1
    if need > have:
        policy.resize_token_embeddings(need, mean_resizing=False)
    matrices = [policy.get_input_embeddings().weight]
    output = policy.get_output_embeddings()
    if output is not None and output.weight is not matrices[0]:
        matrices.append(output.weight)
    with torch.no_grad():
        for tag, parts in pieces.items():
            if parts == [tag] and tag < have:  # it was one token before, with a row of its own
                continue
            like = list(range(have)) if parts == [tag] else parts
            for matrix in matrices:
                matrix[tag] = matrix[like].float().mean(0).to(matrix.dtype)
            bias = getattr(output, "bias", None)
            if bias is not None:
                bias[tag] = bias[like].float().mean().to(bias.dtype)
    return policy, need > have


def _warnings(model: str, missing: Sequence[str], grown: bool) -> list[str]:
    where = "new rows of the embedding" if grown else "spare rows of the embedding"
    tags = " and ".join(missing)
    if not missing:
        return [f"The vocabulary of {model} was larger than its embedding; {where} were added for the think tags."]
    return [
        f"The tokenizer of {model} wrote {tags} in pieces; each is one token now, in {where}.",
        f"A model that never saw {tags} will not learn them from reinforcement learning alone: a token it never "
        "samples is never rewarded, and reward/format stays at 0. Fine-tune it on a few hundred formatted responses "
        "first, or end the prompts in <think>, or start from a model that was trained with the tags.",
    ]


def _embedding_rows(model: str) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)


def _generation_config(model: str) -> Any:
    """The generation config; a model without one is asked for its own end token."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


def _fingerprint(model: str) -> str:
    """What a prepared copy depends on: small files by content, weights by name, size, beginning and end."""
    state = hashlib.sha256()
    path = Path(model)
    if not path.is_dir():
        return hashlib.sha256(model.encode()).hexdigest()
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".jinja", ".model", ".txt"):
            state.update(f"{file.name}\x1f".encode() + file.read_bytes())
        elif file.suffix in (".safetensors", ".bin"):
            size = file.stat().st_size
            state.update(f"{file.name}\x1f{size}\x1f".encode())
            with file.open("rb") as weights:
                state.update(weights.read(_SAMPLE))
                weights.seek(max(size - _SAMPLE, 0))
                state.update(weights.read(_SAMPLE))
    return state.hexdigest()
