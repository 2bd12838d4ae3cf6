"""Prompts: read, checked row by row, tokenised, split, and handed out in an order that can be repeated.

`check_prompts` says early what can be said without a tokenizer; `load_prompt_sets` gives training and held-out prompts
or one report of everything that is wrong. The order of training is in `stream.py`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import DataConfig, EvalConfig
from rollout.encoding import encode, too_long
from rollout.problems import BadRows, Problem, report
from rollout.row_checks import SCORED_BY, Candidate, examine, find_keys
from rollout.seeds import stable_hash
from rollout.tasks import Source, Split, source, sources
from rollout.tasks.files import READERS, RawRow, read_file
from rollout.tasks.folders import read_folder, saved_dataset
from rollout.types import Prompt, UserError

MIN_HELD_OUT = 10
"""Fewer rows than this say nothing about a policy: a smaller data set is evaluated on its training rows."""
HELD_OUT_SHARE = 10
"""At most one row in this many is set aside."""

SPLITS: tuple[Split, ...] = ("train", "eval")

VerifyGold = Callable[[str], bool]
"""Says whether an answer, given as the response's final answer, is graded right."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that are fine, and how they came about."""

    spec: str
    """What the user asked for."""
    prompts: tuple[Prompt, ...]
    """In the order of their source."""
    rows: int = 0
    """Rows that were read."""
    left_out: int = 0
    """Rows left out because of problems (--data.skip-bad-rows)."""
    notes: tuple[str, ...] = ()
    """What the user should be told."""

    @property
    def digest(self) -> str:
        """Hash of ids, texts and answers in order: a run resumes only on the same."""
        state = hashlib.sha256()
        for prompt in self.prompts:
            state.update("\x1f".join((prompt.row_id, prompt.text, prompt.answer)).encode() + b"\x1e")
        return state.hexdigest()

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, sorted."""
        return tuple(sorted({prompt.domain for prompt in self.prompts}))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(prompt.token_ids) for prompt in self.prompts), default=0)


@dataclass(frozen=True, slots=True)
class PromptSets:
    """What a run trains on and what it is measured on."""

    train: PromptSet
    held_out: PromptSet


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Rows of one source after all checks."""

    spec: str
    pairs: list[tuple[Candidate, Prompt]]
    rows: int
    problems: list[Problem]
    notes: list[str]

    def prompt_set(self, prompts: Sequence[Prompt], notes: Sequence[str] = ()) -> PromptSet:
        """A part of the prompts as a set."""
        left_out = len({problem.index for problem in self.problems})
        said = [*self.notes, f"{left_out} of {self.rows} rows were left out."] if left_out else self.notes
        return PromptSet(self.spec, tuple(prompts), self.rows, left_out, (*said, *notes))


