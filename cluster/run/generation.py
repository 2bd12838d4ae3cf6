"""From prompts to scored groups: what is asked of the engines, what is salvaged, kept, replaced or dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster import faults
from cluster.errors import BrokenPromise
from cluster.plan import Plan
from cluster.run.config import Config
from cluster.run.console import Console
from cluster.run.credit import without_signal
from cluster.run.journal import Journal
from cluster.run.round import Round
from cluster.scorer_pool import ScorerPool
from cluster.system import System
from rollout.engine import Sampling
from rollout.seeds import group_seed
from rollout.stream import PromptStream
from rollout.types import Group, GroupRequest, Prompt, ScoredGroup

MAX_GRADER_ERRORS = 0.01
PROBE_TOKENS = 16


@dataclass
class Generation:
    """Asks, scores and journals; one per run."""

    config: Config
    plan: Plan
    system: System
    prompts: PromptStream
    scorer: ScorerPool
    journal: Journal
    console: Console
    stop_token_ids: tuple[int, ...]
    salvaged: dict[int, dict[tuple[str, int], ScoredGroup]] = field(default_factory=dict)
    """Round -> groups of it that an interrupted run had journalled: they are not generated again."""
    fixed_length: bool = False

    def requests(self, turn: Round) -> list[GroupRequest]:
        """The groups of the round: prompts drawn, each assigned to its minibatch before anything is generated."""
        drawn = [prompt for prompt, _ in self.prompts.take(self.plan.prompts)]
        return [
            self._request(turn, prompt, inner * self.plan.minibatches + position // self.plan.groups_per_minibatch)
            for inner in range(self.config.learner.inner_updates)
            for position, prompt in enumerate(drawn)
        ]

    def scored_groups(
        self, turn: Round, requests: Sequence[GroupRequest], settled: Callable[[int, bool], None]
    ) -> Iterator[None]:
        """Fill `turn.kept`; scoring hides behind generation, and all of it is journalled. Yields while it waits.

        Groups without signal are replaced by fresh ones under dynamic sampling; groups whose grader failed are dropped.
        `settled(minibatch, kept)` hears of every planned group once: it will be trained, or it was dropped for good.
        """
        turn.requests = list(requests)
        open_slots = dict(enumerate(requests))
        for attempt in range(self.config.filter.max_refills + 1):
            slots = {request.key: slot for slot, request in open_slots.items()}
            for scored in self._scored(turn, list(open_slots.values()), "generate" if not attempt else "refill"):
                if scored is None:
                    yield
                    continue
                slot = slots[scored.group.request.key]
                if scored.errors:
                    turn.drop(scored, "grader_error")
                    del open_slots[slot]
                    self._check_grader(f"round {turn.number}", turn.dropped_by_reason()["grader_error"], requests)
                    settled(scored.group.request.minibatch, False)
                elif self.config.filter.dynamic_sampling and without_signal(self.config, scored):
                    turn.drop(scored, "no_signal")
                else:
                    turn.kept[slot] = scored
                    del open_slots[slot]
                    settled(scored.group.request.minibatch, True)
            if not open_slots:
                break
            fresh = self.prompts.take(len(open_slots))
            open_slots = {
                slot: self._request(turn, prompt, request.minibatch)
                for (slot, request), (prompt, _) in zip(open_slots.items(), fresh, strict=True)
            }
        if open_slots:
            raise BrokenPromise(
                f"round {turn.number}: {len(open_slots)} of {len(requests)} groups still have no reward spread after "
                f"{self.config.filter.max_refills} refills.\n  The prompts are too easy or too hard for the model; "
                f"use others, raise --filter.max-refills, or train without --filter.dynamic-sampling."
            )
        turn.prompts = self.prompts.state()
        self.console.rest("engines")

    def held_out(self, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        """Held-out prompts answered and scored: sampled at temperature 1, the same seeds every time."""
        requests = [
            GroupRequest(p, -1, 0, 0, self.config.eval.samples, group_seed(self.config.seed, -1, 0, p.row_id))
            for p in prompts
        ]
        answered = self._stream(requests, self.sampling(temperature=1.0), "held-out", "")
        groups = [scored for scored in answered if scored is not None]
        self._check_grader("evaluation", sum(scored.errors for scored in groups), requests)
        return groups

    def probe(self, prompts: Sequence[Prompt], version: int) -> list[Group]:
        """A few fresh tokens of every engine, sampled as in training; nothing is scored or trained."""
        requests = [
            GroupRequest(p, -2, at, 0, 2, group_seed(self.config.seed, -2, at, f"{version}/{p.row_id}"))
            for at, p in enumerate(prompts)
        ]
        sampling = replace(self.sampling(), max_new_tokens=min(PROBE_TOKENS, self.plan.max_new_tokens))
        return [group for groups in self.system.pool.generate(requests, sampling) for group in groups]

    def sampling(self, temperature: float | None = None) -> Sampling:
        """How responses are sampled: as configured, or plainly at a temperature (evaluation)."""
        rollout = self.config.rollout
        plain = temperature is not None
        return Sampling(
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=1.0 if plain else rollout.top_p,
            top_k=0 if plain else rollout.top_k,
            max_new_tokens=self.plan.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            fixed_length=self.fixed_length,
        )

    def _scored(self, turn: Round, requests: list[GroupRequest], name: str) -> Iterator[ScoredGroup | None]:
        self.console.phase(name, total=len(requests), round_=turn.number, lane="engines")
        began = time.monotonic()
        kept = [scored for request in requests if (scored := self._salvage(request)) is not None]
        yield from kept
        known = {scored.group.request.key for scored in kept}
        missing = [request for request in requests if request.key not in known]
        for scored in self._stream(missing, self.sampling(), "groups", "engines"):
            if scored is not None:
                self.journal.append(scored)
                faults.reach("score", 0, turn.number)
            yield scored
        self.journal.sync(turn.number)
        turn.row["time/generate"] = turn.row.get("time/generate", 0.0) + self._generated_at - began
        turn.row["time/score"] = turn.row.get("time/score", 0.0) + time.monotonic() - self._generated_at

    def _salvage(self, request: GroupRequest) -> ScoredGroup | None:
        """The group a resumed round already has for a request; it must be an answer to exactly this one."""
        scored = self.salvaged.get(request.round, {}).pop(request.key, None)
        if scored is None:
            return None
        asked = scored.group.request
        same = (asked.round, asked.seed, asked.group_size, asked.minibatch) == (
            request.round, request.seed, request.group_size, request.minibatch,
        )  # fmt: skip
        if not same or not np.array_equal(asked.prompt.token_ids, request.prompt.token_ids):
            raise BrokenPromise(
                f"round {request.round}: the journal answers another request for row {request.prompt.row_id} than this "
                f"run makes.\n  Remove {self.journal.folder}/round-{request.round:05d}.journal and resume again."
            )
        return scored

    def _stream(
        self, requests: list[GroupRequest], sampling: Sampling, unit: str, lane: str
    ) -> Iterator[ScoredGroup | None]:
        """Groups as they are scored, while others are still generated; None whenever there is none yet."""
        done = 0
        for groups in self.system.pool.generate(requests, sampling):
            for group in groups:
                self.scorer.submit(group)
            for scored in self.scorer.ready():
                done += 1
                yield scored
            self.console.advance(done, f"{unit}, {self.system.pool.tokens:,} tokens", lane)
            yield None
        self._generated_at = time.monotonic()
        yield from self.scorer.arrivals()

    def _request(self, turn: Round, prompt: Prompt, minibatch: int) -> GroupRequest:
        occurrence = turn.occurrences[prompt.row_id]
        turn.occurrences[prompt.row_id] += 1
        seed = group_seed(self.config.seed, turn.number, occurrence, prompt.row_id)
        return GroupRequest(prompt, turn.number, occurrence, minibatch, self.plan.group_size, seed)

    def _check_grader(self, where: str, failed: int, requests: Sequence[GroupRequest]) -> None:
        planned = sum(request.group_size for request in requests)
        if failed > MAX_GRADER_ERRORS * planned:
            raise BrokenPromise(
                f"{where}: the reward failed on {failed} of {planned} responses "
                f"(limit {MAX_GRADER_ERRORS:.0%}).\n  {self.scorer.last_error}\n"
                f"  Try it alone: launch.py check-reward --reward {self.config.reward_function or 'NAME'}"
            )
