"""Before anything is loaded: does every node of the plan see the model and the run directory at the same path?"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import look_around
from cluster.errors import PlanError
from cluster.resources import Node
from cluster.survey import ray_nodes
from cluster.waiting import fetch_those

SECONDS = 60.0
"""A node may take this long to start the process that looks; the code of the run is sent to it first."""


def check_paths(names: Sequence[str], folder: Path, model: str) -> None:
    """Have the nodes of a plan (ids of Ray) look for themselves. PlanError names every node and what it lacks."""
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray_nodes() if node.name in names and node.name != here]
    if not others:
        return
    mark = folder / f".seen-by-all-{secrets.token_hex(8)}"
    mark.touch(mode=0o600)
    try:
        asked = {node.name: _ask(node, mark, model) for node in others}
        answers = fetch_those(asked, SECONDS)
    finally:
        mark.unlink()
    if complaint := complaints(others, answers, folder, model):
        raise PlanError(complaint)


def complaints(nodes: Sequence[Node], answers: Mapping[str, tuple[bool, bool]], folder: Path, model: str) -> str:
    """What is wrong, for people; nothing when all is well. Pure. An answer: (same run directory, model is there).

    A node without an answer could not start a process.
    """
    silent = [node.host for node in nodes if node.name not in answers]
    other = [node.host for node in nodes if not answers.get(node.name, (True, True))[0]]
    without = [node.host for node in nodes if not answers.get(node.name, (True, True))[1]]
    lines = []
    if other:
        lines.append(
            f"{folder} is not the same directory on {_some(other)}, or cannot be written to there: every rank writes "
            f"its part of a checkpoint into it, and every actor its log.\n"
            f"  It must be on a disk that all nodes see at the same path (--run; for eval the current directory)."
        )
    if without:
        lines.append(
            f"There is no model at {model} on {_some(without)}: every engine and rank reads it for itself.\n"
            f"  Copy it to the same path there, or use --model on a disk that all nodes see at the same path."
        )
    if silent:
        lines.append(
            f"{_some(silent)} started no process within {SECONDS:g} s.\n  Is rollearn installed there, with the same "
            f"Python as here, and is the node well (ray status)?"
        )
    return "\n".join(lines)


def _ask(node: Node, mark: Path, model: str) -> ray.ObjectRef:
    pinned = NodeAffinitySchedulingStrategy(node.name, soft=False)
    return look_around.options(scheduling_strategy=pinned).remote(str(mark), model)


def _some(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:5])
    word = "node" if len(hosts) == 1 else "nodes"
    return f"{word} {shown}" + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
