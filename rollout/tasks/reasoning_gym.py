"""Procedural tasks of the reasoning-gym library, each with its own scorer.

    --prompts reasoning-gym:chain_sum,gsm_symbolic
    --prompts reasoning-gym:chain_sum/size=5000/max_terms=3        options of a task after slashes

Rows are generated in a process of their own: some generators walk through Python sets, whose order depends on a hash
seed that only a new process can fix, and a resumed run must see the same rows.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import marshal
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from rollout.row_checks import SCORED_BY
from rollout.seeds import stable_hash
from rollout.types import UserError

NAME = "reasoning-gym"

TRAIN_SIZE = 2000
"""Training rows per task, unless its `size` says otherwise."""
DEADLINE = 900.0
"""Seconds the generation of all rows may take."""
_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the library with its options."""

    name: str
    """As the library calls it."""
    options: Mapping[str, Any]
    """Its options, `size` not included."""
    size: int
    """Training rows."""
    text: str
    """How it was written, options included."""

    @property
    def held_out(self) -> int:
        """Held-out rows: a tenth of the training rows."""
        return max(self.size // 10, 1)


def parse(spec: str) -> list[Task]:
    """Tasks out of `name[/option=value...],name...`."""
    tasks = []
    for text in filter(None, (piece.strip() for piece in spec.split(","))):
        name, *pieces = text.split("/")
        options: dict[str, Any] = {}
        for piece in pieces:
            key, equals, value = piece.partition("=")
            if not equals or not key:
                raise UserError(f"--prompts {NAME}:{spec}: {piece!r} is not option=value.")
            options[key] = _value(value)
        size = options.pop("size", TRAIN_SIZE)
        if not isinstance(size, int) or size < 1:
            raise UserError(f"--prompts {NAME}:{spec}: size of {name} is {size!r}; a number of rows is needed.")
        tasks.append(Task(name, options, size, text))
    if not tasks:
        raise UserError(f"--prompts {NAME}: names no task. Write for example {NAME}:chain_sum,gsm_symbolic.")
    if len({task.name for task in tasks}) < len(tasks):
        raise UserError(f"--prompts {NAME}:{spec} names a task twice.")
    return tasks


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def check(spec: str) -> None:
    """Spelling, and whether the library is there; nothing is generated."""
    parse(spec)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"--prompts {NAME}:... needs the reasoning-gym library: pip install 'rollearn[tasks]'.")


def rows(spec: str, *, seed: int, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Generated rows. Held-out rows are the same for every seed, and no training row asks what one of them asks."""
    check(spec)
    return [dict(row) for row in _generated(spec, seed)[split]]


def __getattr__(name: str) -> Any:
    """`score`, the scorer of these rows: whoever takes it is about to use it, so the library is loaded now.

    It takes seconds, which belong to the start of a grading process and not to the deadline of its first answer.
    """
    if name != "score":
        raise AttributeError(name)
    import reasoning_gym  # noqa: F401

    from rollout.tasks.reasoning_gym_scorers import score

    return score


@functools.lru_cache(maxsize=4)
def _generated(spec: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Both splits, made by this module running in a fresh process with a fixed hash seed."""
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    shown = spec if len(spec) <= 80 else f"{spec[:77]}..."
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, spec, str(seed)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"--prompts {NAME}:{shown}: generating the rows took more than {DEADLINE:.0f} s.\n"
            f"  Ask for fewer of a slow task: {NAME}:NAME/size=200"
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"Generating rows of {NAME}:{shown} failed: {''.join(last) or done.returncode}")
    result: dict[str, Any] = marshal.loads(done.stdout)
    if "error" in result:
        raise UserError(f"--prompts {NAME}:{shown}: {result['error']}")
    return result


def _generate(spec: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    result: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for task in parse(spec):
        held_out = _entries(task, stable_hash(NAME, "eval", task.name) % _SEEDS, task.held_out, set())
        asked = {row["prompt"] for row in held_out}
        train = _entries(task, stable_hash(NAME, "train", seed, task.name) % _SEEDS, task.size, asked)
        if not train:
            raise UserError(f"{task.name} has so few different questions that all are held out; give it other options.")
        result["eval"] += held_out
        result["train"] += train
    return result


def _entries(task: Task, seed: int, size: int, asked: set[str]) -> list[dict[str, Any]]:
    """Rows whose questions are not among `asked` and not repeated, and whose own answers can be scored."""
    from rollout.tasks.reasoning_gym_scorers import acceptable, audit, make_dataset

    dataset = make_dataset(task.name, {**task.options, "seed": seed, "size": size})
    known = set(asked)
    found: list[dict[str, Any]] = []
    for index in range(size):
        entry = plain(dataset[index], task.name)
        question = entry["question"]
        if question in known or not acceptable(task.name, entry["answer"]):
            continue
        known.add(question)
        if len(found) < 3:
            audit(task.text, entry)
        digest = hashlib.sha256(question.encode()).hexdigest()[:12]
        found.append(
            {
                "prompt": question,
                "answer": entry["answer"] or "",
                "row_id": f"{task.name}-{index}-{digest}",
                "domain": task.name,
                SCORED_BY: NAME,
                "task": task.text,
                "entry": entry,
            }
        )
    return found


def plain(value: Any, task: str) -> Any:
    """The value in Python's own types, so that it travels between processes; what its scorer compares stays equal."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {plain(key, task): plain(item, task) for key, item in value.items()}
    for collection in (list, tuple):
        if isinstance(value, collection):
            return collection(plain(item, task) for item in value)
    if isinstance(value, Fraction):
        return str(value)  # what a question was made of; scorers compare answers, which are text
    if hasattr(value, "item") and hasattr(value, "dtype"):
        return plain(value.item(), task)
    raise UserError(f"Rows of {task} hold a {type(value).__name__}, which cannot travel between processes.")


def main() -> None:
    """`python -m rollout.tasks.reasoning_gym SPEC SEED`: writes both splits to standard output, in marshal's format."""
    output = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints must not get between the data
    result: dict[str, Any]
    try:
        result = dict(_generate(sys.argv[1], int(sys.argv[2])))
    except UserError as error:
        result = {"error": str(error)}
    with os.fdopen(output, "wb") as file:
        file.write(marshal.dumps(result))


if __name__ == "__main__":
    main()
