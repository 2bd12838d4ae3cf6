"""Outcomes of simulations as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.planner.split import Split
from cluster.simulator.lengths import Lengths
from cluster.simulator.outcome import Outcome


def comparison_lines(found: Sequence[tuple[Split, Outcome]], lengths: Lengths) -> list[str]:
    """One line per placement and schedule, the fastest first."""
    lines = [
        f"simulated  {len(found[0][1].rounds)} rounds each; lengths {lengths.kind}, {lengths.mean:,.0f} tokens on "
        f"average, cut at {lengths.longest:,}"
        + (f", spread {lengths.spread:g}" if lengths.kind == "lognormal" else ""),
        f"  {'placement':<11}{'schedule':<10}{'lag':>4}{'engines':>9}{'ranks':>7}{'s/round':>9}{'engines idle':>14}"
        f"{'ranks idle':>12}{'tokens/s/GPU':>14}",
    ]
    for split, outcome in found:
        lines.append(
            f"  {split.placement:<11}{split.schedule:<10}{outcome.lag:>4}"
            f"{f'{split.engines} x {split.tensor_parallel}':>9}{split.ranks:>7}{outcome.round_seconds:>9,.0f}"
            f"{outcome.engines_idle:>14.0%}{outcome.learner_idle:>12.0%}{outcome.tokens_per_gpu:>14,.0f}"
        )
    return lines


def incident_lines(calm: Outcome, told: Sequence[tuple[str, Outcome]]) -> list[str]:
    """What each incident adds to the run."""
    lines = [f"incidents  {calm.scenario.name}, {len(calm.rounds)} rounds in {calm.seconds:,.0f} s without any"]
    for what, outcome in told:
        more = outcome.seconds - calm.seconds
        again = f", {outcome.lost_groups} groups generated again" if outcome.lost_groups else ""
        lines.append(f"  {what:<36}{more:>+8,.0f} s ({more / calm.round_seconds:+.0%} of a round{again})")
    return lines


def round_lines(outcome: Outcome) -> list[str]:
    """A run's rounds one by one."""
    lines = [f"simulated  {outcome.scenario.name}: {outcome.round_seconds:,.1f} s per round"]
    for each in outcome.rounds:
        lines.append(
            f"  round {each.number}   generate {each.generate:,.1f} s, learn {each.learn:,.1f} s, committed at "
            f"{each.end:,.1f} s"
        )
    return lines
