"""Which settings make sense together, which are refused and why, and how configuration becomes an objective."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from learner.config import CorrectionConfig, KLConfig, LearnerConfig
from learner.settings import Objective, objective_settings, without_effect
from learner.variants import PRESETS
from rollout.types import UserError


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loss": "cispo", "ratio_level": "sequence_sum"}, "token's own ratio"),
        ({"loss": "cispo", "ratio_level": "sequence_mean"}, "token's own ratio"),
        ({"ratio_level": "sequence_sum", "aggregate": "sequence_sum"}, "multiply it by its length"),
        ({"loss": "book", "ratio_level": "sequence_mean", "aggregate": "sequence_sum"}, "multiply it by its length"),
        ({"ratio_level": "sequence_sum", "correction": "tis_token"}, "use tis_sequence"),
        ({"ratio_level": "sequence_mean", "correction": "mask_token"}, "use mask_sequence"),
        ({"dual_clip": 1.2}, "cut inside the range"),
        ({"dual_clip": 10.0, "clip_high": 10.0}, "cut inside the range"),
        ({"kl": "k3", "kl_length_normalise": True}, "sums nothing over a response"),
        ({"kl_length_normalise": True}, "sums nothing over a response"),
        ({"aggregate": "constant"}, "constant_length, which is not set"),
        ({"aggregate": "constant", "constant_length": 0}, "above 0"),
        ({"correction": "mask_token", "correction_floor": 3.0}, "that is none"),
        ({"loss": "pppo"}, "book, cispo, ppo, reinforce"),
        ({"ratio_level": "sequence"}, "choose one of: token"),
        ({"aggregate": "mean"}, "choose one of: sequence_sum"),
        ({"kl": "k4"}, "choose one of: none"),
        ({"correction": "tis"}, "choose one of: none"),
        ({"clip_low": -0.1}, "at least 0"),
        ({"clip_high": float("nan")}, "at least 0"),
        ({"cispo_cap": 0.0}, "above 0"),
        ({"off_policy_delta": -1.0}, "at least 0"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(wrong, says):
    with pytest.raises(UserError, match=f"(?i){says}"):
        Objective(**wrong)


def test_a_dual_clip_at_the_upper_bound_itself_is_allowed_for_it_cuts_nothing_inside():
    assert Objective(clip_low=10, clip_high=10, dual_clip=11).dual_clip == 11


def test_the_aggregate_follows_the_ratio_where_it_is_left_open():
    assert Objective().reduction == "token_mean"
    assert Objective(ratio_level="sequence_mean").reduction == "sequence_mean"
    assert Objective(ratio_level="sequence_mean", aggregate="token_mean").reduction == "token_mean"
    assert Objective(loss="reinforce", ratio_level="sequence_sum").reduction == "token_mean"


def test_settings_that_do_nothing_are_named():
    assert without_effect(Objective()) == ()
    assert without_effect(Objective(clip_high=0.2, dual_clip=3.0)) == ()
    assert "dual_clip" in without_effect(Objective(loss="book", dual_clip=3.0))[0]
    assert "clip_low" in without_effect(Objective(loss="reinforce", clip_low=0.1))[0]
    assert "cispo_cap" in without_effect(Objective(cispo_cap=2.0))[0]
    assert "ratio_level" in without_effect(Objective(loss="reinforce", ratio_level="sequence_sum"))[0]
    assert (
        "aggregate" in without_effect(Objective(ratio_level="sequence_sum", aggregate="constant", constant_length=9))[0]
    )
    assert "correction_floor" in without_effect(Objective(correction="tis_token", correction_floor=0.5))[0]
    assert "geometric" in without_effect(Objective(correction="tis_token", correction_geometric_mean=True))[0]


def test_a_weight_back_to_the_sampler_is_refused_where_the_ratio_starts_there():
    anchored = LearnerConfig(old_logprobs="sampler")
    with pytest.raises(UserError, match="twice"):
        objective_settings(anchored, KLConfig(), CorrectionConfig(kind="tis_token"), 512)
    assert objective_settings(anchored, KLConfig(), CorrectionConfig(), 512).correction == "none"


def test_every_setting_of_the_configuration_reaches_the_objective():
    learner = LearnerConfig(
        loss="book", clip_low=0.3, clip_high=0.4, dual_clip=5.0, cispo_cap=4.0, aggregate="constant"
    )
    kl = KLConfig(kind="book_weighted", coef=0.02, length_normalise=True)
    correction = CorrectionConfig(kind="mask_token", cap=3.0, floor=0.25, off_policy_delta=0.5)
    objective = objective_settings(learner, kl, correction, 512)
    assert objective == Objective(
        loss="book",
        clip_low=0.3,
        clip_high=0.4,
        dual_clip=5.0,
        cispo_cap=4.0,
        aggregate="constant",
        constant_length=512,
        kl="book_weighted",
        kl_coef=0.02,
        kl_length_normalise=True,
        correction="mask_token",
        correction_cap=3.0,
        correction_floor=0.25,
        off_policy_delta=0.5,
    )
    assert objective_settings(replace(learner, constant_length=99), kl, correction, 512).constant_length == 99


def configured(preset: str) -> Objective:
    sections: dict[str, Any] = {"learner": LearnerConfig(), "kl": KLConfig(), "correction": CorrectionConfig()}
    for name, value in PRESETS[preset].settings.items():
        section, _, field = name.partition(".")
        if section in sections:
            sections[section] = replace(sections[section], **{field: value})
    return objective_settings(sections["learner"], sections["kl"], sections["correction"], 1024)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_an_objective_in_which_each_setting_has_an_effect(preset):
    assert without_effect(configured(preset)) == ()


def test_the_default_objective_is_that_of_the_preset_grpo():
    assert configured("grpo") == replace(Objective(), aggregate="token_mean")
    bare = objective_settings(LearnerConfig(), KLConfig(), CorrectionConfig(), 1)
    assert bare == Objective()
    assert bare.reduction == configured("grpo").reduction


def test_checking_an_objective_loads_no_heavy_library():
    code = (
        "import sys, learner.settings as s, learner.variants; s.Objective(ratio_level='sequence_sum')\n"
        "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_objectives_can_be_compared_hashed_and_are_frozen():
    assert len({Objective(), Objective(), Objective(clip_low=0.1)}) == 2
    assert all(field.name for field in fields(Objective))
    with pytest.raises(AttributeError):
        Objective().clip_low = 3.0  # type: ignore[misc]
