"""What must hold for every objective, beside its numbers."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.aggregate import add_denominators, count_denominators
from learner.objective import (
    Objective,
    finish_metrics,
    merge_partials,
    objective_loss,
    objective_terms,
    pack_partial,
    unpack_partial,
)

AGGREGATES = {
    "sequence_sum": Objective(aggregate="sequence_sum"),
    "sequence_mean": Objective(aggregate="sequence_mean"),
    "token_mean": Objective(aggregate="token_mean"),
    "constant": Objective(aggregate="constant", constant_length=11),
    "sequence ratio": Objective(ratio_level="sequence_sum", clip_low=10, clip_high=10),
    "mean ratio": Objective(ratio_level="sequence_mean", aggregate="token_mean"),
    "reinforce": Objective(loss="reinforce"),
    "cispo": Objective(loss="cispo"),
    "book": Objective(loss="book", ratio_level="sequence_sum", kl="k1_book"),
}


class Drawn:
    """A ragged minibatch with padding on both sides of the responses' ends, in float64."""

    def __init__(self, seed: int, rows: int = 6, width: int = 7, spread: float = 0.4) -> None:
        random_state = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random_state)

        lengths = torch.randint(0, width + 1, (rows,), generator=random_state)
        lengths[0] = 1
        self.mask = torch.arange(width) < lengths[:, None]
        self.old = -drawn(rows, width).abs() - 0.1
        self.new = self.old + spread * drawn(rows, width)
        self.ref = self.old + spread * drawn(rows, width)
        self.sampler = self.old + spread * drawn(rows, width)
        self.advantages = drawn(rows)
        self.counted = torch.rand(rows, generator=random_state) > 0.2
        self.kl_coefs = torch.rand(rows, generator=random_state, dtype=torch.float64)

    def evaluate(self, objective: Objective, **changes):
        given_ = vars(self) | changes
        logprobs = given_["new"].clone().requires_grad_()
        loss, metrics = objective_loss(
            objective,
            logprobs,
            given_["old"],
            given_["mask"],
            given_["advantages"],
            given_["ref"],
            given_["sampler"],
            kl_coefs=given_["kl_coefs"],
            counted=given_["counted"],
        )
        loss.backward()
        return loss.detach(), logprobs.grad, metrics


seeds = st.integers(0, 2**31)
named = st.sampled_from(sorted(AGGREGATES))
kl_kinds = st.sampled_from(["none", "k1", "k1_book", "k2", "k3", "k3_weighted", "book_weighted"])


@given(seed=seeds, name=named, kl=kl_kinds, value=st.sampled_from([math.nan, math.inf, -math.inf, 1e300, 0.0]))
@settings(max_examples=100, deadline=None)
def test_what_stands_in_the_padding_changes_nothing(seed, name, kl, value):
    drawn, objective = Drawn(seed), replace(AGGREGATES[name], kl=kl, off_policy_delta=0.1)
    garbage = {
        field: torch.where(drawn.mask, getattr(drawn, field), value) for field in ("new", "old", "ref", "sampler")
    }
    empty = ~drawn.mask.any(dim=1)
    garbage |= {"advantages": torch.where(empty, value, drawn.advantages)}
    loss, gradient, metrics = drawn.evaluate(objective)
    loss_2, gradient_2, metrics_2 = drawn.evaluate(objective, **garbage)
    assert torch.equal(loss, loss_2)
    assert torch.equal(gradient, gradient_2)
    assert metrics == metrics_2
    assert not gradient[~drawn.mask].any()


@given(
    seed=seeds,
    name=named,
    kl=kl_kinds,
    correction=st.sampled_from(["none", "tis_sequence", "mask_sequence"]),
    ranks=st.integers(1, 4),
    cuts=st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_microbatches_on_any_number_of_ranks_add_up_to_the_minibatch(seed, name, kl, correction, ranks, cuts):
    drawn = Drawn(seed)
    objective = replace(AGGREGATES[name], kl=kl, correction=correction, dual_clip=12.0, off_policy_delta=0.05)
    loss, gradient, metrics = drawn.evaluate(objective)
    order = list(range(6))
    random.Random(seed).shuffle(order)
    shares = [order[i::cuts] for i in range(cuts) if order[i::cuts]]
    denominators = add_denominators(count_denominators(drawn.mask[s], drawn.counted[s]) for s in shares)
    assert denominators == count_denominators(drawn.mask, drawn.counted)
    logprobs = drawn.new.clone().requires_grad_()
    by_rank: list[list[dict[str, float]]] = [[] for _ in range(ranks)]
    total = 0.0
    for index, rows in enumerate(shares):
        # Each microbatch is padded to its own width only.
        width = max(1, int(drawn.mask[rows].sum(dim=1).max()))
        share, partial = objective_terms(
            objective,
            logprobs[rows, :width],
            drawn.old[rows, :width],
            drawn.mask[rows, :width],
            drawn.advantages[rows],
            denominators,
            drawn.ref[rows, :width],
            drawn.sampler[rows, :width],
            drawn.kl_coefs[rows],
            drawn.counted[rows],
        )
        share.backward()
        total += share.item()
        by_rank[index % ranks].append(partial)
    packed = [pack_partial(merge_partials(partials)) for partials in by_rank]
    sums = torch.stack([sums for sums, _ in packed]).sum(dim=0)
    maxima = torch.stack([maxima for _, maxima in packed]).amax(dim=0)
    assert total == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-12, atol=1e-13)
    together = finish_metrics(unpack_partial(sums, maxima), denominators)
    assert together == pytest.approx(metrics, rel=1e-12, abs=1e-12)


