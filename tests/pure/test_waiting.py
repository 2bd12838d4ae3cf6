"""What errors of other processes look like to people."""

from __future__ import annotations

import pickle
import socket
from typing import Any

import pytest
import torch

from cluster.ports import PORT_TAKEN, on_a_free_port
from cluster.waiting import ActorLost, headline
from rollout.engine import EngineFault

TRACEBACK = "raised there:\nray::RolloutActor.generate() (pid=1)\n  File x\nValueError: no such row"


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("the process died (signal 9)", "the process died (signal 9)"),
        (TRACEBACK, "raised there: ValueError: no such row"),
        (f"closing the weight sync: {TRACEBACK}", "closing the weight sync: raised there: ValueError: no such row"),
        ("", ""),
    ],
)
def test_a_traceback_is_told_in_one_line(reason: str, line: str) -> None:
    assert headline(reason) == line


def test_errors_of_other_processes_survive_their_way_here() -> None:
    lost = pickle.loads(pickle.dumps(ActorLost("engine-0", "the process died", hung=True)))
    assert (lost.name, str(lost)) == ("engine-0", "engine-0: the process died")
    fault = pickle.loads(pickle.dumps(EngineFault("row 7 has no log-probs", ("row-7", 1))))
    assert (fault.key, str(fault)) == (("row-7", 1), "row 7 has no log-probs")


def test_a_rank_whose_port_is_taken_says_so_in_words_that_are_recognised() -> None:
    """vllm#39015, verl#6677: then the ranks are started again on another port."""
    distributed: Any = torch.distributed  # its stores carry no types
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(RuntimeError) as raised:
            distributed.TCPStore("127.0.0.1", holder.getsockname()[1], 1, is_master=True)
    assert any(sign in str(raised.value) for sign in PORT_TAKEN)


@pytest.mark.parametrize(
    ("reasons", "tries"),
    [
        ([], 1),
        (["raised there: EADDRINUSE, message: address already in use"] * 4, 5),
        (["raised there: EADDRINUSE"] * 9, 5),
        (["raised there: no such file"] * 9, 1),
    ],
)
def test_ranks_are_started_again_on_another_port_and_not_for_ever(reasons: list[str], tries: int) -> None:
    left, made = list(reasons), 0

    def attempt() -> str:
        nonlocal made
        made += 1
        if left:
            raise ActorLost("learner-0", left.pop(0))
        return "up"

    if len(reasons) >= tries:
        with pytest.raises(ActorLost):
            on_a_free_port(attempt)
    else:
        assert on_a_free_port(attempt) == "up"
    assert made == tries
