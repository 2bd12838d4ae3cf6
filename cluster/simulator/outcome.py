"""What came of a simulated run: time per round, who waited, how far behind responses were."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from cluster.simulator.scenario import Scenario


@dataclass(slots=True)
class RoundTimes:
    """One round, in virtual seconds."""

    number: int
    """1, 2, ..."""
    lag: int
    """Versions its responses are behind the policy that is trained on them."""
    begin: float
    """When it was asked for."""
    generate: float = 0.0
    """From then until its last group was in."""
    learn: float = 0.0
    """Seconds the ranks worked on it."""
    learned: float = 0.0
    """When its last step was made."""
    end: float = 0.0
    """When it was committed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that was played out."""

    scenario: Scenario
    """What was simulated."""
    rounds: tuple[RoundTimes, ...]
    """In their order."""
    seconds: float
    """Until the last commit."""
    engine_busy: float
    """Seconds an engine had something to do, on average."""
    learner_busy: float
    """Seconds the ranks trained."""
    tokens: float
    """Tokens generated."""
    restarts: int
    """Engines, or all ranks, started anew."""
    lost_groups: int
    """Groups that were lost with an engine and generated again."""

    @property
    def round_seconds(self) -> float:
        """From commit to commit, the median; the first round, which fills the pipeline, only when it is alone."""
        ends = [each.end for each in self.rounds]
        between = [later - earlier for earlier, later in pairwise(ends)]
        return statistics.median(between) if between else ends[0]

    @property
    def mean_round_seconds(self) -> float:
        """The whole run over its rounds."""
        return self.seconds / len(self.rounds)

    @property
    def lag(self) -> int:
        """The largest lag."""
        return max(each.lag for each in self.rounds)

    @property
    def engines_idle(self) -> float:
        """Share of a round in which an engine has nothing to do, the pipeline being full."""
        return 1 - self.engine_busy / len(self.rounds) / self.round_seconds

    @property
    def learner_idle(self) -> float:
        """Share of a round in which the ranks do not train."""
        return 1 - self.learner_busy / len(self.rounds) / self.round_seconds

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens generated and learned per second and device."""
        return self.tokens / len(self.rounds) / self.round_seconds / self.scenario.gpus