@given(seed=seeds, how=st.sampled_from(["sequence_sum", "sequence_mean", "token_mean", "constant"]))
@settings(max_examples=50, deadline=None)
def test_where_the_policy_has_not_moved_every_loss_has_the_gradient_of_reinforce(seed, how):
    drawn = Drawn(seed)
    common = {"aggregate": how, "constant_length": 5 if how == "constant" else None}
    _, wanted, _ = drawn.evaluate(Objective(loss="reinforce", **common), old=drawn.new)
    for loss in ("ppo", "book", "cispo"):
        value, gradient, metrics = drawn.evaluate(Objective(loss=loss, **common), old=drawn.new)
        torch.testing.assert_close(gradient, wanted, rtol=1e-14, atol=1e-14)
        assert metrics.get("policy/ratio_mean", 1.0) == 1.0
        if how == "sequence_mean" and loss != "cispo":
            # The gradient is there although the value is only minus the mean advantage.
            exists = (drawn.mask & drawn.counted[:, None]).any(dim=1)
            assert value.item() == pytest.approx(-(drawn.advantages * exists).mean().item())


@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_where_the_policy_has_not_moved_r1_has_the_gradient_of_the_books_reinforce(seed):
    drawn = Drawn(seed)
    _, wanted, _ = drawn.evaluate(Objective(loss="reinforce", aggregate="sequence_sum"), old=drawn.new)
    _, gradient, _ = drawn.evaluate(Objective(ratio_level="sequence_sum", clip_low=10, clip_high=10), old=drawn.new)
    torch.testing.assert_close(gradient, wanted, rtol=1e-14, atol=1e-14)


@given(seed=seeds, name=named)
@settings(max_examples=50, deadline=None)
def test_groups_without_signal_have_no_policy_gradient_and_with_kl_only_that_of_kl(seed, name):
    drawn = Drawn(seed)
    still = torch.zeros(6, dtype=torch.float64)
    objective = replace(AGGREGATES[name], kl="none")
    loss, gradient, metrics = drawn.evaluate(objective, advantages=still)
    assert loss == 0.0
    assert not gradient.any()
    assert metrics["policy/effective_tokens"] == 0
    with_kl = replace(objective, kl="k3", kl_coef=0.3)
    _, only_kl, _ = drawn.evaluate(with_kl, advantages=still)
    _, both, _ = drawn.evaluate(with_kl)
    _, only_policy, _ = drawn.evaluate(objective)
    torch.testing.assert_close(both, only_kl + only_policy, rtol=1e-12, atol=1e-12)


@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_gspo_by_response_equals_its_form_by_token(seed):
    """The token form: sg(s) * pi / sg(pi) in place of the ratio, mean over the tokens of each response."""
    drawn = Drawn(seed)
    objective = Objective(ratio_level="sequence_mean", clip_low=0.1, clip_high=0.15)
    loss, gradient, _ = drawn.evaluate(objective)
    new = drawn.new.clone().requires_grad_()
    mask = drawn.mask & drawn.counted[:, None]
    lengths = mask.sum(dim=1).clamp(min=1)
    mean = torch.where(mask, new - drawn.old, 0).sum(dim=1) / lengths
    by_token = mean.exp().detach()[:, None] * (new - new.detach()).exp()
    advantages = drawn.advantages[:, None]
    unclipped, clipped = by_token * advantages, by_token.clamp(0.9, 1.15) * advantages
    token_loss = torch.where(mask, -torch.minimum(unclipped, clipped), 0)
    total = (token_loss.sum(dim=1) / lengths).mean()
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient, new.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("correction", ["tis_token", "tis_sequence", "mask_token", "mask_sequence"])
def test_a_correction_from_a_sampler_equal_to_the_learner_changes_nothing(correction):
    drawn = Drawn(3)
    plain = drawn.evaluate(Objective())
    corrected = drawn.evaluate(Objective(correction=correction), sampler=drawn.old)
    assert torch.equal(plain[0], corrected[0])
    assert torch.equal(plain[1], corrected[1])
    assert corrected[2]["correction/weight_mean"] == 1.0
    assert corrected[2]["correction/weight_max"] == 1.0
    assert corrected[2]["mismatch/max"] == 0.0