def find_source(spec: str) -> tuple[Source | None, str]:
    """(source, what it is asked for), or (None, path) for files and directories."""
    name, colon, rest = spec.partition(":")
    name = name if name in sources() else name.replace("_", "-")
    path = Path(spec)
    if name in sources() and (colon or not path.is_file()):
        return source(name), rest
    if path.is_dir() and saved_dataset(path):
        return source("hf"), spec
    if path.exists():
        return None, spec
    if path.suffix.lower() in READERS:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], 1)
        meant = f" Did you mean {path.with_name(near[0])}?" if near else ""
        raise UserError(f"--prompts {spec}: there is no such file.{meant}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        raise UserError(f"--prompts {spec}: there is no such file. For a data set on the Hugging Face hub: hf:{spec}")
    known = ", ".join(sorted(sources()))
    raise UserError(f"--prompts {spec}: neither a file nor a source of prompts. Sources: {known}.")


def read_rows(spec: str, *, seed: int = 0, split: Split = "train") -> list[RawRow]:
    """Rows as they stand in their source, unreadable ones included; a single file has rows for training only."""
    found, rest = find_source(spec)
    if found is None:
        path = Path(rest)
        return read_folder(path, split) if path.is_dir() else read_file(path) if split == "train" else []
    rows = found.rows(rest, seed=seed, split=split)
    return [
        RawRow(f"{spec} row {i + 1}", i, dict(row), row_id=str(row.get("row_id", ""))) for i, row in enumerate(rows)
    ]


def check_prompts(
    spec: str,
    data: DataConfig,
    *,
    answer_required: bool = True,
    verify_gold: VerifyGold | None = None,
    vocabulary: Path | None = None,
    splits: Sequence[Split] = SPLITS,
) -> int | None:
    """What can be found out in a moment, without transformers, network or generator: bad rows raise `BadRows`.

    `vocabulary`: the model's tokenizer.json, if there is one; prompts that are too long before any template are named.
    Returns the number of rows of files, held-out ones included; None for sources of which only the spelling is checked.
    """
    found, rest = find_source(spec)
    if found is not None:
        check = getattr(sys.modules[found.rows.__module__], "check", None)
        if check is not None:
            check(rest)
        if not Path(rest).is_dir():
            return None
    count, texts, problems = 0, [], []
    for split in splits:
        rows = read_rows(spec, split=split)
        keys, _ = find_keys(spec, rows, data, answer_required)
        candidates, faults, _ = examine(rows, keys, data, answer_required)
        if not data.skip_bad_rows:
            faults += _unverified(candidates, verify_gold) + too_long(candidates, vocabulary, data.max_prompt_tokens)
        if faults:
            texts.append(f"{spec}: {report(faults, len(rows))}")
        problems += faults
        count += len(rows)
    if problems and not data.skip_bad_rows:
        raise BadRows("\n".join(texts), problems)
    return count


def load_prompts(
    spec: str,
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    split: Split,
    held_out: int = 0,
    answer_required: bool = True,
    verify_gold: VerifyGold | None = None,
) -> PromptSet:
    """One split. `held_out` rows are set aside from a source that has no held-out rows of its own; 0 sets none aside.

    With nothing set aside, the `eval` split of such a source is all of it (a file given for evaluation). Held-out
    prompts come in the order of a hash of their text: the first n are the same fair sample everywhere.
    """
    own = read_rows(spec, seed=seed, split=split)
    if split == "eval" and own:
        loaded = _load(spec, own, data, tokenizer, answer_required, verify_gold)
        _raise_problems([loaded], data)
        return loaded.prompt_set(_by_hash(loaded.pairs)[: held_out or None])
    rows = own or read_rows(spec, seed=seed, split="train")
    loaded = _load(spec, rows, data, tokenizer, answer_required, verify_gold)
    _raise_problems([loaded], data)
    if not held_out or (split == "train" and _has_own_split(spec, seed)):
        return loaded.prompt_set(_by_hash(loaded.pairs) if split == "eval" else [prompt for _, prompt in loaded.pairs])
    train, evaluation, notes = _set_aside(loaded.pairs, held_out)
    return loaded.prompt_set(train if split == "train" else evaluation, notes)


def load_prompt_sets(
    spec: str,
    data: DataConfig,
    evaluation: EvalConfig,
    tokenizer: Any,
    *,
    seed: int,
    answer_required: bool = True,
    verify_gold: VerifyGold | None = None,
) -> PromptSets:
    """Training and held-out prompts of a run; all problems of both are in one report.

    Held out are, in this order: --eval.prompts, the source's own held-out rows, rows set aside by a hash of the
    prompt. Without evaluation (--eval.every 0) nothing is held out.
    """

    def load(which: str, rows: list[RawRow]) -> _Loaded:
        return _load(which, rows, data, tokenizer, answer_required, verify_gold)

    train = load(spec, read_rows(spec, seed=seed))
    other: _Loaded | None = None
    if evaluation.wanted:
        where = evaluation.prompts or spec
        rows = read_rows(where, seed=seed, split="eval")
        if evaluation.prompts and not rows:
            rows = read_rows(where, seed=seed)
        other = load(where, rows) if rows else None
    _raise_problems([train, *([other] if other else [])], data)
    everything = [prompt for _, prompt in train.pairs]
    if not evaluation.wanted:
        return PromptSets(train.prompt_set(everything), PromptSet(spec, ()))
    if other is None:
        kept, aside, notes = _set_aside(train.pairs, evaluation.size)
        return PromptSets(train.prompt_set(kept, notes), PromptSet(spec, tuple(aside), train.rows))
    trained = {candidate.question for candidate, _ in train.pairs}
    shared = sum(candidate.question in trained for candidate, _ in other.pairs)
    leak = [f"{shared} of the held-out prompts are trained on as well: their accuracy is no proof."] if shared else []
    return PromptSets(train.prompt_set(everything), other.prompt_set(_by_hash(other.pairs)[: evaluation.size], leak))


def _has_own_split(spec: str, seed: int) -> bool:
    found, _ = find_source(spec)
    own = (found is not None or Path(spec).is_dir()) and read_rows(spec, seed=seed, split="eval")
    return bool(own)


def _load(
    spec: str,
    rows: list[RawRow],
    data: DataConfig,
    tokenizer: Any,
    answer_required: bool,
    verify_gold: VerifyGold | None,
) -> _Loaded:
    keys, notes = find_keys(spec, rows, data, answer_required)
    candidates, problems, more = examine(rows, keys, data, answer_required)
    pairs, unusable, said = encode(candidates, tokenizer, data)
    wrong = _unverified(candidates, verify_gold)
    bad = {problem.index for problem in wrong}
    pairs = [pair for pair in pairs if pair[0].index not in bad]
    return _Loaded(spec, pairs, len(rows), problems + unusable + wrong, [*notes, *more, *said])


def _unverified(candidates: Sequence[Candidate], verify_gold: VerifyGold | None) -> list[Problem]:
    if verify_gold is None:
        return []
    wrong = [c for c in candidates if c.answer and SCORED_BY not in c.columns and not verify_gold(c.answer)]
    kind, text = "gold does not verify", "the answer {!r} is not graded right itself"
    return [Problem(c.where, c.index, kind, text.format(c.answer[:80])) for c in wrong]


def _raise_problems(parts: Sequence[_Loaded], data: DataConfig) -> None:
    faulty = [part for part in parts if part.problems]
    if faulty and not data.skip_bad_rows:
        texts = [f"{part.spec}: {report(part.problems, part.rows)}" for part in faulty]
        raise BadRows("\n".join(texts), [problem for part in faulty for problem in part.problems])
    for part in parts:
        if not part.pairs:
            raise BadRows(f"{part.spec}: no row is left. {report(part.problems, part.rows)}", part.problems)


def _order(candidate: Candidate) -> int:
    """Place of a question in an order that depends on its text only: the same rows are held out in every run."""
    return stable_hash("held-out", candidate.question)


def _by_hash(pairs: Sequence[tuple[Candidate, Prompt]]) -> list[Prompt]:
    """Prompts in the order of their hashes: any first part of the list is a fair sample, the same one every time."""
    return [prompt for _, prompt in sorted(pairs, key=lambda pair: _order(pair[0]))]


def _set_aside(pairs: Sequence[tuple[Candidate, Prompt]], size: int) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """(training prompts, held-out prompts, notes). Rows that ask the same are always on the same side."""
    everything = [prompt for _, prompt in pairs]
    room = min(size, len(pairs) // HELD_OUT_SHARE)
    by_question: dict[str, list[int]] = {}
    for candidate, _ in sorted(pairs, key=lambda pair: _order(pair[0])):
        by_question.setdefault(candidate.question, []).append(candidate.index)
    chosen: set[int] = set()
    for indices in by_question.values():
        if len(chosen) + len(indices) <= room:
            chosen.update(indices)
    if len(chosen) < min(size, MIN_HELD_OUT):
        note = f"{len(pairs)} prompts are too few to hold any out: evaluation uses the training prompts themselves."
        return everything, _by_hash(pairs)[:size], [note]
    kept = [prompt for candidate, prompt in pairs if candidate.index not in chosen]
    aside = _by_hash([pair for pair in pairs if pair[0].index in chosen])
    return kept, aside, [f"{len(aside)} of {len(pairs)} prompts are held out for evaluation, by a hash of their text."]
