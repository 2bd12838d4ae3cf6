"""How fast a round was, and how well it used what it had: tokens per second, idle shares, utilisation. Pure.

All names are under `time/`: they come from clocks, and two runs that are equal otherwise differ in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.errors import PlanError
from cluster.flops import generation_flops, scoring_flops
from cluster.planner.architecture import Architecture, read_architecture
from cluster.planner.devices import device_called
from rollout.types import DoubleArray, ScoredGroup


@dataclass(frozen=True, slots=True)
class Work:
    """How long each process had been at work at some moment."""

    at: float
    """Monotonic seconds."""
    busy: Mapping[str, float]
    """Process -> seconds of work since it began."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What utilisation is measured against."""

    architecture: Architecture
    """Of the model."""
    engines: float | None
    """FLOPs per second that the devices of all engines have together; None where that is not known."""
    ranks: float | None
    """... and those of all ranks."""
    step_passes: float
    """Forward passes that forward and backward together are worth: 3, or 2 where only an adapter is trained."""


def known_machine(
    model: str, gpus: Mapping[str, str], *, engine_dtype: str, learner_dtype: str, tensor_parallel: int, adapter: bool
) -> Machine | None:
    """The machine of a run, from what drivers call the GPUs of its processes; None where nothing is known of it.

    The table of devices gives the peak of bfloat16 only.
    """
    peaks: dict[str, float | None] = {}
    for kind, dtype, each in (("engine-", engine_dtype, tensor_parallel), ("learner-", learner_dtype, 1)):
        devices = [device_called(gpu) for name, gpu in gpus.items() if name.startswith(kind)]
        known = [device.flops * each for device in devices if device is not None]
        peaks[kind] = sum(known) if known and len(known) == len(devices) and dtype == "bfloat16" else None
    if not any(peaks.values()):
        return None
    try:
        architecture = read_architecture(model)
    except PlanError:
        return None  # a model whose arithmetic is not known: no utilisation, and nothing else is missing
    return Machine(architecture, peaks["engine-"], peaks["learner-"], 2.0 if adapter else 3.0)


def idle_shares(before: Work | None, after: Work | None) -> dict[str, float]:
    """Share of the time between two moments in which engines, and ranks, had nothing to do, on average.

    A process that is not known at both moments (it was replaced) is left out.
    """
    if before is None or after is None or after.at <= before.at:
        return {}
    shares = {}
    for kind, metric in (("engine-", "time/engines_idle"), ("learner-", "time/ranks_idle")):
        spent = [
            after.busy[name] - before.busy[name]
            for name in after.busy
            if name.startswith(kind) and after.busy[name] >= before.busy.get(name, float("inf"))
        ]
        if spent:
            busy = float(np.mean(spent)) / (after.at - before.at)
            shares[metric] = min(1.0, max(0.0, 1.0 - busy))
    return shares


def tokens_per_second(row: Mapping[str, float]) -> dict[str, float]:
    """Generated tokens per second of generation, trained tokens per second of learning, both over the whole round."""
    speeds = {}
    for metric, tokens, seconds in (
        ("time/generate_tokens_per_s", "tokens/generated", "time/generate"),
        ("time/learn_tokens_per_s", "policy/tokens", "time/learn"),
        ("time/tokens_per_s", "tokens/generated", "time/round"),
    ):
        if row.get(tokens) and row.get(seconds):
            speeds[metric] = row[tokens] / row[seconds]
    return speeds


def utilisation(
    row: Mapping[str, float],
    machine: Machine | None,
    groups: Sequence[ScoredGroup],
    advantages: DoubleArray,
    *,
    reference: bool,
    recomputed: bool,
) -> dict[str, float]:
    """Model FLOPs of the trained groups per second, as a share of the devices' peak; nothing where that is unknown.

    `advantages` (B,) in the order of the groups; `reference`: there is a KL term, so its model reads everything too and
    no group is left out; `recomputed`: the learner scored all minibatches but the first before its first step.
    """
    if machine is None or not groups:
        return {}
    prompts = np.array([len(scored.group.request.prompt.token_ids) for scored in groups])
    sizes = np.array([len(scored.total) for scored in groups])
    lengths = np.concatenate([scored.group.lengths for scored in groups])
    of_row = np.repeat(prompts, sizes)
    shape = machine.architecture
    made = sum(
        generation_flops(shape, prompts[sizes == size], lengths[np.repeat(sizes == size, sizes)], int(size))
        for size in np.unique(sizes)
    )
    steps = np.repeat([scored.group.request.minibatch for scored in groups], sizes)
    alive = np.repeat([bool(np.any(part)) for part in np.split(advantages, np.cumsum(sizes)[:-1])], sizes)
    trained = np.ones(len(lengths), dtype=bool) if reference else alive
    learned = (machine.step_passes + reference) * scoring_flops(shape, of_row[trained], lengths[trained])
    if recomputed:
        again = trained & (steps != steps.min())
        learned += scoring_flops(shape, of_row[again], lengths[again])
    shares = {}
    for metric, flops, seconds, peak in (
        ("time/generate_mfu", made, row.get("time/generate"), machine.engines),
        ("time/learn_mfu", learned, row.get("time/learn"), machine.ranks),
    ):
        if seconds and peak:
            shares[metric] = flops / (seconds * peak)
    return shares
