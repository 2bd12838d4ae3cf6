"""KL terms: values, what their gradients mean under exact expectations, and their clamps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from learner.config import KLKind
from learner.kl import kl_term
from learner.objective import Objective, objective_loss

ALL_TOKENS = torch.ones(1, 5, dtype=torch.bool)


def categorical(seed: int) -> torch.Tensor:
    """Logits over five tokens, each of which stands for one sampled token."""
    return torch.randn(1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_gradient(kind: KLKind, policy: torch.Tensor, ref: torch.Tensor, sampled_from: torch.Tensor) -> Any:
    """Gradient of the term by the policy's logits, over all tokens weighed by the probability of sampling them."""
    logits: Any = policy.clone().requires_grad_()
    new, frozen, old = (x.log_softmax(-1) for x in (logits, ref, sampled_from))
    term = kl_term(kind, new, frozen, old, ALL_TOKENS).values
    (old.exp() * term).sum().backward()
    return logits.grad


def divergence_gradient(first: str, policy: torch.Tensor, ref: torch.Tensor) -> Any:
    logits: Any = policy.clone().requires_grad_()
    new, frozen = logits.log_softmax(-1), ref.log_softmax(-1)
    forward, backward = (new.exp() * (new - frozen)).sum(), (frozen.exp() * (frozen - new)).sum()
    (forward if first == "policy" else backward).backward()
    return logits.grad


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-12)


def test_on_policy_k1_has_no_expected_gradient_at_all():
    policy, ref = categorical(1), categorical(2)
    assert close(expected_gradient("k1", policy, ref, policy), torch.zeros(1, 5, dtype=torch.float64))


def test_off_policy_k1_flattens_a_policy_sampled_at_low_temperature_wherever_the_reference_is():
    policy = categorical(1)
    sharpened = policy / 0.8
    pushes = [expected_gradient("k1", policy, categorical(seed), sharpened) for seed in (2, 3)]
    assert close(pushes[0], pushes[1])
    # Descending takes probability from the likeliest token and gives it to the unlikeliest.
    assert pushes[0][0, policy.argmax()] > 0
    assert pushes[0][0, policy.argmin()] < 0


def test_on_policy_k2_is_the_gradient_of_kl_to_the_reference_and_k3_of_kl_from_it():
    policy, ref = categorical(1), categorical(2)
    assert close(expected_gradient("k2", policy, ref, policy), divergence_gradient("policy", policy, ref))
    assert close(expected_gradient("k3", policy, ref, policy), divergence_gradient("ref", policy, ref))


def test_weighted_k3_is_the_gradient_of_kl_to_the_reference_off_policy_too():
    policy, ref, old = categorical(1), categorical(2), categorical(3)
    truth = divergence_gradient("policy", policy, ref)
    assert close(expected_gradient("k3_weighted", policy, ref, old), truth)
    assert not close(expected_gradient("k3", policy, ref, old), truth)


def kl_of(kind: KLKind, new, ref, old=None, mask=None, coef: float = 1.0, **more):
    logprobs = torch.tensor(new, dtype=torch.float64).requires_grad_()
    valid = torch.ones_like(logprobs) if mask is None else torch.tensor(mask)
    ref_logprobs = torch.tensor(ref, dtype=torch.float64)
    old_logprobs = logprobs.detach() if old is None else torch.tensor(old, dtype=torch.float64)
    objective = Objective(kl=kind, kl_coef=coef, **more)
    loss, metrics = objective_loss(
        objective, logprobs, old_logprobs, valid, torch.zeros(len(logprobs)), ref_logprobs=ref_logprobs
    )
    loss.backward()
    return loss.item(), logprobs.grad, metrics


def test_values_by_hand():
    d = 0.5
    assert kl_of("k1", [[-1.0]], [[-1.5]])[0] == pytest.approx(d)
    assert kl_of("k2", [[-1.0]], [[-1.5]])[0] == pytest.approx(d * d / 2)
    assert kl_of("k3", [[-1.0]], [[-1.5]])[0] == pytest.approx(math.exp(-d) + d - 1)
    ratio = math.exp(0.25)
    assert kl_of("k3_weighted", [[-1.0]], [[-1.5]], [[-1.25]])[0] == pytest.approx(ratio * (math.exp(-d) + d - 1))


def test_the_books_term_sums_over_tokens_and_averages_over_responses_whatever_the_aggregate():
    new, ref, mask = [[-1.0, -2.0], [-3.0, 0.0]], [[-1.5, -2.25], [-2.0, 0.0]], [[1, 1], [1, 0]]
    for how in ("sequence_sum", "sequence_mean", "token_mean"):
        loss, gradient, _ = kl_of("k1_book", new, ref, mask=mask, coef=0.02, aggregate=how)
        assert loss == pytest.approx(0.02 * ((0.5 + 0.25) - 1.0) / 2)
        assert gradient.tolist() == [[0.01, 0.01], [0.01, 0.0]]
    loss, gradient, _ = kl_of("k1_book", new, ref, mask=mask, coef=0.02, kl_length_normalise=True)
    assert loss == pytest.approx(0.02 * (0.75 / 2 - 1.0) / 2)
    assert gradient.tolist() == [[0.005, 0.005], [0.01, 0.0]]


