"""The state machine of supervision, on a clock that the tests turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fleet import Fleet, Limits, State
from cluster.fleet_events import (
    Asked,
    Current,
    Doubt,
    End,
    Event,
    GiveUp,
    GoWithout,
    HandOn,
    Idle,
    Lost,
    Progress,
    Refresh,
    Restart,
    Retire,
    Seated,
    Started,
    Unseated,
)

LIMITS = Limits(silence=60.0, starting=300.0, restarts=3, window=3600.0, backoff=1.0)
ENGINES, RANKS = ("engine-0", "engine-1"), ("learner-0", "learner-1")
NAMES = ENGINES + RANKS


def running(limits: Limits = LIMITS) -> Fleet:
    """Two engines and two ranks, all up and holding version 0 at time 0."""
    fleet = Fleet(ENGINES, RANKS, limits, 0.0)
    for name in NAMES:
        fleet.handle(Started(name), 0.0)
    fleet.publish(0)
    for name in NAMES:
        fleet.handle(Current(name, 0), 0.0)
    assert set(fleet.states().values()) == {State.HEALTHY}
    return fleet


def later(fleet: Fleet, start: float, end: float, tokens: dict[str, float] | None = None) -> list[object]:
    """Ticks once a second; engines in `tokens` make so many tokens a second."""
    actions: list[object] = []
    now = start
    while now < end:
        now = min(now + 1.0, end)
        for name, rate in (tokens or {}).items():
            actions += fleet.handle(Progress(name, rate * now), now)
        actions += fleet.tick(now)
    return actions


def test_what_starts_gets_no_work_before_it_holds_the_weights() -> None:
    fleet = Fleet(ENGINES, RANKS, LIMITS, 0.0)
    assert fleet.usable() == ()
    assert fleet.handle(Started("engine-0"), 3.0) == []
    assert fleet.states()["engine-0"] is State.STALE
    fleet.publish(0)
    assert fleet.handle(Started("engine-1"), 4.0) == [Refresh(("engine-1",))]
    fleet.handle(Current("engine-0", 0), 5.0)
    assert fleet.usable() == ("engine-0",)
    assert fleet.coming() == ("engine-1",)


def test_a_lost_engine_is_restarted_at_once_and_stays_stale_until_a_good_receipt() -> None:
    fleet = running()
    assert fleet.handle(Lost("engine-0", "signal 9"), 10.0) == [
        End(("engine-0",), "engine-0: signal 9"),
        Restart(("engine-0",)),
    ]
    assert fleet.usable() == ("engine-1",)
    assert fleet.handle(Progress("engine-0", 1e9), 11.0) == []
    assert fleet.states()["engine-0"] is State.RESTARTING
    assert fleet.handle(Current("engine-0", 0), 11.0) == []
    assert fleet.states()["engine-0"] is State.RESTARTING
    assert fleet.handle(Started("engine-0"), 20.0) == [Refresh(("engine-0",))]
    fleet.handle(Current("engine-0", -1), 21.0)
    assert fleet.states()["engine-0"] is State.STALE
    fleet.handle(Current("engine-0", 0), 22.0)
    assert fleet.states()["engine-0"] is State.HEALTHY
    assert fleet.restarts == 1


def test_with_one_rank_lost_all_ranks_are_restarted_once_whoever_reports_it() -> None:
    fleet = running()
    for name in RANKS:
        fleet.handle(Asked(name), 0.0)
    assert fleet.handle(Lost("learner-1", "signal 9"), 5.0) == [
        End(RANKS, "learner-1: signal 9"),
        Restart(RANKS),
    ]
    fleet.handle(Started("learner-0"), 9.0)
    assert fleet.states()["learner-0"] is State.RESTARTING
    assert fleet.handle(Started("learner-1"), 9.0) == [Refresh(RANKS)]
    fleet.handle(Current("learner-0", 0), 10.0)
    assert fleet.states()["learner-1"] is State.STALE
    fleet.handle(Current("learner-1", 0), 10.0)
    assert fleet.states()["learner-0"] is State.HEALTHY
    assert fleet.restarts == 1


def test_ranks_that_die_together_are_one_loss() -> None:
    fleet = running(Limits(backoff=10.0))
    fleet.handle(Lost("learner-0", "a"), 1.0)
    fleet.handle(Lost("learner-0", "b"), 2.0)  # a second loss, while restarting: waits for its delay
    assert fleet.states()["learner-1"] is State.DEAD
    assert fleet.handle(Lost("learner-1", "c"), 3.0) == []


def test_silence_with_work_is_doubted_and_then_a_loss_however_alive_the_process_is() -> None:
    fleet = running()
    fleet.handle(Asked("engine-0", 4), 0.0)
    fleet.handle(Asked("engine-1", 4), 0.0)
    actions = later(fleet, 0.0, 61.0, {"engine-1": 100.0})
    assert actions == [
        Doubt("engine-0", 31.0),
        End(("engine-0",), "engine-0: no progress for 61 s"),
        Restart(("engine-0",)),
    ]
    assert fleet.states()["engine-1"] is State.HEALTHY


def test_a_counter_that_does_not_rise_is_no_progress() -> None:
    fleet = running()
    fleet.handle(Asked("engine-0", 4), 0.0)
    now = 0.0
    while fleet.states()["engine-0"] in (State.HEALTHY, State.SUSPECT) and now < 100:
        now += 1.0
        fleet.handle(Progress("engine-0", 17), now)
        fleet.tick(now)
    assert now == 62.0  # it was heard once, at 1 s


def test_a_word_from_a_suspect_makes_it_healthy_again() -> None:
    fleet = running()
    fleet.handle(Asked("engine-0", 4), 0.0)
    later(fleet, 0.0, 40.0)
    assert fleet.states()["engine-0"] is State.SUSPECT
    assert "engine-0" in fleet.usable()
    fleet.handle(Progress("engine-0", 1), 41.0)
    assert fleet.states()["engine-0"] is State.HEALTHY


def test_who_has_no_work_may_be_silent() -> None:
    fleet = running()
    assert later(fleet, 0.0, 1000.0) == []


def test_restarts_are_bounded_within_the_window_and_come_later_each_time() -> None:
    fleet = running()
    now, waits = 0.0, []
    for _ in range(3):
        lost_at = now
        actions = fleet.handle(Lost("engine-0", "again"), now)
        while Restart(("engine-0",)) not in actions:
            now += 0.5
            actions = fleet.tick(now)
        waits.append(now - lost_at)
        now += 1.0
    assert waits == [0.0, 1.0, 2.0]
    actions = fleet.handle(Lost("engine-0", "the model is not there"), now)
    assert [type(action) for action in actions] == [End, Retire]
    assert fleet.states()["engine-0"] is State.RETIRED
    assert fleet.usable() == ("engine-1",)
    assert later(fleet, now, now + 50.0) == []


def test_restarts_of_an_hour_ago_are_forgiven() -> None:
    fleet = running()
    for hour in range(10):
        now = hour * 2000.0
        assert Restart(("engine-0",)) in fleet.handle(Lost("engine-0", "x"), now) + later(fleet, now, now + 5.0)


def test_without_the_last_engine_the_run_is_given_up_with_the_last_reason() -> None:
    fleet = Fleet(("engine-0",), RANKS, Limits(restarts=0), 0.0)
    *_, last = fleet.handle(Lost("engine-0", "No such file: /models/x"), 1.0)
    assert isinstance(last, GiveUp)
    assert "No such file: /models/x" in last.reason


def test_ranks_that_are_lost_too_often_are_the_end() -> None:
    fleet = Fleet(ENGINES, RANKS, Limits(restarts=0), 0.0)
    assert isinstance(fleet.handle(Lost("learner-0", "x"), 1.0)[-1], GiveUp)


def test_what_does_not_start_in_time_is_lost() -> None:
    fleet = running()
    fleet.handle(Lost("engine-0", "x"), 0.0)
    actions = later(fleet, 0.0, 302.0)
    assert End(("engine-0",), "engine-0: not up after 301 s") in actions


def test_a_stop_of_everything_is_nobodys_silence() -> None:
    fleet = running()
    for name in NAMES:
        fleet.handle(Asked(name, 4), 0.0)
    later(fleet, 0.0, 20.0)
    assert fleet.tick(20.0 + 3600.0) == []  # the lid was closed for an hour
    assert set(fleet.states().values()) == {State.HEALTHY}
    assert Doubt("engine-0", 31.0) in later(fleet, 3620.0, 3632.0)  # but its 20 s before still count


def test_a_slow_engine_is_named_once_and_its_groups_handed_on() -> None:
    fleet = running()
    fleet.handle(Asked("engine-0", 8), 0.0)
    fleet.handle(Asked("engine-1", 8), 0.0)
    assert later(fleet, 0.0, 4.0, {"engine-0": 1.0}) == []
    fleet.handle(Idle("engine-1"), 4.0)
    assert later(fleet, 4.0, 12.0, {"engine-0": 1.0}) == []
    assert later(fleet, 12.0, 40.0, {"engine-0": 1.0}) == [
        HandOn("engine-0", "at work for 13 s on what took the others 4 s")
    ]


def test_an_engine_with_much_more_work_than_the_others_is_not_slow() -> None:
    fleet = running()
    fleet.handle(Asked("engine-0", 80), 0.0)
    fleet.handle(Asked("engine-1", 8), 0.0)
    fleet.handle(Idle("engine-1"), 4.0)
    assert later(fleet, 4.0, 100.0, {"engine-0": 1.0}) == []


def test_a_publish_makes_every_engine_stale() -> None:
    fleet = running()
    fleet.publish(1)
    assert fleet.usable() == ()
    fleet.handle(Current("engine-0", 0), 1.0)
    assert fleet.usable() == ()
    fleet.handle(Current("engine-0", 1), 1.0)
    assert fleet.usable() == ("engine-0",)


def test_an_engine_without_room_waits_for_it_and_its_restart_does_not_count() -> None:
    fleet = running()
    assert Restart(("engine-1",)) in fleet.handle(Lost("engine-1", "node gone"), 1.0)
    assert fleet.handle(Unseated("engine-1", "no room"), 1.0) == [GoWithout(("engine-1",), "no room")]
    assert (fleet.states()["engine-1"], fleet.unseated(), fleet.coming()) == (State.UNSEATED, ("engine-1",), ())
    assert fleet.restarts == 0
    fleet.publish(1)
    assert later(fleet, 1.0, 400.0) == []
    assert fleet.handle(Lost("engine-1", "known"), 400.0) == fleet.handle(Started("engine-1"), 400.0) == []
    assert fleet.handle(Seated("engine-1"), 401.0) == [Restart(("engine-1",))]
    assert fleet.handle(Started("engine-1"), 402.0) == [Refresh(("engine-1",))]
    fleet.handle(Current("engine-1", 1), 403.0)
    assert fleet.states()["engine-1"] is State.HEALTHY
    assert fleet.handle(Seated("engine-1"), 404.0) == []


def test_without_room_for_any_engine_the_run_is_given_up() -> None:
    fleet = running()
    for name in ENGINES:
        fleet.handle(Lost(name, "node gone"), 1.0)
    assert fleet.handle(Unseated("engine-0", "no room"), 1.0) == [GoWithout(("engine-0",), "no room")]
    assert GiveUp("engine-1: no room") in fleet.handle(Unseated("engine-1", "no room"), 1.0)


def test_a_name_that_is_not_of_the_fleet_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        running().handle(Started("engine-7"), 0.0)


EVENTS = st.sampled_from(NAMES).flatmap(
    lambda name: st.one_of(
        st.just(Started(name)),
        st.builds(Current, st.just(name), st.integers(0, 3)),
        st.builds(Asked, st.just(name), st.integers(0, 9)),
        st.builds(Progress, st.just(name), st.integers(0, 50)),
        st.just(Idle(name)),
        st.just(Lost(name, "x")),
    )
)
NODES = st.sampled_from(ENGINES).flatmap(lambda name: st.sampled_from([Unseated(name, "x"), Seated(name)]))
STEPS = st.lists(
    st.tuples(st.floats(0.0, 120.0), st.one_of(EVENTS, EVENTS, NODES, st.none(), st.integers(0, 3))), max_size=80
)


@given(STEPS)
def test_whatever_happens(steps: list[tuple[float, Event | int | None]]) -> None:
    """None ticks, a number publishes."""
    fleet, now = running(), 0.0
    proven: dict[str, int | None] = dict.fromkeys(ENGINES, 0)
    restarted: dict[str, list[float]] = {name: [] for name in NAMES}
    for wait, event in steps:
        before, now = fleet.states(), now + wait
        if isinstance(event, int):
            fleet.publish(event)
            actions = []
        else:
            actions = fleet.tick(now) if event is None else fleet.handle(event, now)
        after = fleet.states()
        if isinstance(event, Unseated) and before[event.name] is State.RESTARTING and restarted[event.name]:
            restarted[event.name].pop()  # it was not made
        if isinstance(event, Current) and event.name in proven and event.version == fleet.version:
            proven[event.name] = event.version
        for action in actions:
            if isinstance(action, Restart):
                for name in action.names:
                    restarted[name].append(now)
                    proven[name] = None
        for name in NAMES:
            if before[name] is State.RETIRED:
                assert after[name] is State.RETIRED
            if before[name] in (State.DEAD, State.RESTARTING, State.RETIRED, State.UNSEATED):
                assert after[name] not in (State.HEALTHY, State.SUSPECT)
            recent = [at for at in restarted[name] if now - at < LIMITS.window]
            assert len(recent) <= LIMITS.restarts
        for name in fleet.usable():
            assert proven[name] == fleet.version
        assert after["learner-0"] is after["learner-1"]
        assert not set(fleet.usable()) & set(fleet.coming())


@given(STEPS)
def test_the_dead_are_always_restarted_or_retired_in_the_end(steps: list[tuple[float, Event | int | None]]) -> None:
    fleet, now = running(), 0.0
    for wait, event in steps:
        now += wait
        if event is not None and not isinstance(event, int):
            fleet.handle(event, now)
    later(fleet, now, now + 10.0)
    assert State.DEAD not in fleet.states().values()
