"""The pool of engines under every kind of trouble: each group comes out once, and it is the group it always was."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import BrokenPromise, RemoteFailure
from cluster.fleet import Limits, State
from cluster.shares import Shares
from cluster.waiting import ActorLost
from rollout.types import Group
from tests.pure.fake_engines import Behaviour, World, group, request

WELL = Behaviour()


def same_groups(answers: list[Group], count: int) -> bool:
    """Every group once, each with the tokens its seed gives."""
    expected = {request(number).key: group(request(number), "engine-0") for number in range(count)}
    found = {answer.request.key: answer for answer in answers}
    assert len(answers) == len(found) == count, f"{len(answers)} answers, {len(found)} groups, {count} planned"
    return all(np.array_equal(found[key].token_ids, expected[key].token_ids) for key in expected)


def test_without_trouble_the_groups_are_shared_out_evenly_and_in_order() -> None:
    world = World([WELL], [WELL])
    assert same_groups(world.run(9), 9)
    assert [engine.asked for engine in world.born] == [
        [["row-0", "row-2", "row-4", "row-6", "row-8"]],
        [["row-1", "row-3", "row-5", "row-7"]],
    ]
    assert world.said == []
    assert world.pool.restarts == 0


def test_an_engine_that_dies_is_replaced_and_its_groups_are_generated_again() -> None:
    world = World([Behaviour(dies_at=2), WELL], [WELL])
    answers = world.run(20)
    assert same_groups(answers, 20)
    assert world.pool.restarts == 1
    assert any("engine-0 lost: engine-0: the process died" in line for line in world.said)
    assert {answer.attempt for answer in answers} == {0, 1}
    assert world.fleet.states() == {"engine-0": State.HEALTHY, "engine-1": State.HEALTHY}


def test_the_others_take_over_while_the_replacement_starts() -> None:
    """Nobody waits for it: with a replacement that takes 60 s, 16 groups at 1 s each are done long before."""
    world = World([Behaviour(dies_at=2), Behaviour(start=60.0)], [WELL])
    assert same_groups(world.run(16), 16)
    assert world.now < 25


def test_a_replacement_is_given_the_weights_before_any_work() -> None:
    world = World([Behaviour(dies_at=0), WELL])
    assert same_groups(world.run(4), 4)
    assert world.refreshed == ["engine-0"]
    assert world.born[1].asked == [["row-0", "row-1", "row-2", "row-3"]]


def test_the_only_engine_may_be_lost_three_times_and_not_a_fourth() -> None:
    world = World([Behaviour(dies_at=1)])
    with pytest.raises(RemoteFailure, match="lost 4 times within 60 min, the last time engine-0: the process died"):
        world.run(8)
    assert world.pool.restarts == 3
    assert same_groups(World([Behaviour(dies_at=1)] * 3 + [WELL]).run(8), 8)


def test_an_engine_without_room_is_done_without_and_comes_back_when_there_is_some() -> None:
    world = World([Behaviour(dies_at=1), Behaviour(seat=False), WELL], [WELL])
    assert same_groups(world.run(20), 20)
    assert world.fleet.states() == {"engine-0": State.UNSEATED, "engine-1": State.HEALTHY}
    assert world.pool.restarts == 0
    assert any("engine-0: no node has room for it; the run goes on without" in line for line in world.said)
    world.pool.settle()  # nobody waits for it
    world.pool.welcome("engine-0")
    assert same_groups(world.run(40), 40)
    assert world.refreshed == ["engine-0"], "it worked before it was given the weights"
    assert world.fleet.states() == {"engine-0": State.HEALTHY, "engine-1": State.HEALTHY}
    assert same_groups(world.run(8), 8)
    assert world.born[-1].done == 4


def test_an_engine_that_must_leave_its_seat_is_forgotten_and_the_others_do_its_groups() -> None:
    world = World([WELL], [WELL])
    gone: list[str] = []

    def give_up_once() -> bool:
        if world.now > 3 and not gone:
            gone.append("engine-1")
            world.pool.give_up("engine-1", "ranks need its GPUs")
        return False

    assert same_groups(world.run(20, give_up_once), 20)
    assert world.fleet.states() == {"engine-0": State.HEALTHY, "engine-1": State.UNSEATED}
    assert list(world.pool.engines) == ["engine-0"]
    assert same_groups(world.run(6), 6)


def test_an_engine_that_left_its_seat_and_gets_another_is_started_once() -> None:
    world = World([WELL], [WELL])
    world.pool.give_up("engine-1", "ranks need its GPUs")
    world.pool.welcome("engine-1")
    assert len(world.born) == 3
    assert same_groups(world.run(40), 40)
    assert world.fleet.states() == {"engine-0": State.HEALTHY, "engine-1": State.HEALTHY}


def test_a_restart_that_falls_due_between_two_generations_is_made_in_the_second() -> None:
    """While ranks learn the time passes for engines too; who is not started then is waited for until a timeout."""
    world = World([WELL], [WELL])
    assert same_groups(world.run(4), 4)
    world.pool.lost(ActorLost("engine-0", "the process died"))
    assert same_groups(world.run(40), 40)
    assert world.fleet.states() == {"engine-0": State.HEALTHY, "engine-1": State.HEALTHY}
    assert len(world.born) == 3


def test_without_room_for_the_last_engine_the_run_ends() -> None:
    world = World([Behaviour(dies_at=1), Behaviour(seat=False)])
    with pytest.raises(RemoteFailure, match="engine-0: no node has room for it"):
        world.run(8)


def test_an_engine_that_is_lost_again_and_again_is_given_up_and_the_others_finish() -> None:
    world = World([Behaviour(dies_at=1)], [WELL])
    assert same_groups(world.run(60), 60)
    assert world.fleet.states() == {"engine-0": State.RETIRED, "engine-1": State.HEALTHY}
    assert list(world.pool.engines) == ["engine-1"]
    assert same_groups(world.run(10), 10)


def test_an_engine_that_hangs_is_found_by_its_silence() -> None:
    world = World([Behaviour(hangs_at=1), WELL], limits=Limits(silence=30.0))
    assert same_groups(world.run(3), 3)
    assert any("no progress for" in line for line in world.said)
    assert 30 < world.now < 30 + 5 + 20


def test_a_replacement_that_does_not_come_up_is_tried_again() -> None:
    world = World([Behaviour(dies_at=0), Behaviour(start=None), Behaviour(start=None), WELL])
    assert same_groups(world.run(4), 4)
    assert world.pool.restarts == 3


def test_a_slow_engine_is_named_and_those_that_are_done_do_its_groups() -> None:
    world = World([Behaviour(pace=50.0)], [WELL])
    assert same_groups(world.run(8), 8)
    assert world.now < 30
    assert sum("slow engine-0 is slow" in line for line in world.said) == 1
    assert world.pool.restarts == 0
    world.pool.settle()
    assert same_groups(world.run(2), 2)


def test_a_slow_engine_that_answers_after_all_is_not_counted_twice() -> None:
    world = World([Behaviour(pace=9.0)], [WELL])
    answers = world.run(12)
    assert same_groups(answers, 12)
    assert {answer.engine for answer in answers} == {0, 1}


def test_an_engine_that_does_not_stop_working_on_what_others_have_done_is_waited_for_before_a_sync() -> None:
    world = World([Behaviour(pace=50.0, obeys=False)], [WELL], limits=Limits(silence=60.0))
    assert same_groups(world.run(4), 4)
    before = world.now
    world.pool.settle()
    assert 50 < world.now - before < 120


def test_answers_that_come_a_generation_late_are_discarded() -> None:
    world = World([Behaviour(pace=20.0, obeys=False)], [WELL])
    assert same_groups(world.run(8), 8)
    assert "engine-0" in world, "it is still at work on what others have answered"
    assert same_groups(world.run(30), 30)
    world.pool.settle()
    assert same_groups(world.run(4), 4)


def test_unsound_logprobs_cost_the_engine_and_the_group_is_generated_once_more() -> None:
    world = World([Behaviour(lies_about="row-2"), WELL], [WELL])
    assert same_groups(world.run(6), 6)
    assert world.pool.restarts == 1


def test_unsound_logprobs_of_the_same_group_on_another_engine_are_a_broken_promise() -> None:
    world = World([Behaviour(lies_about="row-2")], [Behaviour(lies_about="row-2")])
    with pytest.raises(BrokenPromise, match=r"row-2 has no log-probs\n  It was so on two engines"):
        world.run(6)


def test_a_stream_that_ends_without_its_groups_is_a_lost_engine() -> None:
    world = World([Behaviour(ends_early=True), WELL], [WELL])
    assert same_groups(world.run(6), 6)
    assert any("it ended without an answer to 3 groups" in line for line in world.said)


def test_an_engine_stays_stale_while_its_weights_cannot_be_had() -> None:
    world = World([Behaviour(dies_at=1), Behaviour(start=1.0)], [WELL])
    world.stale = True
    assert same_groups(world.run(20), 20)
    assert world.fleet.states()["engine-0"] is State.STALE
    assert {answer for engine in world.born[2:] for answer in engine.asked} == set()


def test_without_an_engine_that_holds_the_weights_the_run_ends_and_says_why() -> None:
    world = World([Behaviour(dies_at=1), Behaviour(start=1.0)])
    world.stale = True
    with pytest.raises(RemoteFailure, match="the learner has moved on"):
        world.run(4)


def test_an_engine_lost_in_a_sync_is_back_before_the_next() -> None:
    world = World([WELL], [WELL])
    world.pool.lost(ActorLost("engine-1", "the process died"))
    assert list(world.pool.engines) == ["engine-0"]
    world.pool.settle()
    assert list(world.pool.engines) == ["engine-0", "engine-1"]
    assert world.fleet.states()["engine-1"] is State.STALE
    assert world.refreshed == []


def test_a_group_that_is_not_whole_is_a_broken_promise() -> None:
    shares = Shares([request(0)])
    shares.deal(["engine-0"])
    with pytest.raises(BrokenPromise, match="gave 3 of 4 responses to row row-0"):
        shares.answer("engine-0", group(request(0), "engine-0", size=3))


def test_a_group_of_another_round_is_a_broken_promise() -> None:
    shares = Shares([request(0)])
    shares.deal(["engine-0"])
    other = dataclasses.replace(request(0), round=2)
    with pytest.raises(BrokenPromise, match="another round or seed"):
        shares.answer("engine-0", group(other, "engine-0"))


def test_a_group_nobody_asked_for_is_a_broken_promise() -> None:
    shares = Shares([request(0)])
    with pytest.raises(BrokenPromise, match="was not asked for"):
        shares.answer("engine-0", group(request(0), "engine-0"))


BEHAVIOURS = st.builds(
    Behaviour,
    pace=st.sampled_from([0.5, 1.0, 7.0, 40.0]),
    dies_at=st.one_of(st.none(), st.integers(0, 5)),
    hangs_at=st.one_of(st.none(), st.integers(0, 5)),
    ends_early=st.booleans(),
    obeys=st.booleans(),
    start=st.one_of(st.none(), st.floats(0.0, 30.0)),
)


@given(st.lists(st.lists(BEHAVIOURS, min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 12))
def test_whatever_engines_do_every_group_comes_out_once_or_the_run_says_why_not(
    lives: list[list[Behaviour]], groups: int
) -> None:
    world = World(*lives, [WELL])  # one engine is well, so the work can be done
    assert same_groups(world.run(groups), groups)
    assert all(state is not State.SUSPECT or name in world for name, state in world.fleet.states().items())
    world.pool.settle()
    assert len(world) == 0


@given(st.lists(st.tuples(st.sampled_from("tlao"), st.integers(0, 2)), max_size=60), st.integers(1, 12))
def test_shares_lose_and_double_nothing(moves: list[tuple[str, int]], count: int) -> None:
    shares = Shares([request(number) for number in range(count)])
    asked: dict[str, list[int]] = {f"engine-{index}": [] for index in range(3)}
    answered: list[tuple[str, int]] = []
    for move, index in [*moves, ("l", 0), ("l", 1), ("l", 2), *[("t", 0), ("a", 0)] * count]:
        name = f"engine-{index}"
        if move == "t":
            asked[name] += [each.seed - 1000 for each in shares.take(name, 1)]
        elif move == "l":
            shares.lost(name)
            asked[name].clear()
        elif move == "o":
            shares.offer(name)
        elif asked[name]:
            for number in asked[name]:
                first = shares.answer(name, group(request(number), name))
                answered += [first.request.key] if first is not None else []
            asked[name].clear()
    assert shares.open == 0
    assert sorted(answered) == sorted(request(number).key for number in range(count))


def test_an_engine_for_which_there_is_no_place_any_more_is_given_up_aloud_and_the_others_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World([Behaviour(dies_at=1)], [WELL])
    begin = world.pool._source.begin_engine

    def begin_engine(name: str) -> object:
        if name == "engine-0":
            raise ActorLost(name, "its node is gone, and no other has room for it")
        return begin(name)

    monkeypatch.setattr(world.pool._source, "begin_engine", begin_engine)
    assert same_groups(world.run(60), 60)
    assert world.fleet.states()["engine-0"] == State.RETIRED
    assert any("no other has room for it" in line for line in world.said)
