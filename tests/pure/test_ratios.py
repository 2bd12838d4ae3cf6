"""Ratios from log-probs: levels, masks before any arithmetic, and the clamp."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from learner.ratios import ratios

OLD = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, math.inf, math.nan], [math.nan] * 3], dtype=torch.float64)
NEW = torch.tensor([[-0.9, -1.7, math.inf], [-1.5, 0.0, 1e300], [math.nan] * 3], dtype=torch.float64)
VALID = torch.tensor([[True, True, False], [True, False, False], [False] * 3])


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        ("token", [[math.exp(0.1), math.exp(0.3), 1.0], [math.exp(-0.5), 1.0, 1.0], [1.0] * 3]),
        ("sequence_sum", [math.exp(0.4), math.exp(-0.5), 1.0]),
        ("sequence_mean", [math.exp(0.2), math.exp(-0.5), 1.0]),
    ],
)
def test_ratios_are_of_a_token_of_the_sum_or_of_the_mean_and_padding_never_enters(level, wanted):
    new: Any = NEW.clone().requires_grad_()
    found = ratios(new, OLD, VALID, level)
    torch.testing.assert_close(found.values, torch.tensor(wanted, dtype=torch.float64))
    found.values.sum().backward()
    assert new.grad[VALID].all()
    assert not new.grad[~VALID].any()
    assert found.clamped == 0


def test_a_response_without_a_valid_token_is_no_unit():
    assert ratios(NEW, OLD, VALID, "sequence_sum").valid.tolist() == [True, True, False]


def test_log_ratios_beyond_twenty_are_clamped_counted_once_per_unit_and_lose_their_gradient():
    new: Any = torch.tensor([[15.0, 15.0], [-25.0, 1.0]], dtype=torch.float64).requires_grad_()
    old = torch.zeros(2, 2, dtype=torch.float64)
    valid = torch.ones(2, 2, dtype=torch.bool)
    by_token = ratios(new, old, valid, "token")
    assert by_token.clamped == 1
    assert by_token.values[1, 0].item() == pytest.approx(math.exp(-20))
    by_response = ratios(new, old, valid, "sequence_sum")
    assert by_response.clamped == 2
    assert by_response.values.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    by_response.values.sum().backward()
    assert not new.grad.any()
    assert ratios(new, old, valid, "sequence_mean").clamped == 0


def test_a_log_ratio_of_minus_infinity_is_the_smallest_ratio():
    new = torch.tensor([[-math.inf, 0.0]])
    found = ratios(new, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), "token")
    assert found.values[0, 0].item() == pytest.approx(math.exp(-20))
    assert found.clamped == 1


def test_clamps_of_padding_are_not_counted():
    new = torch.tensor([[100.0, 0.0]])
    assert ratios(new, torch.zeros(1, 2), torch.tensor([[False, True]]), "token").clamped == 0
