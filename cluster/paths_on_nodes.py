"""Before a node is used: does it see the model and the run directory at the same path as the others?"""

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


class Sight:
    """What every node sees; each is asked once, when it is to be used for the first time."""

    def __init__(self, folder: Path, model: str) -> None:
        """`folder` is the run directory, `model` a directory too, or a hub id."""
        self._folder, self._model = folder, model
        self._answers: dict[str, tuple[bool, bool]] = {}

    def require(self, names: Sequence[str]) -> None:
        """PlanError when one of these nodes (ids of Ray) does not see both; it names each and what it lacks."""
        others = [node for node in ray_nodes() if node.name in names]
        self._ask(others)
        if complaint := complaints(others, self._answers, self._folder, self._model):
            raise PlanError(complaint)

    def of(self, nodes: Sequence[Node]) -> list[Node]:
        """Those of the nodes that can be used. One that starts no process in time is not asked again."""
        self._ask(nodes)
        for node in nodes:
            self._answers.setdefault(node.name, (False, False))
        return [node for node in nodes if all(self._answers[node.name])]

    def _ask(self, nodes: Sequence[Node]) -> None:
        self._answers.setdefault(ray.get_runtime_context().get_node_id(), (True, True))
        new = [node for node in nodes if node.name not in self._answers]
        if not new:
            return
        mark = self._folder / f".seen-by-all-{secrets.token_hex(8)}"
        mark.touch(mode=0o600)
        try:
            self._answers |= fetch_those({node.name: _look(node, mark, self._model) for node in new}, SECONDS)
        finally:
            mark.unlink()


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


def _look(node: Node, mark: Path, model: str) -> ray.ObjectRef:
    pinned = NodeAffinitySchedulingStrategy(node.name, soft=False)
    return look_around.options(scheduling_strategy=pinned).remote(str(mark), model)


def _some(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:5])
    word = "node" if len(hosts) == 1 else "nodes"
    return f"{word} {shown}" + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
