"""What an evaluation says: accuracy with its uncertainty, pass@k, maj@k, format, length, truncation, by domain.

Pure: verdicts in, numbers out. Shape letters: P prompts, K samples per prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout.types import BoolArray, DoubleArray, IntArray, ScoredGroup

Z_95 = 1.959963984540054
"""Standard deviations on either side that hold 95 % of a normal distribution."""

FinalAnswer = Callable[[str], str | None]
"""Gives the final answer of a response in a form that is equal for equal answers; None when there is none."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The samples of one prompt, judged."""

    domain: str
    """Part of the mixture."""
    right: BoolArray
    """(K,) graded right."""
    formatted: BoolArray
    """(K,) format reward earned."""
    lengths: IntArray
    """(K,) response tokens, truncated responses at their full length."""
    finished: BoolArray
    """(K,) False where the length limit cut the response."""
    answers: tuple[str | None, ...] = ()
    """K final answers, for the majority vote; None is no vote; empty when nobody votes."""


def verdict_of(scored: ScoredGroup, final_answer: FinalAnswer | None = None) -> Verdict:
    """The verdict on a scored group; `final_answer` reads the votes of maj@k out of the texts."""
    group = scored.group
    answers: tuple[str | None, ...] = ()
    if final_answer is not None:
        pairs = zip(group.texts, group.finished, strict=True)
        answers = tuple(final_answer(text) if finished else None for text, finished in pairs)
    return Verdict(
        domain=group.request.prompt.domain,
        right=np.array([outcome == "right" for outcome in scored.outcomes], dtype=np.bool_),
        formatted=np.asarray(scored.parts["format"]) > 0.5,
        lengths=group.lengths,
        finished=group.finished,
        answers=answers,
    )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k responses is right, estimated without bias from `right` of `samples`.

    1 - C(samples - right, k) / C(samples, k), as a product, so that nothing overflows.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 0 <= right <= samples and 1 <= k <= samples, not {right} of {samples}.")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def majority(right: BoolArray, answers: Sequence[str | None]) -> float:
    """Chance that the most frequent answer is right; equally frequent ones are drawn from. No answer is no vote.

    All right answers are one answer, however they are written; wrong ones are equal when their texts are.
    """
    votes = Counter(
        (bool(verdict), "" if verdict else answer)
        for verdict, answer in zip(right, answers, strict=True)
        if answer is not None
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [verdict for (verdict, _), count in votes.items() if count == most]
    return sum(winners) / len(winners)


def wilson(mean: float, n: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a share found in n independent trials; sensible at 0 and 1, unlike mean +- z sigma."""
    if n <= 0:
        return 0.0, 1.0
    spread = z * math.sqrt(max(mean * (1 - mean), 0.0) / n + z * z / (4 * n * n))
    centre, scale = mean + z * z / (2 * n), 1 + z * z / n
    # Rounding must not push the share itself out of its interval.
    return max(0.0, min(mean, (centre - spread) / scale)), min(1.0, max(mean, (centre + spread) / scale))


def independent_trials(means: DoubleArray, samples: int) -> float:
    """How many independent trials P prompts with `samples` responses each are worth.

    Responses to one prompt are alike: P x K trials would claim too narrow an interval, P too wide a one. The spread of
    the prompts' means says how alike they are.
    """
    prompts = len(means)
    mean = float(np.mean(means))
    spread = float(np.var(means, ddof=1)) / prompts if prompts > 1 else 0.0
    if spread <= 0.0:
        return float(prompts)
    return float(np.clip(mean * (1 - mean) / spread, prompts, prompts * samples))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The numbers of one evaluation, or of one domain of it."""

    prompts: int
    """P."""
    samples: int
    """Responses per prompt, K (the fewest, where groups differ)."""
    correctness: float
    """Share of right responses: the mean over prompts of the mean over samples."""
    low: float
    """Lower end of the 95 % interval of correctness."""
    high: float
    """Upper end."""
    format: float
    """Share of responses in the right format."""
    length: float
    """Mean tokens of a response."""
    longest: int
    """Tokens of the longest response."""
    truncated: float
    """Share of responses cut by the length limit."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """pass@k by k; empty with one sample."""
    maj_at: float | None = None
    """maj@K; None with one sample or without answers."""
    dropped: int = 0
    """Groups left out because their grader failed."""
    domains: Mapping[str, Evaluation] = field(default_factory=dict)
    """The same by domain; empty where there is only one."""

    def metrics(self) -> dict[str, float]:
        """Keys of metrics.jsonl. `eval/pass@k` is k = all samples; a key that does not apply is absent."""
        row: dict[str, float] = {
            "eval/correctness": self.correctness,
            "eval/correctness_low": self.low,
            "eval/correctness_high": self.high,
            "eval/format": self.format,
            "eval/length": self.length,
            "eval/truncated": self.truncated,
            "eval/prompts": self.prompts,
        }
        if self.samples > 1:
            row["eval/samples"] = self.samples
            row["eval/pass@k"] = self.pass_at[self.samples]
            row |= {f"eval/pass@{k}": value for k, value in self.pass_at.items()}
        if self.maj_at is not None:
            row[f"eval/maj@{self.samples}"] = self.maj_at
        if self.dropped:
            row["eval/dropped"] = self.dropped
        row |= {f"eval/correctness/{name}": part.correctness for name, part in self.domains.items()}
        return row

    def table(self) -> str:
        """A text table: one line per domain, and one for all of it."""
        rows = [*self.domains.items(), ("all", self)]
        head = ["domain", "prompts", "correct", "95 % interval", "format", "length", "cut"]
        head += [f"pass@{k}" for k in self.pass_at]
        head += [f"maj@{self.samples}"] if self.maj_at is not None else []
        cells = [head, *(part._cells(name, self) for name, part in rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        if self.dropped:
            lines.append(f"{self.dropped} prompts are left out: their grader failed.")
        return "\n".join(lines)

    def _cells(self, name: str, whole: Evaluation) -> list[str]:
        cells = [
            name,
            f"{self.prompts} x {self.samples}",
            f"{self.correctness:.1%}",
            f"{self.low:.1%} - {self.high:.1%}",
            f"{self.format:.1%}",
            f"{self.length:.1f}",
            f"{self.truncated:.1%}",
        ]
        cells += [f"{self.pass_at[k]:.1%}" if k in self.pass_at else "" for k in whole.pass_at]
        if whole.maj_at is not None:
            cells.append("" if self.maj_at is None else f"{self.maj_at:.1%}")
        return cells


def evaluate(verdicts: Sequence[Verdict], dropped: int = 0) -> Evaluation:
    """Numbers of all verdicts and, where there are several domains, of each."""
    if not verdicts:
        raise ValueError("There is nothing to evaluate: no group was graded.")
    by_domain: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_domain.setdefault(verdict.domain, []).append(verdict)
    parts = {name: _numbers(by_domain[name], 0, {}) for name in sorted(by_domain)} if len(by_domain) > 1 else {}
    return _numbers(verdicts, dropped, parts)


def evaluate_groups(scored: Sequence[ScoredGroup], final_answer: FinalAnswer | None = None) -> Evaluation:
    """Numbers of scored groups; groups with a grader error are left out and counted."""
    graded = [group for group in scored if not group.errors]
    return evaluate([verdict_of(group, final_answer) for group in graded], len(scored) - len(graded))


def _numbers(verdicts: Sequence[Verdict], dropped: int, domains: Mapping[str, Evaluation]) -> Evaluation:
    samples = min(len(verdict.right) for verdict in verdicts)
    means = np.array([np.mean(verdict.right) for verdict in verdicts], dtype=np.float64)
    correctness = float(np.mean(means))
    low, high = wilson(correctness, independent_trials(means, samples))
    voted = samples > 1 and all(verdict.answers for verdict in verdicts)
    return Evaluation(
        prompts=len(verdicts),
        samples=samples,
        correctness=correctness,
        low=low,
        high=high,
        format=_mean([verdict.formatted for verdict in verdicts]),
        length=_mean([verdict.lengths for verdict in verdicts]),
        longest=max(int(verdict.lengths.max()) for verdict in verdicts),
        truncated=_mean([~verdict.finished for verdict in verdicts]),
        pass_at={k: _pass_at(verdicts, k) for k in _ks(samples)} if samples > 1 else {},
        maj_at=float(np.mean([majority(v.right, v.answers) for v in verdicts])) if voted else None,
        dropped=dropped,
        domains=domains,
    )


def _mean(values: Sequence[npt.NDArray[np.generic]]) -> float:
    """Mean over prompts of the mean over samples."""
    return float(np.mean([np.mean(value.astype(np.float64)) for value in values]))


def _ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
    return [*powers, samples]


def _pass_at(verdicts: Sequence[Verdict], k: int) -> float:
    return float(np.mean([pass_at_k(len(v.right), int(v.right.sum()), k) for v in verdicts]))