@given(seed=seeds, level=st.sampled_from(["token", "sequence_sum", "sequence_mean"]), spread=st.floats(0.1, 4))
@settings(max_examples=50, deadline=None)
def test_the_books_clip_at_ten_is_ppos_with_a_dual_clip_of_eleven(seed, level, spread):
    drawn = Drawn(seed, spread=spread)
    book = drawn.evaluate(Objective(loss="book", ratio_level=level, clip_high=10))
    ppo = drawn.evaluate(Objective(ratio_level=level, clip_low=10, clip_high=10, dual_clip=11))
    torch.testing.assert_close(book[0], ppo[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(book[1], ppo[1], rtol=1e-13, atol=1e-13)


def test_clip_ten_is_unbounded_for_negative_advantages_unless_a_dual_clip_is_set():
    drifted = {"new": torch.full((1, 100), -0.5), "old": torch.full((1, 100), -0.6), "mask": torch.ones(1, 100)}
    one = {"ref": None, "sampler": None, "kl_coefs": None, "counted": None, "advantages": torch.tensor([-1.0])}
    r1 = Objective(ratio_level="sequence_sum", clip_low=10, clip_high=10)
    loss, gradient, _ = Drawn(0).evaluate(r1, **drifted, **one)
    assert loss.item() == pytest.approx(math.exp(10), rel=1e-4)
    assert gradient.max() > 10_000
    loss, gradient, metrics = Drawn(0).evaluate(replace(r1, dual_clip=11), **drifted, **one)
    assert loss.item() == 11.0
    assert not gradient.any()
    assert metrics["policy/clip_fraction_dual"] == 1.0


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_a_response_that_is_not_counted_contributes_nothing_but_is_still_one_of_b(name):
    drawn, objective = Drawn(7), AGGREGATES[name]
    without = drawn.counted.clone()
    without[:] = True
    without[2] = False
    masked = drawn.mask.clone()
    masked[2] = False
    one = drawn.evaluate(objective, counted=without)
    other = drawn.evaluate(objective, counted=torch.ones(6, dtype=torch.bool), mask=masked)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert not one[1][2].any()


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_a_minibatch_without_a_single_valid_token_has_loss_zero_and_no_gradient(name):
    drawn = Drawn(1)
    loss, gradient, metrics = drawn.evaluate(AGGREGATES[name], mask=torch.zeros(6, 7))
    assert loss == 0.0
    assert not gradient.any()
    assert "policy/ratio_mean" not in metrics
    assert metrics["policy/tokens"] == 0


@pytest.mark.parametrize("name", sorted(AGGREGATES))
@pytest.mark.parametrize("size", [30.0, 1e3, 1e30])
def test_extreme_ratios_stay_finite_are_counted_and_have_no_gradient_through_the_ratio(name, size):
    drawn, objective = Drawn(2), replace(AGGREGATES[name], kl="k3_weighted", kl_coef=0.1)
    signs = torch.where(torch.rand(6, 7, generator=torch.Generator().manual_seed(0)) > 0.5, 1.0, -1.0)
    new = drawn.old + size * signs
    loss, gradient, metrics = drawn.evaluate(objective, new=new)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/clamped"] > 0
    if AGGREGATES[name].loss == "ppo" and objective.ratio_level == "token":
        assert not gradient.any()
        assert metrics["policy/clamped"] == int((drawn.mask & drawn.counted[:, None]).sum())


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_float32_logprobs_give_the_float64_result_and_a_float32_gradient(name):
    drawn, objective = Drawn(4), replace(AGGREGATES[name], kl="k3")
    exact = drawn.evaluate(objective)
    rough = drawn.evaluate(objective, **{key: getattr(drawn, key).float() for key in ("new", "old", "ref", "sampler")})
    assert rough[1].dtype == torch.float32
    assert rough[0].item() == pytest.approx(exact[0].item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(rough[1].double(), exact[1], rtol=1e-4, atol=1e-6)


def test_no_gradient_reaches_any_policy_but_the_current_one():
    drawn = Drawn(5)
    constants = {key: getattr(drawn, key).clone().requires_grad_() for key in ("old", "ref", "sampler", "advantages")}
    objective = Objective(kl="k3_weighted", correction="tis_token", off_policy_delta=0.1)
    drawn.evaluate(objective, **constants)
    assert all(tensor.grad is None for tensor in constants.values())


def test_a_tensor_of_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"advantages must be \(2,\)"):
        objective_loss(Objective(), torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="old_logprobs must be"):
        objective_loss(Objective(), torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3), torch.zeros(2))
