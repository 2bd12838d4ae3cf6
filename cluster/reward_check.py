"""Has the self-test of a reward scored: for `launch.py check-reward`, and at the start of every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import PlanError
from cluster.scorer_pool import ScorerPool
from rollout.config import RewardConfig
from rollout.rewards.selftest import RewardFinding, judge, probe_group, probes, table
from rollout.scoring import Scoring
from rollout.types import Prompt, UserError

ROWS = 3
"""Rows that are tried at the start of a run."""


@dataclass(frozen=True, slots=True)
class RewardCheck:
    """What the self-test found."""

    findings: tuple[RewardFinding, ...]
    """Worst first, each kind once."""
    tables: tuple[str, ...]
    """Per row, what would be paid for what."""

    @property
    def is_critical(self) -> bool:
        """Whether training with this reward would teach the wrong thing."""
        return any(finding.severity == "critical" for finding in self.findings)

    def as_text(self) -> str:
        """The tables and findings for people."""
        found = [f"{finding.severity}: {finding.id}\n  {finding.text}" for finding in self.findings]
        return "\n\n".join([*self.tables, *(found or ["Nothing wrong was found."])])


def check_reward(
    config: RewardConfig, scoring: Scoring, prompts: Sequence[Prompt], rows: int = ROWS, thorough: bool = False
) -> RewardCheck:
    """Score probes on the first rows and judge what they were paid. `thorough` adds an answer no grader can finish."""
    pool = ScorerPool(config, scoring)
    made = {}
    try:
        for number, prompt in enumerate(prompts[:rows]):
            made[prompt.row_id] = probes(prompt, scoring, _right_response(scoring, prompt), thorough and number == 0)
            pool.submit(probe_group(prompt, made[prompt.row_id]))
        scored = {each.group.request.prompt.row_id: each for each in pool.drain()}
    finally:
        pool.close()
    found: dict[str, RewardFinding] = {}
    for row_id, tried in made.items():
        for finding in judge(tried, scored[row_id], config, pool.last_error):
            found.setdefault(finding.id, finding)
    order = ("critical", "warning", "info")
    return RewardCheck(
        tuple(sorted(found.values(), key=lambda finding: order.index(finding.severity))),
        tuple(f"row {row_id}\n{table(tried, scored[row_id])}" for row_id, tried in made.items()),
    )


def require_sound_reward(config: RewardConfig, scoring: Scoring, prompts: Sequence[Prompt]) -> RewardCheck:
    """The check every run starts with: a critical finding is a PlanError, before any model is loaded."""
    check = check_reward(config, scoring, prompts)
    if check.is_critical:
        worst = "\n".join(
            f"{finding.id}: {finding.text}" for finding in check.findings if finding.severity == "critical"
        )
        raise PlanError(f"the reward does not stand its self-test.\n{worst}\n  The whole table: launch.py check-reward")
    return check


def _right_response(scoring: Scoring, prompt: Prompt) -> str | None:
    """What the user's module says a right response to this row looks like."""
    if not scoring.reward_function:
        return None
    from rollout.rewards.loading import right_response_of

    make = right_response_of(scoring.reward_function)
    if make is None:
        return None
    row = {**prompt.columns, "prompt": prompt.text, "answer": prompt.answer, "row_id": prompt.row_id}
    text = make(**row)
    if not isinstance(text, str):
        raise UserError(f"right_response beside --reward {scoring.reward_function} returned {type(text).__name__}.")
    return text
