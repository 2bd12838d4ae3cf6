"""What is needed and what there is, side by side, when processes do not fit; with the nearest that does. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.errors import PlanError
from cluster.resources import Node

if TYPE_CHECKING:
    from cluster.placement import Demand, Placement

SHOWN = 6


def does_not_fit(name: str, placement: Placement, demand: Demand, nodes: Sequence[Node]) -> PlanError:
    """The refusal of a demand: the table, why not, and what to type."""
    lines = [f"--cluster.placement {name} with {_people(demand)} does not fit."]
    lines += table_of(name, placement, demand, nodes)
    lines.append(f"  {_advice(name, placement, demand, nodes)}")
    return PlanError("\n".join(lines))


def table_of(name: str, placement: Placement, demand: Demand, nodes: Sequence[Node]) -> list[str]:
    """The lines of need and have, of the nodes, and of what stands in the way."""
    if placement.ON_GPUS:
        rows, reasons = _gpu_rows(name, demand, nodes), _gpu_reasons(name, demand, nodes)
    else:
        rows, reasons = _core_rows(demand, nodes), _core_reasons(demand, nodes)
    return [*_table(rows), *_nodes(nodes), *(f"  {reason}" for reason in reasons)]


def too_few_cores(name: str, node: Node, processes: int, per_core: int) -> PlanError:
    """The refusal when GPUs would do, but a node has not the cores for its processes."""
    rows: list[tuple[str, ...]] = [
        ("processes", f"{processes}", f"{int(per_core * node.free_cpus)}", f"{per_core * node.cpus}"),
        ("cores", f"{-(-processes // per_core)}", f"{node.free_cpus:g}", f"{node.cpus}"),
    ]
    return PlanError(
        "\n".join(
            [
                f"--cluster.placement {name}: too few cores for its processes on node {node.host or node.name}.",
                *_table(rows),
                f"  At most {per_core} processes share a core. Give the node more cores, or ask for fewer processes.",
            ]
        )
    )


def nearest(placement: Placement, demand: Demand, nodes: Sequence[Node]) -> tuple[int, int] | None:
    """(engines, ranks) that fit and differ least, by their ratio to what was asked; None when nothing fits."""
    best: tuple[float, int, int] | None = None
    for engines in range(1, demand.engines + 1):
        fitting = placement.ranks_beside(engines, demand.tensor_parallel, nodes)
        if not fitting:
            continue
        ranks = max(fitting.start, min(demand.ranks, fitting.stop - 1))
        distance = math.log(demand.engines / engines) + abs(math.log(demand.ranks / ranks))
        if best is None or distance <= best[0]:
            best = (distance, engines, ranks)
    return best and best[1:]


def _people(demand: Demand) -> str:
    each = f" of {demand.tensor_parallel} devices" if demand.tensor_parallel > 1 else ""
    return f"{_count(demand.engines, 'engine')}{each} and {_count(demand.ranks, 'rank')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _gpu_rows(name: str, demand: Demand, nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    size = demand.tensor_parallel
    engine_gpus = demand.engines * size
    need = max(engine_gpus, demand.ranks) if name == "colocated" else engine_gpus + demand.ranks
    rows: list[tuple[str, ...]] = [
        ("GPUs", f"{need}", f"{sum(n.free_gpus for n in nodes)}", f"{sum(n.gpus for n in nodes)}"),
        (
            f"engines, {_count(size, 'GPU')} on one node" if size > 1 else "  for engines",
            f"{demand.engines}",
            f"{sum(n.free_gpus // size for n in nodes)}",
            f"{sum(n.gpus // size for n in nodes)}",
        ),
    ]
    if name != "colocated":
        rows.append(
            (
                "GPUs for ranks beside them" if size > 1 else "  for ranks beside them",
                f"{demand.ranks}",
                f"{max(0, sum(n.free_gpus for n in nodes) - engine_gpus)}",
                f"{max(0, sum(n.gpus for n in nodes) - engine_gpus)}",
            )
        )
    return rows


def _core_rows(demand: Demand, nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    need = demand.engines * demand.tensor_parallel + demand.ranks
    return [
        ("processes, 8 per core", f"{need}", f"{sum(int(8 * n.free_cpus) for n in nodes)}", f"{8 * _cores(nodes)}"),
        ("cores", f"{-(-need // 8)}", f"{sum(n.free_cpus for n in nodes):g}", f"{_cores(nodes)}"),
    ]


def _cores(nodes: Sequence[Node]) -> int:
    return sum(node.cpus for node in nodes)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Without the column of what is free where nothing is held by others."""
    head = ("", "need", "have", "in all")
    table = [head, *rows] if any(row[2] != row[3] for row in rows) else [(*row[:2], row[3]) for row in rows]
    if table[0] is not head:
        table.insert(0, head[:3])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        numbers = "".join(f"{cell:>{width + 3}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"  {row[0]:<{widths[0]}}{numbers}")
    return lines


def _nodes(nodes: Sequence[Node]) -> list[str]:
    """What each node has, equal ones together; nothing for a single machine that nobody else uses."""
    if len(nodes) == 1 and not nodes[0].busy_gpus and not nodes[0].busy_cpus:
        return []
    kinds = Counter((node.gpus, node.free_gpus, node.cpus, node.free_cpus) for node in nodes)
    lines = []
    for (gpus, free_gpus, cpus, free_cpus), count in kinds.most_common(SHOWN):
        held = (
            " (free now: " + f"{free_gpus} GPUs, {free_cpus:g} cores)" if (free_gpus, free_cpus) != (gpus, cpus) else ""
        )
        lines.append(f"  {_count(count, 'node')} with {_count(gpus, 'GPU')} and {_count(cpus, 'core')}{held}")
    if len(kinds) > SHOWN:
        lines.append(f"  and {sum(kinds.values()) - sum(c for _, c in kinds.most_common(SHOWN))} other nodes")
    return lines


def _gpu_reasons(name: str, demand: Demand, nodes: Sequence[Node]) -> list[str]:
    size, reasons = demand.tensor_parallel, []
    largest = max((node.gpus for node in nodes), default=0)
    if not largest:
        return ["There is no GPU."]
    if size > largest:
        reasons.append(f"An engine sits within one node, and the largest node has {_count(largest, 'GPU')}.")
    held = sum(node.gpus - node.free_gpus for node in nodes)
    if held:
        reasons.append(f"{_count(held, 'GPU')} of this cluster are held by other jobs.")
    if name == "colocated" and demand.ranks < demand.engines * size:
        reasons.append(f"Colocated engines live on the GPUs of ranks: that takes {demand.engines * size} ranks.")
    return reasons


def _core_reasons(demand: Demand, nodes: Sequence[Node]) -> list[str]:
    held = sum(node.cpus - node.free_cpus for node in nodes)
    return [f"{held:g} cores of this cluster are held by other jobs."] if held else []


def _advice(name: str, placement: Placement, demand: Demand, nodes: Sequence[Node]) -> str:
    fit = nearest(placement, demand, nodes)
    if fit is not None:
        return f"Nearest that fits: --rollout.engines {fit[0]} --learner.ranks {fit[1]}"
    largest = max((node.free_gpus for node in nodes), default=0)
    total = sum(node.free_gpus for node in nodes)
    if not placement.ON_GPUS:
        return "Nothing fits now: wait until cores are free."
    if not largest:
        held = any(node.gpus for node in nodes)
        return "Wait until GPUs are free, or use --cluster.placement cpu." if held else "Use --cluster.placement cpu."
    if demand.tensor_parallel > largest:
        return f"Nearest that fits: --rollout.tensor-parallel {largest}"
    if name == "separate" and demand.tensor_parallel >= total > 1:
        return f"Nearest that fits: --rollout.tensor-parallel {total - 1}, or --cluster.placement colocated"
    return "Nearest that fits: --cluster.placement colocated"
