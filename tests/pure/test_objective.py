"""Loss and gradient of every objective against the walk-through's numbers and against formulas worked by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import compute_advantages
from learner.config import Aggregate, CorrectionKind, KLKind, RatioLevel
from learner.objective import Objective, objective_loss
from tests.pure.objective_by_hand import Case, loss_and_gradient

AFTER = [-7.9243, -20.1546, -16.6130, -23.3677]
BEFORE = [-10.9243, -20.3546, -14.6130, -23.3677]


def walk_through(objective: Objective):
    logprobs: Any = torch.tensor(AFTER, dtype=torch.float64)[:, None].requires_grad_()
    old = torch.tensor(BEFORE, dtype=torch.float64)[:, None]
    advantages = compute_advantages("group", torch.tensor([1.0, 1.0, 0.0, 0.0]), [0, 0, 0, 0])
    loss, metrics = objective_loss(objective, logprobs, old, torch.ones(4, 1), advantages)
    loss.backward()
    return loss.item(), logprobs.grad[:, 0].tolist(), metrics


def sequence(loss: str, eps: float, **more) -> Objective:
    return Objective(loss=loss, ratio_level="sequence_sum", clip_low=eps, clip_high=eps, **more)


@pytest.mark.parametrize(
    ("objective", "loss", "gradient"),
    [
        (
            Objective(loss="reinforce", aggregate="sequence_sum"),
            -2.576369,
            [-0.216469, -0.216469, 0.216469, 0.216469],
        ),
        (sequence("book", 10), -2.399788, [0, -0.264396, 0.029296, 0.216469]),
        (sequence("ppo", 10), -2.399788, [0, -0.264396, 0.029296, 0.216469]),
        (sequence("book", 0.2), -0.273761, [0, 0, 0.029296, 0.216469]),
        (sequence("ppo", 0.2), -0.129881, [0, 0, 0, 0.216469]),
    ],
)
def test_walk_through_gives_the_published_losses_and_gradients(objective, loss, gradient):
    got, slopes, _ = walk_through(objective)
    assert got == pytest.approx(loss, abs=5e-7)
    assert slopes == pytest.approx(gradient, abs=5e-7)


def test_walk_through_gives_the_published_ratios_and_shares_of_clipped_responses():
    _, _, metrics = walk_through(sequence("ppo", 10))
    assert metrics["policy/ratio_mean"] == pytest.approx(5.610569, abs=5e-7)
    assert metrics["policy/ratio_max"] == pytest.approx(20.0855, abs=5e-5)
    assert metrics["policy/clip_fraction_high"] == 0.25
    assert metrics["policy/clip_fraction_low"] == 0.0
    assert "policy/clip_fraction_dual" not in metrics
    assert "policy/kl" not in metrics
    _, _, metrics = walk_through(sequence("ppo", 0.2))
    assert metrics["policy/clip_fraction_low"] == 0.25
    assert metrics["policy/clip_fraction_high"] == 0.5


def objectives() -> list[Objective]:
    """Every loss with every ratio level, aggregate, KL term and correction that goes with it."""
    found = []
    losses: tuple[Any, ...] = ("reinforce", "ppo", "book", "cispo")
    aggregates = (*get_args(Aggregate), None)
    choices = (losses, get_args(RatioLevel), aggregates, get_args(KLKind), get_args(CorrectionKind))
    for loss, level, how, kl, fix in itertools.product(*choices):
        try:
            found.append(
                Objective(
                    loss=loss,
                    ratio_level=level,
                    aggregate=how,
                    kl=kl,
                    kl_coef=0.3,
                    correction=fix,
                    correction_cap=1.3,
                    correction_floor=0.6,
                    constant_length=7 if how == "constant" else None,
                    cispo_cap=1.1,
                )
            )
        except ValueError:
            continue
    return found


ALL = objectives()
SMOOTH = [objective for objective in ALL if objective.loss != "cispo"]  # its weight is held constant on purpose


def drawn_case(random_source: random.Random, *, wide: bool = False) -> Case:
    """Ragged rows, single tokens and empty rows included; `wide` adds log-ratios of hundreds."""
    spread = 60.0 if wide else 0.6
    lengths = [random_source.choice([0, 1, 1, 2, 3, 5]) for _ in range(random_source.randint(1, 5))]

    def row(length: int) -> list[float]:
        return [-3 * random_source.random() for _ in range(length)]

    def near(rows):
        return [[value + spread * random_source.uniform(-1, 1) for value in values] for values in rows]

    old = [row(length) for length in lengths]
    return Case(
        new=near(old),
        old=old,
        advantages=[random_source.choice([0.0, 1.0, -1.0]) * random_source.uniform(0.1, 2) for _ in lengths],
        ref=near(old),
        sampler=near(old),
        counted=[random_source.random() > 0.2 for _ in lengths],
        kl_coefs=[random_source.choice([0.0, 0.1, 0.5]) for _ in lengths] if random_source.random() < 0.5 else None,
    )


def padded(rows, width: int, garbage: float) -> torch.Tensor:
    return torch.tensor([[*row, *[garbage] * (width - len(row))] for row in rows], dtype=torch.float64)


def evaluate(objective: Objective, case: Case, *, extra: int = 1, garbage: float = float("nan")):
    width = max(len(row) for row in case.new) + extra
    logprobs = padded(case.new, width, garbage).requires_grad_()
    mask = padded([[1.0] * len(row) for row in case.new], width, 0.0)
    loss, metrics = objective_loss(
        objective,
        logprobs,
        padded(case.old, width, garbage),
        mask,
        torch.tensor(case.advantages, dtype=torch.float64),
        padded(case.ref, width, garbage),
        padded(case.sampler, width, garbage),
        kl_coefs=None if case.kl_coefs is None else torch.tensor(case.kl_coefs, dtype=torch.float64),
        counted=torch.tensor(case.counted),
    )
    loss.backward()
    return loss.item(), logprobs.grad, metrics


def assert_equals_by_hand(objective: Objective, case: Case, tolerance: float = 1e-10) -> None:
    loss, gradient, metrics = evaluate(objective, case)
    wanted, slopes = loss_and_gradient(objective, case)
    assert loss == pytest.approx(wanted, rel=1e-10, abs=tolerance)
    assert metrics["policy/loss"] + metrics.get("policy/kl_loss", 0.0) == pytest.approx(
        wanted, rel=1e-10, abs=tolerance
    )
    torch.testing.assert_close(gradient, padded(slopes, gradient.shape[1], 0.0), rtol=1e-10, atol=tolerance)


def test_combinations_of_all_settings_equal_the_formulas_worked_by_hand():
    assert len(ALL) > 1000
    source = random.Random(0)
    for objective in ALL[::8]:
        assert_equals_by_hand(objective, drawn_case(source))


@given(
    objective=st.sampled_from(ALL),
    seed=st.integers(0, 2**32),
    wide=st.booleans(),
    clip=st.sampled_from([(0.2, 0.28), (10.0, 10.0), (0.0, 0.0), (3e-4, 4e-4)]),
    dual=st.sampled_from([None, 11.0, 14.0]),
    delta=st.sampled_from([None, 0.0, 0.1]),
    anchor=st.sampled_from(["sampler", "old"]),
    switch=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_objective_on_any_ragged_minibatch_equals_the_formulas(
    objective, seed, wide, clip, dual, delta, anchor, switch
):
    changed = replace(
        objective,
        clip_low=clip[0],
        clip_high=clip[1],
        dual_clip=dual,
        off_policy_delta=delta,
        off_policy_anchor=anchor,
        correction_geometric_mean=switch,
        kl_length_normalise=switch and objective.kl in ("k1_book", "book_weighted"),
    )
    # Far from 1, weighted KL terms are differences of numbers up to e^40, of which no digit can be compared.
    wide = wide and objective.kl not in ("k3_weighted", "book_weighted")
    # Ratios up to e^20 of both signs add up: the last digits of 5e8 are what is left to compare.
    assert_equals_by_hand(changed, drawn_case(random.Random(seed), wide=wide), 1e-4 if wide else 1e-10)


@pytest.mark.parametrize("objective", SMOOTH[::37])
def test_autograd_agrees_with_finite_differences(objective):
    source = random.Random(5)
    width, rows = 3, 3
    # Away from every kink: log-ratios well inside or well outside of all bounds.
    old = -1 - torch.rand(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    steps = torch.tensor([source.choice([-0.9, -0.05, 0.04, 0.9]) for _ in range(rows * width)], dtype=torch.float64)
    logprobs = (old + steps.view(rows, width)).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    advantages = torch.tensor([1.0, -0.7, -0.4], dtype=torch.float64)

    def value(inputs):
        return objective_loss(objective, inputs, old, mask, advantages, old - 0.2, old + 0.1)[0]

    assert torch.autograd.gradcheck(value, (logprobs,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "book", "cispo"])
def test_a_response_that_is_taken_out_moves_nothing_whatever_term_it_is_in(loss):
    """huggingface/trl#4976: of two masks only one was emptied for responses that were cut."""
    objective = Objective(loss=loss, kl="k3", kl_coef=0.3, correction="tis_token")
    logprobs: Any = torch.tensor([[-0.5, -1.0], [-2.0, -0.1]], dtype=torch.float64).requires_grad_()
    other = logprobs.detach() - torch.tensor([[0.1, 0.3], [-0.2, 0.4]])
    given = (logprobs, other, torch.ones(2, 2), torch.tensor([1.0, -1.0]), other - 0.2, other + 0.1)
    total, _ = objective_loss(objective, *given, counted=torch.tensor([True, False]))
    total.backward()
    assert logprobs.grad[1].tolist() == [0.0, 0.0]
    assert logprobs.grad[0].abs().min() > 0
