"""Where engines and ranks sit, for machines that exist only on paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import PlanError
from cluster.placement import PROCESSES_PER_CORE, Asked, Demand, Layout, find, lay_out, names
from cluster.resources import Node, sum_of
from cluster.run.cli import apply_settings
from cluster.run.config import Config
from cluster.seating import layout_text, seat

GIB = 1 << 30


def box(name: str, gpus: int, cpus: int = 96, **busy: float) -> Node:
    return Node(name, cpus=cpus, gpus=gpus, memory=512 * GIB, **busy)  # type: ignore[arg-type]


def boxes(gpus: int) -> list[Node]:
    """So many GPUs in nodes of 8."""
    return [box(f"node-{start // 8}", min(8, gpus - start)) for start in range(0, gpus, 8)]


def check(layout: Layout, demand: Demand, nodes: Sequence[Node]) -> None:
    """What holds for any layout: everyone has one seat, and no node gives more than it has."""
    assert layout.engines == tuple(range(demand.engines))
    assert layout.ranks == tuple(range(demand.ranks))
    assert sum(len(bundle.ranks) for bundle in layout.bundles) == demand.ranks
    gpus: Counter[str] = Counter()
    cpus: Counter[str] = Counter()
    for bundle in layout.bundles:
        gpus[bundle.node] += bundle.gpus
        cpus[bundle.node] += bundle.cpus  # type: ignore[assignment]
        assert bundle.processes
        if bundle.engine is not None and bundle.gpus:
            assert bundle.gpus == demand.tensor_parallel, "an engine has its devices in one piece, so on one node"
    for node in nodes:
        assert gpus[node.name] <= node.free_gpus
        assert cpus[node.name] <= node.free_cpus + 1e-6
    assert all(bundle.share >= 1 / PROCESSES_PER_CORE - 1e-4 for bundle in layout.bundles)
    assert set(gpus) <= {node.name for node in nodes}


def by_default(name: str, nodes: Sequence[Node], tensor_parallel: int = 1, groups: int = 512) -> tuple[Layout, Demand]:
    engines, ranks = find(name).counts(Asked(None, None, tensor_parallel, groups), nodes)
    demand = Demand(engines, ranks, tensor_parallel)
    return lay_out(name, demand, nodes), demand


def spans(layout: Layout) -> tuple[int, int]:
    """(nodes with engines, nodes with ranks)."""
    return (
        len({bundle.node for bundle in layout.bundles if bundle.engine is not None}),
        len({bundle.node for bundle in layout.bundles if bundle.ranks}),
    )


def test_the_placements_are_the_files_of_the_folder() -> None:
    assert names() == ("colocated", "cpu", "separate")
    with pytest.raises(PlanError, match="Choose one of: colocated, cpu, separate"):
        find("seperate")


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "engines", "ranks", "engine_nodes", "rank_nodes"),
    [
        (2, 1, 1, 1, 1, 1),
        (8, 1, 4, 4, 1, 1),
        (8, 2, 2, 4, 1, 1),
        (8, 4, 1, 4, 1, 1),
        (64, 1, 32, 32, 4, 4),
        (64, 2, 16, 32, 4, 4),
        (64, 8, 4, 32, 4, 4),
        (512, 1, 256, 256, 32, 32),
        (512, 8, 32, 256, 32, 32),
    ],
)
def test_separate_gives_half_of_the_gpus_to_the_ranks_and_whole_nodes_to_both(
    gpus: int, tensor_parallel: int, engines: int, ranks: int, engine_nodes: int, rank_nodes: int
) -> None:
    nodes = boxes(gpus)
    layout, demand = by_default("separate", nodes, tensor_parallel)
    check(layout, demand, nodes)
    assert (demand.engines, demand.ranks) == (engines, ranks)
    assert spans(layout) == (engine_nodes, rank_nodes)
    assert sum(bundle.gpus for bundle in layout.bundles) == gpus
    assert all(bundle.engine is None or not bundle.ranks for bundle in layout.bundles)


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "engines"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (2, 2, 1),
        (8, 1, 8),
        (8, 4, 2),
        (8, 8, 1),
        (64, 1, 64),
        (64, 8, 8),
        (512, 1, 512),
        (512, 4, 128),
    ],
)
def test_colocated_puts_a_rank_on_every_gpu_and_engines_on_the_gpus_of_ranks(
    gpus: int, tensor_parallel: int, engines: int
) -> None:
    nodes = boxes(gpus)
    layout, demand = by_default("colocated", nodes, tensor_parallel)
    check(layout, demand, nodes)
    assert (demand.engines, demand.ranks) == (engines, gpus)
    for bundle in layout.bundles:
        if bundle.engine is not None:
            assert len(bundle.ranks) == tensor_parallel
            assert bundle.engine_gpus == 0
            assert bundle.rank_gpus == 1
    assert [bundle.ranks[0] for bundle in layout.bundles] == sorted(bundle.ranks[0] for bundle in layout.bundles)
    order = [layout.of_rank(rank).node for rank in range(gpus)]
    assert sum(a != b for a, b in pairwise(order)) == len(nodes) - 1, "neighbouring ranks share a node"


@pytest.mark.parametrize(("cpus", "each"), [((2,), 2), ((1,), 1), ((96,), 2), ((1, 1), 2), ((2, 2), 2)])
def test_cpu_starts_two_of_each_and_fills_a_node_before_the_next(cpus: tuple[int, ...], each: int) -> None:
    nodes = [box(f"node-{i}", 0, count) for i, count in enumerate(cpus)]
    layout, demand = by_default("cpu", nodes)
    check(layout, demand, nodes)
    assert (demand.engines, demand.ranks) == (each, each)
    assert all(layout.of_engine(i).node == layout.of_rank(i).node for i in range(each))
    assert spans(layout)[0] == (2 if cpus == (1, 1) else 1)


def test_a_round_of_one_group_takes_one_engine_whatever_there_is() -> None:
    for name, nodes in (("cpu", [box("laptop", 0, 8)]), ("colocated", boxes(8)), ("separate", boxes(8))):
        assert by_default(name, nodes, groups=1)[1] == Demand(1, 1, 1)


def test_uneven_nodes_keep_tensor_parallel_engines_whole_and_use_what_is_left_for_ranks() -> None:
    nodes = [box("large", 8), box("small", 3), box("middle", 5)]
    layout, demand = by_default("separate", nodes, 2)
    check(layout, demand, nodes)
    assert demand == Demand(4, 8, 2)
    assert Counter(layout.of_rank(rank).node for rank in range(8)) == {"large": 6, "small": 1, "middle": 1}
    layout, demand = by_default("colocated", nodes, 2)
    check(layout, demand, nodes)
    assert demand == Demand(7, 16, 2)


def test_gpus_that_others_hold_are_left_alone() -> None:
    nodes = [box("shared", 8, busy_gpus=6), box("idle", 8)]
    layout, demand = by_default("separate", nodes)
    check(layout, demand, nodes)
    assert demand == Demand(5, 5, 1)


def refused(name: str, demand: Demand, nodes: Sequence[Node]) -> str:
    with pytest.raises(PlanError) as refusal:
        lay_out(name, demand, nodes)
    return str(refusal.value)


def test_the_refusal_of_too_many_gpus_reads_as_a_table_with_the_nearest_that_fits() -> None:
    assert refused("separate", Demand(8, 8, 1), boxes(8)) == (
        "--cluster.placement separate with 8 engines and 8 ranks does not fit.\n"
        "                            need   have\n"
        "  GPUs                        16      8\n"
        "    for engines                8      8\n"
        "    for ranks beside them      8      0\n"
        "  Nearest that fits: --rollout.engines 4 --learner.ranks 4"
    )


def test_the_refusal_says_what_others_hold() -> None:
    nodes = [box("a", 8, busy_gpus=8), box("b", 8, busy_gpus=2)]
    assert refused("separate", Demand(2, 4, 4), nodes) == (
        "--cluster.placement separate with 2 engines of 4 devices and 4 ranks does not fit.\n"
        "                                need   have   in all\n"
        "  GPUs                            12      6       16\n"
        "  engines, 4 GPUs on one node      2      1        4\n"
        "  GPUs for ranks beside them       4      0        8\n"
        "  1 node with 8 GPUs and 96 cores (free now: 0 GPUs, 96 cores)\n"
        "  1 node with 8 GPUs and 96 cores (free now: 6 GPUs, 96 cores)\n"
        "  10 GPUs of this cluster are held by other jobs.\n"
        "  Nearest that fits: --rollout.engines 1 --learner.ranks 2"
    )


@pytest.mark.parametrize(
    ("name", "demand", "nodes", "said"),
    [
        ("separate", Demand(1, 1, 1), boxes(1), ["GPUs", "2", "--cluster.placement colocated"]),
        ("separate", Demand(1, 1, 1), boxes(0) or [box("laptop", 0, 2)], ["no GPU", "--cluster.placement cpu"]),
        ("colocated", Demand(1, 1, 1), [box("laptop", 0, 2)], ["need", "have", "--cluster.placement cpu"]),
        ("separate", Demand(1, 1, 8), boxes(8), ["engines, 8 GPUs on one node", "--rollout.tensor-parallel 7"]),
        ("separate", Demand(1, 8, 16), boxes(64), ["largest node has 8 GPUs", "--rollout.tensor-parallel 8"]),
        ("colocated", Demand(4, 4, 2), boxes(8), ["that takes 8 ranks", "--rollout.engines 4 --learner.ranks 8"]),
        ("colocated", Demand(8, 64, 1), boxes(8), ["64", "--rollout.engines 8 --learner.ranks 8"]),
        ("colocated", Demand(3, 9, 2), [box("a", 3), box("b", 3)], ["--rollout.engines 2 --learner.ranks 6"]),
        ("separate", Demand(64, 512, 1), boxes(512), ["64 nodes with 8 GPUs", "--learner.ranks 4"]),
        ("cpu", Demand(64, 2, 1), [box("laptop", 0, 2)], ["66", "16", "--rollout.engines 14 --learner.ranks 2"]),
        ("cpu", Demand(1, 1, 1), [box("a", 0, 4, busy_cpus=4)], ["4 cores", "other jobs", "wait until"]),
        ("separate", Demand(4, 4, 1), [box("thin", 8, 1, busy_cpus=0.5)], ["too few cores", "node thin", "8"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason_and_the_nearest_that_fits(
    name: str, demand: Demand, nodes: Sequence[Node], said: Sequence[str]
) -> None:
    text = refused(name, demand, nodes)
    for part in said:
        assert part in text, text


@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    engines=st.integers(1, 12),
    ranks=st.integers(1, 24),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    name=st.sampled_from(["colocated", "separate"]),
)
def test_any_demand_on_gpus_is_seated_within_what_there_is_or_refused_with_one_that_fits(
    gpus: list[int], engines: int, ranks: int, tensor_parallel: int, name: str
) -> None:
    nodes = [box(f"node-{i}", count) for i, count in enumerate(gpus)]
    demand = Demand(engines, ranks, tensor_parallel)
    try:
        layout = lay_out(name, demand, nodes)
    except PlanError as refusal:
        _, _, advice = str(refusal).partition("Nearest that fits: --rollout.engines ")
        if advice:
            words = advice.split()
            nearest = Demand(int(words[0]), int(words[2]), tensor_parallel)
            check(lay_out(name, nearest, nodes), nearest, nodes)
        slots = sum(count // tensor_parallel for count in gpus)
        beside = sum(gpus) - (engines * tensor_parallel if name == "separate" else 0)
        assert engines > slots or ranks > beside or (name == "colocated" and ranks < engines * tensor_parallel)
    else:
        check(layout, demand, nodes)


@given(cpus=st.lists(st.integers(1, 4), min_size=1, max_size=5), engines=st.integers(1, 30), ranks=st.integers(1, 30))
def test_any_demand_on_cores_is_seated_or_refused(cpus: list[int], engines: int, ranks: int) -> None:
    nodes = [box(f"node-{i}", 0, count) for i, count in enumerate(cpus)]
    demand = Demand(engines, ranks, 1)
    if engines + ranks <= PROCESSES_PER_CORE * sum(cpus):
        check(lay_out("cpu", demand, nodes), demand, nodes)
    else:
        assert "does not fit" in refused("cpu", demand, nodes)


def test_the_plan_says_who_sits_where_in_few_lines() -> None:
    nodes = boxes(64)
    config = apply_settings(Config(), {"cluster.placement": "separate", "rollout.tensor_parallel": 8})
    layout, notes = seat(config, sum_of(nodes), 512)
    assert layout_text(layout, nodes)[0] == "node-0: ranks 0-7, 8 of 8 GPUs"
    assert layout_text(layout, nodes)[-1] == "node-7: engine 0, 8 of 8 GPUs"
    assert not notes
    layout, _ = seat(config, sum_of(boxes(512)), 512)
    assert layout_text(layout, boxes(512))[-1] == "and 56 more nodes"


def test_a_choice_that_wastes_is_noted() -> None:
    config = apply_settings(Config(), {"cluster.placement": "separate", "rollout.engines": 2, "learner.ranks": 2})
    assert seat(config, sum_of(boxes(8)), 512)[1] == ("4 of 8 GPUs are not used",)
    assert seat(config, sum_of(boxes(8)), 1)[1][0] == "1 of 2 engines have nothing to do: a round has 1 groups"
