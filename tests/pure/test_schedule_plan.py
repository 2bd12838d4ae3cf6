"""What each schedule asks of the other options, and what those that were left open become."""

from __future__ import annotations

import pytest

from cluster.errors import PlanError
from cluster.model_facts import read_model_facts
from cluster.plan import Plan, make_plan
from cluster.plan_text import plan_text
from cluster.resources import Resources
from cluster.run.cli import parse
from rollout.types import UserError

LAPTOP = Resources(cpus=2, gpus=0, memory=16 << 30)
NODE = Resources(cpus=64, gpus=8, memory=512 << 30)


def planned(*words: str, on: Resources = LAPTOP) -> Plan:
    config = parse(list(words))
    return make_plan(config, on, read_model_facts(config.model))


@pytest.mark.parametrize(
    ("words", "on", "schedule", "old"),
    [
        ((), LAPTOP, "phased", "recompute"),
        (("--cluster.schedule", "streamed"), LAPTOP, "streamed", "sampler"),
        (("--cluster.placement", "separate"), NODE, "streamed", "sampler"),
        (("--cluster.placement", "colocated"), NODE, "phased", "recompute"),
        (("--cluster.placement", "separate", "--learner.advantage", "batch_std"), NODE, "phased", "recompute"),
        (("--cluster.placement", "separate", "--cluster.schedule", "phased"), NODE, "phased", "recompute"),
    ],
)
def test_the_schedule_follows_the_placement_and_old_logprobs_the_schedule(
    words: tuple[str, ...], on: Resources, schedule: str, old: str
) -> None:
    plan = planned(*words, on=on)
    assert (plan.schedule, plan.old_logprobs, plan.max_lag) == (schedule, old, 0)
    assert plan.objective.correction == "none"


def test_the_plan_says_why_separate_devices_are_not_streamed() -> None:
    plan = planned("--cluster.placement", "separate", "--filter.dynamic-sampling", on=NODE)
    assert any(note.startswith("schedule phased instead of streamed: --filter.dynamic-sampling") for note in plan.notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--learner.advantage", "batch_std"), "normalised over all responses of the round"),
        (("--learner.advantage", "gdpo"), "gdpo_group"),
        (("--filter.dynamic-sampling",), "draws other prompts"),
        (("--learner.old-logprobs", "recompute"), "before the first step changes the policy"),
        (("--correction.kind", "tis_token"), "takes the sampler's"),
    ],
)
def test_what_needs_the_whole_round_is_not_streamed(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=r"Use --cluster\.schedule phased or async, or") as refused:
        planned("--cluster.schedule", "streamed", *words)
    assert said in str(refused.value)
    assert planned("--cluster.schedule", "async", *words).schedule == "async"


@pytest.mark.parametrize("schedule", ["streamed", "async"])
def test_devices_that_take_turns_overlap_nothing(schedule: str) -> None:
    with pytest.raises(PlanError, match="share their GPUs"):
        planned("--cluster.placement", "colocated", "--cluster.schedule", schedule, on=NODE)


@pytest.mark.parametrize(
    ("words", "correction", "geometric"),
    [
        ((), "tis_token", False),
        (("--preset", "r1"), "tis_sequence", False),
        (("--preset", "gspo"), "tis_sequence", True),
        (("--learner.loss", "reinforce"), "tis_token", False),
        (("--correction.kind", "mask_token"), "mask_token", False),
        (("--correction.kind", "none"), "none", False),
        (("--learner.old-logprobs", "sampler"), "none", False),
    ],
)
def test_async_corrects_for_the_lag_unless_it_is_told_otherwise(
    words: tuple[str, ...], correction: str, geometric: bool
) -> None:
    plan = planned("--cluster.schedule", "async", *words)
    assert (plan.objective.correction, plan.objective.correction_geometric_mean) == (correction, geometric)
    assert plan.max_lag == 1
    assert any("behind" in note or "lag itself" in note for note in plan.notes) or correction == "mask_token"


def test_async_needs_room_to_be_behind() -> None:
    with pytest.raises(PlanError, match="nothing can overlap"):
        planned("--cluster.schedule", "async", "--cluster.max-lag", "0")


def test_a_correction_beside_the_samplers_old_logprobs_is_refused_in_every_schedule() -> None:
    for schedule in ("phased", "async"):
        with pytest.raises(UserError, match="same difference twice"):
            planned(
                "--cluster.schedule", schedule, "--correction.kind", "tis_token", "--learner.old-logprobs", "sampler"
            )


@pytest.mark.parametrize(
    ("schedule", "said"),
    [("phased", "take turns"), ("streamed", "while later ones are still generated"), ("async", "up to 3 weights")],
)
def test_the_plan_says_what_overlaps(schedule: str, said: str) -> None:
    config = parse(["--cluster.schedule", schedule, "--cluster.max-lag", "3"])
    text = plan_text(config, make_plan(config, LAPTOP, read_model_facts("demo")), LAPTOP)
    (line,) = [line for line in text.splitlines() if line.startswith("schedule ")]
    assert said in line


def test_no_field_of_the_configuration_is_rewritten() -> None:
    config = parse(["--cluster.schedule", "async"])
    make_plan(config, LAPTOP, read_model_facts("demo"))
    assert (config.correction.kind, config.learner.old_logprobs) == (None, None)
