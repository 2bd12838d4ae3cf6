"""Importance weights and V3.2's mask: what they multiply, and what they leave alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from learner.corrections import importance_weights, off_policy_mask
from learner.objective import Objective, objective_loss

OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
SAMPLER = OLD - torch.tensor([[0.0, math.log(3), math.log(0.2)], [math.log(1.5), math.log(1.5), 0.0]])
VALID = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("kind", "mean", "wanted"),
    [
        ("tis_token", False, [[1.0, 2.0, 0.2], [1.5, 1.5, 1.0]]),
        ("mask_token", False, [[1.0, 0.0, 0.0], [1.5, 1.5, 1.0]]),
        ("tis_sequence", False, [0.6, 2.0]),
        ("mask_sequence", False, [0.6, 0.0]),
        ("mask_sequence", True, [0.6 ** (1 / 3), 1.5]),
    ],
)
def test_weights_are_truncated_or_masked_by_token_or_by_response(kind, mean, wanted):
    weights = importance_weights(kind, OLD, SAMPLER, VALID, cap=2.0, floor=0.5, geometric_mean=mean)
    torch.testing.assert_close(weights.applied, torch.tensor(wanted, dtype=torch.float64))


def test_masked_tokens_stay_in_the_denominators_and_in_the_kl_term():
    new: Any = OLD.clone().requires_grad_()
    objective = Objective(correction="mask_token", correction_cap=2.0, correction_floor=0.5, kl="k1", kl_coef=0.5)
    advantages = torch.tensor([1.0, 1.0])
    loss, metrics = objective_loss(objective, new, OLD, VALID, advantages, OLD, SAMPLER)
    loss.backward()
    # Five valid tokens; two of the first response are masked, and the others weigh 1, 1.5 and 1.5.
    assert loss.item() == pytest.approx(-(1.0 + 1.5 + 1.5) / 5)
    assert new.grad[0].tolist() == pytest.approx([-1 / 5 + 0.1, 0.1, 0.1])
    assert metrics["correction/masked"] == pytest.approx(2 / 5)
    assert metrics["policy/effective_tokens"] == 3
    assert metrics["policy/tokens"] == 5


def test_weight_metrics_tell_the_weights_before_truncation():
    _, metrics = objective_loss(
        Objective(correction="tis_token"), OLD, OLD, VALID, torch.ones(2), sampler_logprobs=SAMPLER
    )
    assert metrics["correction/weight_max"] == pytest.approx(3.0)
    assert metrics["correction/weight_mean"] == pytest.approx((1 + 3 + 0.2 + 1.5 + 1.5) / 5)
    assert metrics["correction/capped"] == pytest.approx(1 / 5)
    assert metrics["mismatch/max"] == pytest.approx(math.log(5))
    assert "correction/masked" not in metrics


def test_only_negative_responses_beyond_delta_are_left_out():
    new = torch.tensor([[-1.0, -1.0]] * 4)
    anchor = torch.tensor([[-0.5, -0.5], [-0.5, -0.5], [-0.5, -1.5], [0.0, -1.0]])
    valid = torch.ones(4, 2, dtype=torch.bool)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    assert off_policy_mask(new, anchor, valid, advantages, 0.4).tolist() == [True, False, False, True]
    # Strictly beyond.
    assert not off_policy_mask(new, anchor, valid, advantages, 0.5).any()


def test_a_response_left_out_keeps_its_kl_and_its_place_in_the_denominators():
    old = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64)
    new: Any = torch.tensor([[-2.0], [-1.0]], dtype=torch.float64).requires_grad_()
    objective = Objective(off_policy_delta=0.5, kl="k2", kl_coef=0.1)
    loss, metrics = objective_loss(objective, new, old, torch.ones(2, 1), torch.tensor([-1.0, -1.0]), old)
    loss.backward()
    assert metrics["policy/loss"] == pytest.approx(0.5)
    assert metrics["correction/off_policy"] == 0.5
    assert new.grad[:, 0].tolist() == pytest.approx([0.1 * -1.0 / 2, 0.5])


def test_off_policy_drift_is_measured_from_the_sampler_or_where_it_is_unknown_from_old():
    old, new, sampler = (torch.full((1, 2), value) for value in (-1.0, -1.1, -0.2))
    given = (new, old, torch.ones(1, 2), torch.tensor([-1.0]))
    masks = Objective(off_policy_delta=0.5)
    assert objective_loss(masks, *given, sampler_logprobs=sampler)[1]["correction/off_policy"] == 1.0
    assert objective_loss(masks, *given)[1]["correction/off_policy"] == 0.0
    from_old = Objective(off_policy_delta=0.5, off_policy_anchor="old")
    assert objective_loss(from_old, *given, sampler_logprobs=sampler)[1]["correction/off_policy"] == 0.0


def test_a_correction_without_sampler_logprobs_is_refused():
    with pytest.raises(ValueError, match="needs sampler_logprobs"):
        objective_loss(Objective(correction="tis_token"), OLD, OLD, VALID, torch.ones(2))
