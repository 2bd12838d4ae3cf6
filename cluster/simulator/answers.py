"""The questions a simulation answers: which placement, schedule, lag and split pays, and what a failure costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cluster.planner.architecture import Architecture
from cluster.planner.search import every
from cluster.planner.split import Cluster, Split
from cluster.planner.work import Work
from cluster.simulator.build import on_gpus
from cluster.simulator.lengths import Lengths
from cluster.simulator.outcome import Outcome
from cluster.simulator.scenario import Fault, Scenario
from cluster.simulator.world import simulate

ROUNDS = 4
"""Rounds played out: the first fills the pipeline, the others are measured."""
TRIED = 3
"""Splits of each kind that are played out, the most promising ones by the closed forms; of very large rounds one."""
LARGE = 20_000
"""Responses of a very large round; one fewer is played, in coarser steps."""
COARSE = 64
"""Steps into which the longest response is cut then."""
KINDS = (("phased", 0), ("streamed", 0), ("async", 1), ("async", 2))


def compare(model: Architecture, work: Work, cluster: Cluster, lengths: Lengths) -> list[tuple[Split, Outcome]]:
    """The most promising splits of every schedule, and so placement, that fit, played out; the fastest first."""
    found = []
    large = work.responses > LARGE
    for schedule, lag in KINDS:
        work_of = dataclasses.replace(work, old_logprobs=work.old_logprobs and schedule != "streamed")
        fitting = [each for each in every(model, work_of, cluster, schedule) if not each.missing]
        played = []
        for split in _promising([(each.seconds, each.split) for each in fitting])[: 1 if large else TRIED]:
            scenario = on_gpus(model, work_of, cluster, split, lengths, max_lag=lag, rounds=ROUNDS - large)
            if large:
                engine = dataclasses.replace(scenario.engine, grain=max(1, work.longest // COARSE))
                scenario = dataclasses.replace(scenario, engine=engine)
            played.append((split, simulate(scenario)))
        found += played
    return sorted(found, key=lambda pair: round(pair[1].round_seconds))


def _promising(fitting: Sequence[tuple[float, Split]]) -> list[Split]:
    """The fastest splits by the closed forms, with different numbers of engines and ranks."""
    chosen: dict[tuple[int, int, int], Split] = {}
    for _, split in sorted(fitting, key=lambda pair: pair[0]):
        chosen.setdefault((split.engines, split.tensor_parallel, split.ranks), split)
    return list(chosen.values())


def incidents(scenario: Scenario, calm: Outcome) -> list[tuple[str, Outcome]]:
    """The same run with something going wrong in its second round; `calm` is the run without."""
    second = calm.rounds[1]
    middle = second.begin + second.generate / 2
    # In the middle of its last step, when most has to be done again.
    ranks_at_work = second.learned - second.learn / len(scenario.groups) / 2
    engine = "engine-0"
    told = [("one engine is three times as slow", dataclasses.replace(scenario, slowness={engine: 3.0}))]
    if scenario.engines > 1:
        told = [
            ("one engine dies in mid-generation", _with(scenario, Fault(middle, engine))),
            ("one engine hangs in mid-generation", _with(scenario, Fault(middle, engine, "hangs"))),
            *told,
        ]
    told.append(("a rank dies before the last step", _with(scenario, Fault(ranks_at_work, "ranks"))))
    return [(what, simulate(changed)) for what, changed in told]


def _with(scenario: Scenario, fault: Fault) -> Scenario:
    return dataclasses.replace(scenario, faults=(fault,))
