"""Which GPUs a process is given, and which it is shown."""

from __future__ import annotations

import pytest

from cluster.gpu_requests import engine_request, rank_request
from cluster.placement import Demand, Layout, lay_out
from cluster.resources import Node


def layout(
    placement: str, engines: int, ranks: int, tensor_parallel: int = 1, *, nodes: int = 1, gpus: int = 8
) -> Layout:
    found = [Node(name=f"n{i}", host=f"host{i}", cpus=32, gpus=gpus, memory=2**40) for i in range(nodes)]
    return lay_out(placement, Demand(engines, ranks, tensor_parallel), found)


def test_on_a_cpu_everybody_asks_for_a_core() -> None:
    seats = layout("cpu", 2, 2, gpus=0)
    assert engine_request(seats, 1, {}).resources == rank_request(seats, 0).resources == {"num_cpus": 1}


def test_separate_engines_and_ranks_are_given_their_own() -> None:
    seats = layout("separate", 2, 4, tensor_parallel=2)
    assert engine_request(seats, 0, {}).resources == {"num_gpus": 2}
    assert rank_request(seats, 3).resources == {"num_gpus": 1}


@pytest.mark.parametrize(("size", "shown"), [(1, "6"), (2, "4,7")])
def test_a_colocated_engine_sees_the_gpus_of_its_ranks_and_asks_for_none(size: int, shown: str) -> None:
    seats = layout("colocated", 4 // size, 4, tensor_parallel=size)
    given = {"learner-0": ["3"], "learner-1": ["6"], "learner-2": ["4"], "learner-3": ["7"]}
    abouts = {name: {"gpus": gpus, "node": "abc"} for name, gpus in given.items()}
    asked = engine_request(seats, 1, abouts)
    assert asked.resources == {"num_cpus": 0, "num_gpus": 0}
    assert asked.environment == {"CUDA_VISIBLE_DEVICES": shown}
    assert asked.node == "abc"
    assert rank_request(seats, 0).resources == {"num_gpus": 1}


def test_without_ranks_it_takes_the_gpus_itself() -> None:
    assert engine_request(layout("colocated", 2, 4, tensor_parallel=2), 0, {}).resources == {"num_gpus": 2}
