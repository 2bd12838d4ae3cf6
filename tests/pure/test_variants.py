"""The table of recipes: complete, within the configuration, and with the numbers of their sources."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from cluster.config import CheckpointConfig, ClusterConfig, DoctorConfig
from learner.config import CorrectionConfig, KLConfig, LearnerConfig
from learner.variants import PRESETS
from rollout.config import DataConfig, EvalConfig, FilterConfig, RewardConfig, RolloutConfig

SECTIONS = {
    "rollout": RolloutConfig,
    "reward": RewardConfig,
    "data": DataConfig,
    "filter": FilterConfig,
    "eval": EvalConfig,
    "learner": LearnerConfig,
    "kl": KLConfig,
    "correction": CorrectionConfig,
    "cluster": ClusterConfig,
    "checkpoint": CheckpointConfig,
    "doctor": DoctorConfig,
}
UNDOTTED = {"rollouts", "minibatches", "group_size", "rounds"}


def test_all_recipes_are_there():
    assert set(PRESETS) == {
        "r1", "book-reinforce", "book-clip", "book-kl", "book-format", "grpo", "dapo", "dr-grpo", "deepseek-v3.2",
        "tis", "gdpo", "gspo", "cispo", "cheap",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_setting_of_a_recipe_exists_and_has_the_type_of_its_field(name):
    for setting, value in PRESETS[name].settings.items():
        section, dot, field = setting.partition(".")
        if not dot:
            assert section in UNDOTTED
            assert type(value) is int
            continue
        assert field in {known.name for known in fields(SECTIONS[section])}, setting
        hint = get_type_hints(SECTIONS[section])[field]
        allowed = {choice for part in get_args(hint) or (hint,) for choice in get_args(part) or (part,)}
        assert value in allowed or type(value) in allowed, f"{setting} = {value!r} is no {hint}"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_recipe_says_what_it_is_what_it_fixes_and_where_it_is_from(name):
    variant = PRESETS[name]
    assert variant.settings
    assert all(text and "\n" not in text for text in (variant.summary, variant.fixes, variant.source))


def test_numbers_of_the_sources():
    assert PRESETS["r1"].settings["kl.ref_refresh_steps"] == 400
    assert PRESETS["r1"].settings["kl.coef"] == 0.001
    assert PRESETS["r1"].settings["learner.clip_high"] == 10.0
    assert PRESETS["gspo"].settings["learner.clip_low"] == 3e-4
    assert PRESETS["gspo"].settings["learner.clip_high"] == 4e-4
    assert PRESETS["dapo"].settings["learner.clip_high"] == 0.28
    assert PRESETS["cheap"].settings == {"rollouts": 8}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_unsound_sampling_is_set_by_the_books_recipes_only_and_admitted_there(name):
    settings = PRESETS[name].settings
    unsound = settings.get("rollout.top_p", 1.0) != 1.0 or settings.get("rollout.score_at_one", False)
    assert unsound == name.startswith("book-")
    assert settings.get("rollout.allow_unscored_sampling", False) == unsound


def test_the_page_on_variants_speaks_of_each_recipe(request):
    page = (request.config.rootpath / "docs" / "variants.md").read_text()
    assert all(f"`{name}`" in page for name in PRESETS)
