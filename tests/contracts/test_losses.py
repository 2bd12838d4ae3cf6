"""What every policy loss keeps to, those of the folder and one brought by a user alike."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from learner import losses
from learner.aggregate import count_denominators
from learner.config import RatioLevel
from learner.objective import Objective, objective_loss, objective_terms
from rollout.types import UserError

OWN_LOSS = '''
"""A loss of one's own: squared distance of the ratio from 1, pulled by the advantage."""
from learner.losses import LossInputs, LossTerms

LEVELS = ("token", "sequence_sum")
SETTINGS = ("clip_high",)


def policy_loss(given: LossInputs) -> LossTerms:
    bounded = given.ratio.clamp(max=1 + given.clip_high)
    return LossTerms((bounded - 1 - given.advantages).square() / 2, {"high": given.ratio > 1 + given.clip_high})
'''


OWN_LEVELS = ("token", "sequence_sum")
KINDS = [(name, level) for name in losses.available() for level in losses.load(name).levels or ("token",)]


@pytest.fixture(params=[*KINDS, *(("own", level) for level in OWN_LEVELS)], ids="-".join)
def objective(request, tmp_path):
    """Each loss at each ratio level it is defined for."""
    name, level = request.param
    if name == "own":
        path = tmp_path / "own.py"
        path.write_text(OWN_LOSS)
        name = str(path)
    return Objective(loss=name, ratio_level=level)


ROWS, WIDTH = 5, 6
MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] + [0] * 5, [0] * 6, [1] * 5 + [0]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.0, -0.5, -2.0, 1.0, 0.0], dtype=torch.float64)
DRAW = torch.Generator().manual_seed(0)
OLD = -torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=DRAW) - 0.2
NEW = OLD + 0.5 * torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=DRAW)


def evaluate(objective: Objective, new=NEW, old=OLD, mask=MASK):
    logprobs = new.clone().requires_grad_()
    loss, metrics = objective_loss(objective, logprobs, old, mask, ADVANTAGES)
    loss.backward()
    return loss.item(), logprobs.grad, metrics


def test_no_gradient_leaves_the_mask_and_no_padding_enters_it(objective):
    loss, gradient, metrics = evaluate(objective)
    assert gradient[MASK].any()
    assert not gradient[~MASK].any()
    for garbage in (math.nan, math.inf, -1e30):
        spoilt = evaluate(objective, torch.where(MASK, NEW, garbage), torch.where(MASK, OLD, garbage))
        assert spoilt[0] == loss
        assert torch.equal(spoilt[1], gradient)
        assert spoilt[2] == metrics


def test_more_padding_changes_nothing(objective):
    loss, gradient, metrics = evaluate(objective)
    more = torch.full((ROWS, 3), -7.0, dtype=torch.float64)
    wide = evaluate(
        objective,
        torch.cat([NEW, more], dim=1),
        torch.cat([OLD, more - 1], dim=1),
        torch.cat([MASK, torch.zeros(ROWS, 3, dtype=torch.bool)], dim=1),
    )
    assert wide[0] == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(wide[1][:, :WIDTH], gradient, rtol=1e-13, atol=1e-15)
    assert wide[2] == pytest.approx(metrics, rel=1e-13)


@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(objective, cuts):
    loss, gradient, _ = evaluate(objective)
    denominators, logprobs = count_denominators(MASK), NEW.clone().requires_grad_()
    total = 0.0
    for rows in torch.arange(ROWS).split(cuts):
        share, _ = objective_terms(objective, logprobs[rows], OLD[rows], MASK[rows], ADVANTAGES[rows], denominators)
        share.backward()
        total += share.item()
    assert total == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("size", [25.0, 1e4, 1e20])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_ratios_stay_finite(objective, size, sign):
    loss, gradient, metrics = evaluate(objective, new=OLD + sign * size)
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_loss_returns_one_number_per_unit_in_the_units_it_was_given(objective):
    shape = (ROWS,) if objective.sequence_ratio else (ROWS, WIDTH)
    inputs = losses.LossInputs(
        ratio=torch.full(shape, 1.3, dtype=torch.float64),
        logprobs=torch.full(shape, -1.0, dtype=torch.float64),
        advantages=torch.ones(shape, dtype=torch.float64),
        valid=torch.ones(shape, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        cispo_cap=5.0,
    )
    terms = objective.policy_loss.function(inputs)
    assert terms.loss.shape == shape
    assert terms.loss.unique().numel() == 1
    for bound, where in terms.clipped.items():
        assert bound in ("low", "high", "dual")
        assert where.shape == shape
        assert where.dtype == torch.bool


def test_a_loss_of_the_users_own_is_loaded_from_its_path_and_does_what_it_says(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_LOSS)
    loss, _, metrics = evaluate(Objective(loss=str(path), clip_high=9.0), new=OLD)
    wanted = (ADVANTAGES.square() / 2 * MASK.sum(dim=1)).sum() / MASK.sum()
    assert loss == pytest.approx(wanted.item())
    assert metrics["policy/clip_fraction_high"] == 0.0


def test_a_ratio_level_that_a_loss_is_not_defined_for_is_refused(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_LOSS)
    for name in (*losses.available(), str(path)):
        for level in set(get_args(RatioLevel)) - set(losses.load(name).levels):
            if losses.load(name).levels:
                with pytest.raises(UserError, match="not defined for ratio_level"):
                    Objective(loss=name, ratio_level=level)


def test_a_loss_that_reduces_is_refused(tmp_path):
    path = tmp_path / "reduced.py"
    path.write_text(
        "from learner.losses import LossTerms\n\ndef policy_loss(given):\n    return LossTerms(given.ratio.mean())\n"
    )
    with pytest.raises(ValueError, match="one loss per unit, unreduced"):
        evaluate(Objective(loss=str(path)))


@pytest.mark.parametrize(
    ("text", "says"), [(None, "there is no such file"), ("x = 1\n", "defines no function policy_loss")]
)
def test_a_file_that_is_missing_or_defines_no_loss_is_refused(tmp_path, text, says):
    path = tmp_path / "wrong.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says):
        Objective(loss=str(path))
