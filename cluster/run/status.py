"""What stands below the progress of a live view: how it goes, who is not well, what was found. Pure text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

SPARKS = "▁▂▃▄▅▆▇█"
MOST_FINDINGS = 3


def status_lines(
    curves: Mapping[str, Sequence[float]], states: Mapping[str, str], found: Sequence[tuple[str, str, int]]
) -> list[str]:
    """Lines for people: name -> values so far, process -> state, and findings as (severity, id, since round)."""
    lines = []
    shown = [f"{name} {sparkline(values)} {values[-1]:.3f}" for name, values in curves.items() if values]
    if shown:
        lines.append("   ".join(shown))
    if states:
        lines.append(f"fleet: {fleet_text(states)}")
    if found:
        last = [f"{severity} {name} since round {since}" for severity, name, since in found[-MOST_FINDINGS:]]
        earlier = len(found) - len(last)
        lines.append("found: " + "; ".join(last) + (f"; {earlier} before" if earlier else ""))
    return lines


def fleet_text(states: Mapping[str, str]) -> str:
    """`2 engines healthy, learner-0 restarting`: kinds that are all well are counted, others are named."""
    texts = []
    for kind, word in (("engine", "engine"), ("learner", "rank")):
        mine = {name: state for name, state in states.items() if name.startswith(kind)}
        well = Counter(mine.values())["healthy"]
        if well:
            texts.append(f"{well} {word}{'s' if well > 1 else ''} healthy")
        texts += [f"{name} {state}" for name, state in mine.items() if state != "healthy"]
    return ", ".join(texts)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last values as small bars: from 0 to 1 where they are shares, else from their lowest to their highest."""
    shown = list(values[-width:])
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    if low < 0 or high > 1:
        low, high = min(shown), max(shown)
    scale = 8 / (high - low) if high > low else 0.0
    return "".join(SPARKS[min(7, max(0, int((value - low) * scale)))] for value in shown)
