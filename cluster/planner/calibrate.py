"""Costs of a machine's cores, from the figures of `launch.py bench --json` at other sizes than those to predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.planner.architecture import Architecture
from cluster.planner.cpu import CpuCosts

CPU_MICROBATCH = 4096
"""Padded tokens of a microbatch (the default on a CPU)."""
SLOTS = 1024
"""Responses that an engine generates at once (the default)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One bench."""

    model: Architecture
    """What was generated with and trained."""
    prompt: float
    """Mean tokens of a prompt."""
    figures: Mapping[str, Any]
    """As `bench` wrote them."""

    @property
    def length(self) -> float:
        """Mean tokens of a response."""
        return float(self.figures["tokens"]) / float(self.figures["rollouts"])

    def seconds(self, name: str) -> float:
        """A figure."""
        return float(self.figures[name])


def calibrate(benches: Sequence[Measured]) -> CpuCosts:
    """The costs with which the parts of whole rounds come out best, none of them negative; relative errors count."""
    engine = _solve([_engine(each) for each in benches], [each.seconds("generate_and_score") for each in benches])
    rows, seconds = [], []
    for each in benches:
        old = 1 - 1 / int(each.figures["minibatches"])
        rows.append(_learner(each, 3.0 + old, int(each.figures["minibatches"])))
        seconds.append(each.seconds("learn"))
        if each.seconds("old_logprobs") > 0:
            rows.append(_learner(each, old, 0))
            seconds.append(each.seconds("old_logprobs"))
    learner = _solve(rows, seconds)
    size = [[1.0, 4.0 * each.model.parameters * int(each.figures["engines"])] for each in benches]
    sync = _solve(size, [each.seconds("sync") for each in benches])
    rest = [_rest(each) for each in benches]
    turn = _solve([[1.0, float(each.figures["rollouts"])] for each in benches], rest)
    return CpuCosts(
        step=engine[0],
        response=engine[1],
        engine_flops=1 / engine[2] if engine[2] else math.inf,
        microbatch=learner[0],
        token=learner[1],
        learner_flops=1 / learner[2] if learner[2] else math.inf,
        parameter=learner[3],
        sync=sync[0],
        sync_byte=sync[1],
        turn=turn[0],
        turn_response=turn[1],
    )


def _engine(bench: Measured) -> list[float]:
    """What multiplies the cost of a step, of a response in a step, and of an operation."""
    share = int(bench.figures["rollouts"]) / int(bench.figures["engines"])
    steps = bench.length * math.ceil(share / SLOTS)
    flops = bench.model.forward_flops(1, 0) * share * (bench.length + bench.prompt)
    return [steps, share * bench.length, flops]


def _learner(bench: Measured, passes: float, steps: int) -> list[float]:
    """What multiplies the cost of a microbatch, of a token, of an operation, and of a parameter in a step."""
    minibatches = int(bench.figures["minibatches"])
    tokens = int(bench.figures["rollouts"]) * (bench.prompt + bench.length) / int(bench.figures["ranks"])
    microbatches = minibatches * math.ceil(tokens / minibatches / CPU_MICROBATCH)
    flops = bench.model.forward_flops(1, 0) * tokens
    return [passes * microbatches, passes * tokens, passes * flops, float(steps * bench.model.parameters)]


def _rest(bench: Measured) -> float:
    """Seconds of a round that are neither generation nor learning nor sync."""
    parts = bench.seconds("generate_and_score") + bench.seconds("learn") + bench.seconds("sync")
    return max(1e-3, bench.seconds("round") - parts)


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares of relative errors: what would be negative is left out, one after the other."""
    weights = 1 / np.asarray(seconds, dtype=np.float64)
    matrix = np.asarray(rows, dtype=np.float64) * weights[:, None]
    kept = list(range(matrix.shape[1]))
    solution: npt.NDArray[np.float64] = np.zeros(matrix.shape[1])
    while kept:
        scale = np.abs(matrix[:, kept]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, kept] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (found >= 0).all():
            solution[kept] = found
            break
        kept.pop(int(np.argmin(found * scale)))
    return [float(value) for value in solution]
