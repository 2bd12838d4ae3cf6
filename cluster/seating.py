"""The part of the plan about processes: how many, where each sits, and how that reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import PlanError
from cluster.placement import Asked, Demand, Layout, find, lay_out
from cluster.resources import Node, Resources
from cluster.run.config import Config

SHOWN_NODES = 8


def seat(config: Config, resources: Resources, groups: int) -> tuple[Layout, tuple[str, ...]]:
    """Seats for all processes of a run with `groups` groups per round, and what the user should know about them.

    PlanError with the table of need and have when they do not fit.
    """
    rollout = config.rollout
    for flag, value in (
        ("--rollout.engines", rollout.engines),
        ("--learner.ranks", config.learner.ranks),
        ("--rollout.tensor-parallel", rollout.tensor_parallel),
    ):
        if value is not None and value < 1:
            raise PlanError(f"{flag} {value}: must be at least 1.")
    name = chosen(config.cluster.placement, resources)
    asked = Asked(rollout.engines, config.learner.ranks, rollout.tensor_parallel, groups)
    engines, ranks = find(name).counts(asked, resources.nodes)
    layout = lay_out(name, Demand(engines, ranks, rollout.tensor_parallel), resources.nodes)
    return layout, tuple(_notes(layout, resources, groups))


def chosen(asked: str, resources: Resources) -> str:
    """The placement that `auto` means here, or the one that was asked for."""
    if asked != "auto":
        return asked
    return "colocated" if resources.gpus else "cpu"


def _notes(layout: Layout, resources: Resources, groups: int) -> list[str]:
    notes = []
    engines, ranks = len(layout.engines), len(layout.ranks)
    if layout.placement == "cpu" and max(engines, ranks) > resources.cpus:
        notes.append(f"{max(engines, ranks)} processes of a kind share {resources.cpus} cores: slower, not faster")
    if engines > groups:
        notes.append(f"{engines - groups} of {engines} engines have nothing to do: a round has {groups} groups")
    unused = sum(node.free_gpus for node in resources.nodes) - sum(bundle.gpus for bundle in layout.bundles)
    if layout.placement != "cpu" and unused:
        notes.append(f"{unused} of {resources.gpus} GPUs are not used")
    return notes


def layout_text(layout: Layout, nodes: Sequence[Node]) -> list[str]:
    """One line per node with someone on it; nodes beyond the first eight are counted."""
    lines = []
    for node in nodes:
        here = [bundle for bundle in layout.bundles if bundle.node == node.name]
        if here:
            engines = [bundle.engine for bundle in here if bundle.engine is not None]
            ranks = [rank for bundle in here for rank in bundle.ranks]
            gpus = sum(bundle.gpus for bundle in here)
            seated = [
                _numbers("engine", engines),
                _numbers("rank", ranks),
                f"{gpus} of {node.gpus} GPUs" if gpus else "",
            ]
            lines.append(f"{node.host or node.name}: {', '.join(filter(None, seated))}")
    more = len(lines) - SHOWN_NODES
    return lines if more <= 1 else [*lines[:SHOWN_NODES], f"and {more} more nodes"]


def _numbers(word: str, numbers: Sequence[int]) -> str:
    """`engines 0-3, 7`; nothing for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"{word}{'s' if len(numbers) > 1 else ''} {text}" if numbers else ""
