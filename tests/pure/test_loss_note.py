"""The loss that prints 0 by construction is explained once, in the round in which it first does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cluster.run.console import LOSS_NOTE, Console, loss_is_zero_by_construction


def row(number: int = 1, first: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A row of metrics whose first step has a loss of 0 at ratio 1, unless said otherwise."""
    step = {"policy/loss": 3e-9, "policy/ratio_max": 1.0, "policy/grad_norm": 0.7}
    step |= first or {}
    return {"round": number, "steps": [{"step": 1, "minibatch": 0, "skipped": False} | step]}


def test_a_loss_of_0_at_ratio_1_with_a_gradient_is_one_by_construction() -> None:
    assert loss_is_zero_by_construction(row())


@pytest.mark.parametrize(
    "other",
    [
        {"policy/loss": -0.2},  # token means: lengths differ, so it is not 0
        {"policy/ratio_max": 1.3},  # not the first step from these old log-probs
        {"policy/grad_norm": 0.0},  # no signal: a loss of 0 that is one
    ],
)
def test_any_other_loss_is_not(other: dict[str, float]) -> None:
    assert not loss_is_zero_by_construction(row(first=other))


def test_a_round_that_trained_nothing_says_nothing_about_its_loss() -> None:
    skipped = row()
    skipped["steps"][0]["skipped"] = True
    assert not loss_is_zero_by_construction(skipped)
    assert not loss_is_zero_by_construction({"round": 0, "eval/correctness": 0.2})


def test_it_is_said_once_and_in_the_first_round_in_which_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=False, log_json=False, rounds=4)
    for number, loss in enumerate((-0.2, 0.0, 0.0, 0.0), start=1):
        console.row(row(number, {"policy/loss": loss}))
    console.close()
    said = capsys.readouterr().out
    assert said.count(LOSS_NOTE) == 1
    assert said.index("round   2/4") < said.index(LOSS_NOTE) < said.index("round   3/4")