def test_the_books_weighted_term_is_the_ratio_of_the_response_times_its_sum():
    new, ref, old = [[-1.0, -2.0]], [[-1.5, -2.25]], [[-1.1, -2.3]]
    loss, gradient, _ = kl_of("book_weighted", new, ref, old)
    rho, total = math.exp(0.4), 0.75
    assert loss == pytest.approx(rho * total)
    assert gradient.tolist()[0] == pytest.approx([rho * (total + 1)] * 2)
    loss, gradient, _ = kl_of("book_weighted", new, ref, old, kl_length_normalise=True)
    mean = math.exp(0.2)
    assert loss == pytest.approx(mean * total / 2)
    assert gradient.tolist()[0] == pytest.approx([mean * (total / 2 + 1) / 2] * 2)


@pytest.mark.parametrize("kind", ["k1", "k1_book"])
def test_the_gradient_of_k1_does_not_depend_on_the_reference(kind):
    new = [[-1.0, -2.0], [-3.0, -0.5]]
    one = kl_of(kind, new, [[-9.0, -0.1], [-2.0, -2.0]])[1]
    other = kl_of(kind, new, [[-1.0, -3.0], [-7.0, -1.0]])[1]
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_weighted"])
def test_terms_and_gradients_vanish_exactly_where_policy_and_reference_agree(kind):
    new = [[-1.0, -2.0], [-3.0, -0.5]]
    loss, gradient, metrics = kl_of(kind, new, new, [[-1.1, -1.9], [-3.0, -0.7]])
    assert loss == 0.0
    assert metrics["policy/kl"] == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("kind", ["k1", "k1_book", "k2", "k3", "k3_weighted", "book_weighted"])
def test_right_after_a_refresh_of_the_reference_the_kl_is_exactly_zero(kind):
    new = [[-1.0, -2.0], [-3.0, -0.5]]
    _, _, metrics = kl_of(kind, new, new)
    assert metrics["policy/kl"] == 0.0
    assert metrics["policy/kl_loss"] == 0.0


def test_differences_beyond_twenty_are_clamped_counted_and_without_gradient():
    loss, gradient, metrics = kl_of("k3", [[-1.0, -30.0]], [[-31.0, -1.0]], aggregate="sequence_sum")
    assert loss == pytest.approx(math.exp(-20) + 19 + math.exp(20) - 21)
    assert gradient.tolist() == [[0.0, 0.0]]
    assert metrics["policy/kl_clamped"] == 2


@pytest.mark.parametrize("kind", ["k3_weighted", "book_weighted"])
def test_beyond_the_clamp_a_weighted_term_moves_through_its_weight_only(kind):
    loss, gradient, metrics = kl_of(kind, [[-1.0]], [[-31.0]], [[-1.5]])
    term = 20.0 if kind == "book_weighted" else math.exp(-20) + 19
    assert loss == pytest.approx(math.exp(0.5) * term)
    assert gradient.item() == pytest.approx(loss)
    assert metrics["policy/kl_clamped"] == 1
    loss, gradient, metrics = kl_of(kind, [[-1.0]], [[-1.5]], [[-41.0]])
    term, slope = (0.5, 1.0) if kind == "book_weighted" else (math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))
    assert loss == pytest.approx(math.exp(20) * term)
    assert gradient.item() == pytest.approx(math.exp(20) * slope)
    assert metrics["policy/kl_clamped"] == 1


def test_a_sequence_ratio_takes_the_mean_over_each_response_for_token_kl_unless_told_otherwise():
    new, ref, mask = [[-1.0, -2.0], [-3.0, 0.0]], [[-1.5, -2.25], [-2.0, 0.0]], [[1, 1], [1, 0]]
    by_response = kl_of("k1", new, ref, mask=mask, ratio_level="sequence_sum")[0]
    assert by_response == pytest.approx((0.75 / 2 - 1.0) / 2)
    by_token = kl_of("k1", new, ref, mask=mask, ratio_level="sequence_sum", aggregate="token_mean")[0]
    assert by_token == pytest.approx((0.75 - 1.0) / 3)


def test_a_coefficient_per_response_replaces_the_common_one():
    new: Any = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64).requires_grad_()
    ref = torch.tensor([[-1.5], [-1.5]], dtype=torch.float64)
    objective = Objective(kl="k2", kl_coef=99.0)
    loss, metrics = objective_loss(
        objective,
        new,
        new.detach(),
        torch.ones(2, 1),
        torch.zeros(2),
        ref_logprobs=ref,
        kl_coefs=torch.tensor([0.0, 0.4]),
    )
    loss.backward()
    assert metrics["policy/kl"] == pytest.approx(0.125)
    assert metrics["policy/kl_loss"] == pytest.approx(0.4 * 0.125 / 2)
    assert new.grad[:, 0].tolist() == pytest.approx([0.0, 0.4 * 0.5 / 2])


def test_a_kl_term_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        objective_loss(Objective(kl="k3"), torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
