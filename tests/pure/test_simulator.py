"""Runs on a virtual clock: timelines small enough to be worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planner.architecture import read_architecture
from cluster.planner.calibrate import Measured, calibrate
from cluster.planner.cpu import MEASURED, CpuSplit
from cluster.planner.devices import device_named
from cluster.planner.split import Cluster
from cluster.planner.timing import Decoding
from cluster.planner.work import Work
from cluster.run import planning
from cluster.simulator.answers import compare, incidents
from cluster.simulator.build import on_cores
from cluster.simulator.clock import Clock
from cluster.simulator.engine import EngineModel, ModelledEngine, Piece
from cluster.simulator.learner import LearnerModel
from cluster.simulator.lengths import Lengths
from cluster.simulator.outcome import Outcome
from cluster.simulator.scenario import Fault, Scenario
from cluster.simulator.text import comparison_lines, incident_lines, round_lines
from cluster.simulator.world import Impossible, simulate

QWEN_7B = str(Path(__file__).parents[1] / "data" / "models" / "qwen2.5-7b")
SECOND = Decoding(host=1.0, host_response=0.0, weights=0.0, context=0.0, compute=0.0)
"""Every step takes a second."""
FIVE = LearnerModel(
    ranks=1,
    token=0.0,
    padding=1.0,
    microbatch=0.0,
    budget=1 << 30,
    passes=3.0,
    forward_sends=0.0,
    training_sends=0.0,
    step=5.0,
    old_logprobs=False,
)
"""Every optimizer step takes five seconds."""
TINY = Scenario(
    name="tiny",
    schedule="phased",
    max_lag=0,
    rounds=3,
    groups=(1, 1),
    group_size=1,
    lengths=Lengths("fixed", 10, 10),
    prompt_tokens=0,
    engines=1,
    engine=EngineModel(SECOND, slots=8, prompt_tokens=0, prefill=0.0),
    learner=FIVE,
    sync=1.0,
    record=2.0,
    engine_start=7.0,
    ranks_start=20.0,
    restore=3.0,
)


def played(**change: object) -> Outcome:
    return simulate(dataclasses.replace(TINY, **change))  # type: ignore[arg-type]


def finished(lengths: list[tuple[int, ...]], model: EngineModel, slowness: float = 1.0) -> list[tuple[float, str]]:
    """When which group is done on one engine that gets all of them at once."""
    clock, done = Clock(), []
    engine = ModelledEngine("e", model, clock, lambda _, piece: done.append((clock.now, piece.key[0])), slowness)
    engine.ask([Piece((str(index), 0), each) for index, each in enumerate(lengths)])
    while clock.step():
        pass
    assert engine.idle
    return done


def test_what_is_due_at_once_happens_in_the_order_of_asking() -> None:
    clock, seen = Clock(), []
    for name, seconds in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.after(seconds, lambda name=name: seen.append((clock.now, name)))  # type: ignore[misc]
    while clock.step():
        pass
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_a_group_is_done_with_its_longest_response() -> None:
    model = EngineModel(SECOND, slots=8, prompt_tokens=0, prefill=0.0)
    assert finished([(3, 5), (1, 2)], model) == [(2.0, "1"), (5.0, "0")]


def test_responses_take_turns_when_there_are_more_than_slots() -> None:
    model = EngineModel(SECOND, slots=2, prompt_tokens=0, prefill=0.0)
    # 0 and 1 run; 1 ends at 2 and lets 2 in, 0 ends at 3 and lets 3 in
    assert finished([(3,), (2,), (4,), (1,)], model) == [(2.0, "1"), (3.0, "0"), (4.0, "3"), (6.0, "2")]


def test_a_step_costs_what_runs_in_it_and_what_that_looks_back_on() -> None:
    cost = Decoding(host=1.0, host_response=0.5, weights=0.0, context=0.01, compute=0.0)
    model = EngineModel(cost, slots=8, prompt_tokens=100, prefill=2.0)
    # prompts 2 x 2 s; two steps of 1 + 2 x 0.5 + 0.01 x 2 x (100, 101); then two of 1 + 0.5 + 0.01 x (102, 103)
    times = dict((name, at) for at, name in finished([(2,), (4,)], model))
    assert times == pytest.approx({"0": 4 + 2 * 2 + 4.02, "1": 4 + 2 * 2 + 4.02 + 2 * 1.5 + 2.05})


def test_coarse_steps_end_responses_together() -> None:
    model = EngineModel(SECOND, slots=2, prompt_tokens=0, prefill=0.0, grain=4)
    # 1 and 2 tokens end at 4 together, then 5 tokens at 9
    assert finished([(1,), (2,), (5,)], model) == [(4.0, "0"), (4.0, "1"), (9.0, "2")]
    cost = Decoding(host=0.0, host_response=0.0, weights=0.0, context=1.0, compute=0.0)
    looking = EngineModel(cost, slots=8, prompt_tokens=10, prefill=0.0, grain=4)
    # four steps of two that look back on 10 to 13 tokens; then four of one that looks back on 14 to 17
    assert finished([(2,), (5,)], looking) == [(92.0, "0"), (154.0, "1")]


def test_prompts_are_read_once_per_group_or_per_response() -> None:
    once = EngineModel(SECOND, slots=8, prompt_tokens=0, prefill=2.0)
    assert finished([(1, 1, 1)], once) == [(3.0, "0")]
    assert finished([(1, 1, 1)], dataclasses.replace(once, prefill_each=True)) == [(7.0, "0")]


def test_a_slow_engine_takes_longer_for_everything() -> None:
    model = EngineModel(SECOND, slots=8, prompt_tokens=0, prefill=2.0)
    assert finished([(3,)], model, slowness=2.0) == [(10.0, "0")]


def test_a_minibatch_is_cut_into_microbatches_of_every_rank() -> None:
    learner = LearnerModel(
        ranks=2,
        token=0.01,
        padding=1.1,
        microbatch=0.5,
        budget=60,
        passes=3.0,
        forward_sends=0.1,
        training_sends=2.0,
        step=4.0,
        old_logprobs=True,
    )
    # 200 tokens: 110 per rank, 2 microbatches of 55: 3 x 0.55 s of compute hides behind 2 s of sending
    assert learner.train([200]) == pytest.approx(2 * (2.0 + 1.5) + 4.0)
    # old log-probs of all minibatches but the first: one pass, 0.55 s of compute
    assert learner.old([999, 200]) == pytest.approx(2 * (0.55 + 0.5))
    slower = dataclasses.replace(learner, slowest=2.0)
    assert slower.train([200]) == pytest.approx(2 * (3.3 + 1.5) + 4.0)


def test_phased_adds_everything_up() -> None:
    outcome = played()
    assert [each.end for each in outcome.rounds] == [23.0, 46.0, 69.0]  # 10 generate, 10 learn, 1 sync, 2 record
    assert outcome.round_seconds == 23.0
    assert outcome.lag == 0
    assert outcome.engines_idle == pytest.approx(13 / 23)
    assert outcome.learner_idle == pytest.approx(13 / 23)


def test_streamed_records_while_the_next_round_is_generated() -> None:
    outcome = played(schedule="streamed")
    assert [each.begin for each in outcome.rounds] == [0.0, 21.0, 42.0]
    assert outcome.round_seconds == 21.0
    assert outcome.lag == 0


def test_streamed_trains_a_minibatch_while_later_groups_are_generated() -> None:
    # one slot: the first group is in at 10 and trained until 15, the second at 20 and trained until 25
    slot = dataclasses.replace(TINY.engine, slots=1)
    assert played(schedule="streamed", engine=slot, rounds=1).seconds == 28.0
    assert played(schedule="phased", engine=slot, rounds=1).seconds == 33.0


def test_async_generates_while_it_trains_and_lags_behind() -> None:
    outcome = played(schedule="async", max_lag=1)
    assert [each.begin for each in outcome.rounds] == [0.0, 10.0, 21.0]
    assert [each.lag for each in outcome.rounds] == [0, 1, 1]
    assert outcome.round_seconds == 13.0


def test_colocated_devices_are_handed_over_twice_a_round() -> None:
    assert played(turn=4.0).round_seconds == 27.0


def test_old_logprobs_are_the_samplers_under_streamed() -> None:
    learner = dataclasses.replace(FIVE, token=0.1, old_logprobs=True)
    # 10 tokens per minibatch: training 3 s + 5 s each, old log-probs of the second one 1 s
    assert played(learner=learner).round_seconds == 10 + 1 + 16 + 1 + 2
    assert played(learner=learner, schedule="streamed").round_seconds == 10 + 16 + 1


def test_an_engine_that_dies_costs_its_start_a_sync_and_what_it_had_begun() -> None:
    outcome = played(faults=(Fault(4.0, "engine-0"),))
    # up at 11, in sync at 12, and the ten seconds anew: 12 lost
    assert [each.end for each in outcome.rounds] == [35.0, 58.0, 81.0]
    assert outcome.restarts == 1
    assert outcome.lost_groups == 2


def test_the_work_of_a_dead_engine_is_done_by_those_that_have_time() -> None:
    outcome = played(engines=2, faults=(Fault(4.0, "engine-0"),), engine_start=1000.0, rounds=1)
    # engine-1 ends its own group at 10 and then does the other one until 20
    assert outcome.rounds[0].generate == 20.0
    assert outcome.lost_groups == 1


def test_an_engine_that_hangs_is_found_by_supervision() -> None:
    limits = dataclasses.replace(TINY.limits, silence=8.0)
    outcome = played(faults=(Fault(4.0, "engine-0", "hangs"),), limits=limits, rounds=1)
    # last progress seen at 2; more than 8 s of silence at the look of 12; up at 19, in sync at 20, done at 30
    assert outcome.rounds[0].generate == 30.0


def test_ranks_that_die_learn_again_since_the_last_commit() -> None:
    outcome = played(faults=(Fault(13.0, "ranks"),), rounds=1)
    # lost at 13 in the middle of learning; up at 33, restored at 36, then 10 s of learning, sync, record
    assert outcome.seconds == 36 + 10 + 1 + 2
    assert outcome.restarts == 1


def test_steps_of_a_streamed_round_are_made_again_too() -> None:
    slot = dataclasses.replace(TINY.engine, slots=1)
    outcome = played(schedule="streamed", engine=slot, rounds=1, faults=(Fault(17.0, "ranks"),))
    # the first minibatch was trained at 15, the ranks die at 17, are back at 40; then both minibatches
    assert outcome.seconds == 40 + 5 + 5 + 1 + 2


def test_a_run_that_loses_its_engine_too_often_is_given_up() -> None:
    faults = tuple(Fault(4.0 + 9 * attempt, "engine-0") for attempt in range(6))
    with pytest.raises(Impossible, match="engine-0"):
        played(faults=faults)


@given(
    kind=st.sampled_from(["phased", "streamed", "async"]),
    engines=st.integers(1, 4),
    slots=st.integers(1, 6),
    groups=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    size=st.integers(1, 3),
    seed=st.integers(0, 1000),
    strikes=st.lists(st.tuples(st.floats(0, 200), st.integers(0, 3), st.sampled_from(["dies", "hangs"])), max_size=2),
)
@settings(deadline=None, max_examples=60)
def test_whatever_happens_every_token_is_generated_once_and_every_round_is_committed(
    kind, engines, slots, groups, size, seed, strikes
) -> None:
    lengths = Lengths("uniform", 20, 40)
    scenario = dataclasses.replace(
        TINY,
        schedule=kind,
        max_lag=1,
        engines=engines,
        groups=tuple(groups),
        group_size=size,
        lengths=lengths,
        engine=dataclasses.replace(TINY.engine, slots=slots),
        faults=tuple(Fault(at, f"engine-{who % engines}", how) for at, who, how in strikes),
        limits=dataclasses.replace(TINY.limits, silence=30.0),
        seed=seed,
    )
    outcome = simulate(scenario)
    drawn = sum(int(lengths.draw(sum(groups), size, seed + number).sum()) for number in (1, 2, 3))
    assert outcome.tokens == drawn
    assert [each.number for each in outcome.rounds] == [1, 2, 3]
    assert outcome.lag <= (1 if kind == "async" else 0)
    ends = [each.end for each in outcome.rounds]
    assert ends == sorted(ends)


@pytest.mark.parametrize(("mean", "longest"), [(100, 10_000), (2000, 4096), (6000, 28_672)])
def test_lengths_have_the_mean_that_was_asked_for_after_they_are_cut(mean: int, longest: int) -> None:
    drawn = Lengths("lognormal", mean, longest).draw(2000, 16, seed=1)
    assert drawn.mean() == pytest.approx(mean, rel=0.05)
    assert drawn.max() <= longest
    assert drawn.min() >= 1
    between = np.log(drawn).mean(axis=1).var() / np.log(drawn).var()
    assert between > 0.4  # the responses of a group resemble each other


def test_a_comparison_shows_every_schedule_and_what_incidents_cost() -> None:
    model, lengths = read_architecture(QWEN_7B), Lengths("lognormal", 1000, 4096)
    work = Work(32, 8, 4, 100, 1000, 4096, 4196, 16384, 1024, True, False)
    found = compare(model, work, Cluster(device_named("h100"), 8, 8), lengths)
    assert {(split.placement, split.schedule) for split, _ in found} == {
        ("colocated", "phased"),
        ("separate", "streamed"),
        ("separate", "async"),
    }
    times = [outcome.round_seconds for _, outcome in found]
    assert times == sorted(times)
    text = "\n".join(comparison_lines(found, lengths))
    assert "engines idle" in text
    calm = found[0][1]
    told = incidents(calm.scenario, calm)
    assert all(outcome.seconds > calm.seconds for _, outcome in told)
    assert "a rank dies" in "\n".join(incident_lines(calm, told))


def test_cores_are_simulated_with_the_planners_costs() -> None:
    demo = read_architecture(str(Path(__file__).parents[2] / "rollout" / "tasks" / "demo"))
    work = Work(4, 16, 4, 6, 18, 32, 38, 4096, 1024, True, False)
    split = CpuSplit(engines=1, ranks=1, cores=2, kv_gib=1.0, zero_stage=0, checkpointing=False)
    outcome = simulate(on_cores(demo, work, split, MEASURED, Lengths("fixed", 18, 32), rounds=2))
    flops = demo.forward_flops(1, 0)
    step = MEASURED.step + 64 * (MEASURED.response + flops / MEASURED.engine_flops)
    prompts = 64 * 6 * flops / MEASURED.engine_flops
    assert outcome.rounds[0].generate == pytest.approx(18 * step + prompts)
    assert "generate" in "\n".join(round_lines(outcome))


def test_plan_simulates_named_gpus_and_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", QWEN_7B, "--gpu", "h100", "--rollouts", "256", "--rollout.max-new-tokens", "2048", "--simulate"]
    assert planning.main(words) == 0
    said = capsys.readouterr().out
    assert "engines idle" in said
    assert "a rank dies" in said
    assert planning.main(["--rollouts", "64", "--simulate", "--cluster.placement", "cpu"]) == 0
    assert "cpu phased" in capsys.readouterr().out


def test_costs_are_found_again_in_the_figures_that_they_lead_to() -> None:
    root = Path(__file__).parents[2] / "rollout" / "tasks" / "demo"
    demo, large = read_architecture(str(root)), read_architecture(str(root.parents[2] / "tests/data/models/qwen3-0.6b"))
    split = CpuSplit(engines=2, ranks=2, cores=2, kv_gib=1.0, zero_stage=0, checkpointing=False)
    benches = []
    for model, prompts, minibatches, length in (
        (demo, 16, 4, 32),
        (demo, 128, 16, 32),
        (large, 8, 4, 32),
        (demo, 64, 8, 64),
    ):
        work = Work(prompts, 16, minibatches, 6, length, length, 6 + length, 4096, 1024, True, False)
        scenario = on_cores(model, work, split, MEASURED, Lengths("fixed", length, length), rounds=2)
        outcome = simulate(scenario)
        rows = [16 * (prompts // minibatches) * (6.0 + length)] * minibatches
        figures = {
            "tokens": work.tokens,
            "rollouts": work.responses,
            "engines": 2,
            "ranks": 2,
            "minibatches": minibatches,
            "old_logprobs": scenario.learner.old(rows),
            "sync": scenario.sync,
            "round": outcome.round_seconds,
            "generate_and_score": outcome.rounds[1].generate,
            "learn": outcome.rounds[1].learn,
        }
        benches.append(Measured(model, 6, figures))
    assert dataclasses.asdict(calibrate(benches)) == pytest.approx(dataclasses.asdict(MEASURED), rel=1e-6)
