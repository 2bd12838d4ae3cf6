"""The verbs of the loop in launch.py, bound to one run: what is asked, scored, kept, trained and written down."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster import faults
from cluster.errors import BrokenPromise
from cluster.plan import Plan
from cluster.run.commits import Commits
from cluster.run.config import Config
from cluster.run.console import Console, summary
from cluster.run.doctor import Limits, diagnose, new_findings
from cluster.run.exporting import save_tokenizer
from cluster.run.findings import Finding
from cluster.run.folder import RunFolder
from cluster.run.journal import Journal
from cluster.run.metrics import EventLog, MetricsLog
from cluster.run.rows import dropped_metrics, rollout_metrics, update_metrics
from cluster.run.trackers import Trackers
from cluster.scorer_pool import ScorerPool
from cluster.start import System
from cluster.waiting import ActorLost
from learner.advantages import compute_advantages, zero_signal
from learner.batching import build_batch
from learner.types import Batch, UpdateReport
from rollout.engine import Sampling
from rollout.evaluate import evaluate_groups
from rollout.rewards import part_weights
from rollout.rewards.answers import final_answer
from rollout.seeds import group_seed
from rollout.stream import PromptStream
from rollout.types import DoubleArray, GroupRequest, Prompt, ScoredGroup

MAX_GRADER_ERRORS = 0.01
MAX_SKIPPED_IN_A_ROW = 3


class DoctorStop(BrokenPromise):
    """A finding stopped the run, as --doctor.stop-on asked."""


@dataclass
class Round:
    """What is gathered about a round on its way through the stages."""

    number: int
    """1, 2, ..."""
    row: dict[str, Any] = field(default_factory=dict)
    """Its row of metrics so far."""
    dropped: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    """Groups planned and not trained: key -> (reason, responses)."""
    occurrences: Counter[str] = field(default_factory=Counter)
    """How often each row was asked for in this round."""
    advantages: DoubleArray | None = None
    """(B,) of the batch."""
    started: float = field(default_factory=time.monotonic)
    """When it began."""

    def drop(self, scored: ScoredGroup, reason: str) -> None:
        """Leave a whole group out of training."""
        self.dropped[scored.group.request.key] = (reason, len(scored.total))

    def dropped_by_reason(self) -> Counter[str]:
        """Responses by reason."""
        counts: Counter[str] = Counter()
        for reason, responses in self.dropped.values():
            counts[reason] += responses
        return counts


@dataclass
class Run:
    """Everything one run needs between two rounds."""

    config: Config
    plan: Plan
    folder: RunFolder
    system: System
    prompts: PromptStream
    held_out: Sequence[Prompt]
    scorer: ScorerPool
    console: Console
    journal: Journal
    metrics: MetricsLog
    events: EventLog
    trackers: Trackers
    commits: Commits
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    salvaged: dict[tuple[str, int], ScoredGroup] = field(default_factory=dict)
    """Groups of an interrupted round, from its journal: they are not generated again."""
    fixed_length: bool = False

    def rounds(self) -> Iterator[Round]:
        """The rounds that are still to do."""
        for number in range(self.weights_version + 1, self.config.rounds + 1):
            yield Round(number)

    @property
    def weights_version(self) -> int:
        """Completed rounds behind the learner's weights."""
        return self.metrics.last_round or 0

    def sync(self, version: int) -> dict[str, Any]:
        """Give the engines the learner's weights; metrics of the sync."""
        self.console.phase("sync", round_=version)
        faults.reach("sync.send", 0, version)
        report = self.system.sync(version)
        return {"sync/seconds": report.seconds, "sync/receipt_ok": 1.0}

    def next_requests(self, turn: Round) -> list[GroupRequest]:
        """The groups of the round: prompts drawn, each assigned to its minibatch before anything is generated."""
        drawn = [prompt for prompt, _ in self.prompts.take(self.plan.prompts)]
        return [
            self._request(turn, prompt, inner * self.plan.minibatches + position // self.plan.groups_per_minibatch)
            for inner in range(self.config.learner.inner_updates)
            for position, prompt in enumerate(drawn)
        ]

    def generate_and_score(self, turn: Round, requests: Sequence[GroupRequest]) -> list[ScoredGroup]:
        """Scored groups in the order of the requests; scoring hides behind generation, and all of it is journalled.

        Groups without signal are replaced by fresh ones under dynamic sampling; groups whose grader failed are dropped.
        """
        kept: dict[int, ScoredGroup] = {}
        open_slots = dict(enumerate(requests))
        for attempt in range(self.config.filter.max_refills + 1):
            slots = {request.key: slot for slot, request in open_slots.items()}
            for scored in self._scored(turn, list(open_slots.values()), "generate" if not attempt else "refill"):
                slot = slots[scored.group.request.key]
                if scored.errors:
                    turn.drop(scored, "grader_error")
                    del open_slots[slot]
                elif self.config.filter.dynamic_sampling and self._without_signal(scored):
                    turn.drop(scored, "no_signal")
                else:
                    kept[slot] = scored
                    del open_slots[slot]
            self._check_grader(turn, requests)
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
        return [kept[slot] for slot in sorted(kept)]

    def build_batch(self, turn: Round, groups: Sequence[ScoredGroup]) -> Batch:
        """Advantages on whole groups, before any split; the batch of the round."""
        faults.reach("pack", 0, turn.number)
        turn.advantages = self._advantages(groups)
        return build_batch(
            groups,
            turn.advantages,
            kl_coef=self.plan.kl_coef,
            domain_coefs=self.plan.kl_domains,
            drop_unfinished=self.config.filter.overlong,
        )

    def update(self, turn: Round, batch: Batch) -> UpdateReport:
        """One optimizer step per minibatch."""
        self.console.phase("learn", total=self.plan.steps_per_round)
        report = self.system.learners.update(batch, lambda done: self.console.advance(done, "steps"))
        turn.row |= update_metrics(report) | {
            "time/learn": report.seconds_learn,
            "time/old_logprobs": report.seconds_old_logprobs,
        }
        return report

    def record(self, turn: Round, groups: Sequence[ScoredGroup]) -> None:
        """Commit the round (see commits.py for the order), then look at its numbers."""
        assert turn.advantages is not None
        turn.row = (
            {"round": turn.number, "weights_version": turn.number - 1}
            | rollout_metrics(groups, turn.advantages)
            | turn.row
            | dropped_metrics(turn.dropped_by_reason())
            | {f"memory/{name}": size for name, size in self.system.memory().items()}
            | {
                "fleet/restarts": self.system.pool.restarts,
                "grader/errors": turn.dropped_by_reason()["grader_error"],
                "time/round": time.monotonic() - turn.started,
            }
        )
        self._compact(turn, groups)
        self._write(turn.row)
        self._check_skipped()
        score = turn.row.get("eval/correctness")
        if self.commits.after(turn.number, self.metrics.offset, self.prompts.state(), score):
            self.journal.retire(turn.number)
        self._diagnose(turn.number)
        for name in self.trackers.check(turn.number):
            self.console.always(f"the tracker {name} has ended; the run goes on (see events.jsonl)")

    def evaluate(self, turn: Round) -> None:
        """Held-out accuracy with the weights the engines hold now; into the row of the round."""
        every = self.config.eval.every
        due = every and (turn.number % every == 0 or turn.number == self.config.rounds)
        if due and self.held_out:
            turn.row |= self.evaluation(turn.number)

    def evaluate_start(self) -> None:
        """Row 0: evaluation before any update."""
        if self.config.eval.every and self.held_out and not self.rows:
            row = {"round": 0, "weights_version": 0} | self.evaluation(0)
            self._write(row)

    def evaluation(self, round_: int) -> dict[str, Any]:
        """Metrics of one evaluation: sampled at temperature 1, the same seeds every time."""
        began = time.monotonic()
        self.console.phase("evaluate", total=len(self.held_out))
        requests = [
            GroupRequest(p, -1, 0, 0, self.config.eval.samples, group_seed(self.config.seed, -1, 0, p.row_id))
            for p in self.held_out
        ]
        groups = list(self._stream(requests, self.sampling(temperature=1.0), "held-out"))
        self.journal.keep_evaluation(round_, groups)
        return evaluate_groups(groups, final_answer).metrics() | {"time/eval": time.monotonic() - began}

    def finish(self) -> None:
        """Save the trained model in Hugging Face format, and say how the run went."""
        self.console.phase("saving the model")
        self.system.learners.export(self.folder.model, 300.0)
        save_tokenizer(self.tokenizer, self.system.model, self.folder.model)
        self.console.close()
        self.console.always(summary(self.rows, self.folder.path))

    def _scored(self, turn: Round, requests: list[GroupRequest], name: str) -> Iterator[ScoredGroup]:
        self.console.phase(name, total=len(requests))
        began = time.monotonic()
        kept = [scored for request in requests if (scored := self._salvage(request)) is not None]
        yield from kept
        known = {scored.group.request.key for scored in kept}
        missing = [request for request in requests if request.key not in known]
        for scored in self._stream(missing, self.sampling(), "groups", turn):
            self.journal.append(scored)
            faults.reach("score", 0, turn.number)
            yield scored
        self.journal.sync(turn.number)
        turn.row["time/generate"] = turn.row.get("time/generate", 0.0) + self._generated_at - began
        turn.row["time/score"] = turn.row.get("time/score", 0.0) + time.monotonic() - self._generated_at

    def _salvage(self, request: GroupRequest) -> ScoredGroup | None:
        """The group a resumed round already has for a request; it must be an answer to exactly this one."""
        scored = self.salvaged.pop(request.key, None)
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
        self, requests: list[GroupRequest], sampling: Sampling, unit: str, turn: Round | None = None
    ) -> Iterator[ScoredGroup]:
        """Groups as they are scored, while others are still generated."""
        done = 0
        for groups in self.system.pool.generate(requests, sampling):
            for group in groups:
                self.scorer.submit(group)
            for scored in self.scorer.ready():
                done += 1
                yield scored
            self.console.advance(done, f"{unit}, {self.system.pool.tokens:,} tokens")
        self._generated_at = time.monotonic()
        for scored in self.scorer.drain():
            yield scored

    def _request(self, turn: Round, prompt: Prompt, minibatch: int) -> GroupRequest:
        occurrence = turn.occurrences[prompt.row_id]
        turn.occurrences[prompt.row_id] += 1
        seed = group_seed(self.config.seed, turn.number, occurrence, prompt.row_id)
        return GroupRequest(prompt, turn.number, occurrence, minibatch, self.plan.group_size, seed)

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

    def _advantages(self, groups: Sequence[ScoredGroup]) -> DoubleArray:
        ids = np.repeat(np.arange(len(groups)), [len(scored.total) for scored in groups])
        rewards, weights = self._rewards(groups)
        return compute_advantages(self.config.learner.advantage, rewards, ids, weights)

    def _without_signal(self, scored: ScoredGroup) -> bool:
        rewards, weights = self._rewards([scored])
        ids = np.zeros(len(scored.total), dtype=np.int64)
        return bool(zero_signal(self.config.learner.advantage, rewards, ids, weights).all())

    def _rewards(self, groups: Sequence[ScoredGroup]) -> tuple[DoubleArray, DoubleArray | None]:
        """The reward that carries the advantage: totals, or (B, K) parts with their weights for GDPO."""
        if not self.config.learner.advantage.startswith("gdpo"):
            return np.concatenate([scored.total for scored in groups]), None
        weights = part_weights(self.config.reward, list(groups[0].parts))
        parts = np.stack([np.concatenate([g.parts[name] for g in groups]) for name in weights], axis=1)
        return parts, np.array(list(weights.values()))

    def _check_grader(self, turn: Round, requests: Sequence[GroupRequest]) -> None:
        planned = sum(request.group_size for request in requests)
        failed = turn.dropped_by_reason()["grader_error"]
        if failed > MAX_GRADER_ERRORS * planned:
            raise BrokenPromise(
                f"round {turn.number}: the reward failed on {failed} of {planned} responses "
                f"(limit {MAX_GRADER_ERRORS:.0%}).\n  {self.scorer.last_error}\n"
                f"  Try it alone: launch.py check-reward --reward {self.config.reward_function or 'NAME'}"
            )

    def _check_skipped(self) -> None:
        flags = [step["skipped"] for row in self.rows[-4:] for step in row.get("steps", [])]
        if len(flags) >= MAX_SKIPPED_IN_A_ROW and all(flags[-MAX_SKIPPED_IN_A_ROW:]):
            raise BrokenPromise(
                f"the last {MAX_SKIPPED_IN_A_ROW} optimizer steps were not finite on some rank and skipped on all. "
                f"Lower --learner.lr, or look for extreme rewards in the last rounds of the report."
            )

    def _write(self, row: dict[str, Any]) -> None:
        self.metrics.append(row)
        self.rows.append(row)
        self.console.row(row)

    def _compact(self, turn: Round, groups: Sequence[ScoredGroup]) -> None:
        assert turn.advantages is not None
        parts = np.split(turn.advantages, np.cumsum([len(scored.total) for scored in groups])[:-1])
        advantages = {scored.group.request.key: part for scored, part in zip(groups, parts, strict=True)}
        dropped = {key: reason for key, (reason, _) in turn.dropped.items()}
        self.journal.compact(turn.number, advantages, dropped=dropped, keep_journal=True)

    def engine_lost(self, lost: ActorLost) -> None:
        """Say that an engine is replaced, and why: it costs time, and a second time it may be a fault of the model."""
        self.events.append("engine_lost", engine=lost.name, reason=lost.reason, hung=lost.hung)
        self.console.always(f"{lost.name} is replaced, its unfinished groups are generated again: {lost.reason}")

    def _diagnose(self, round_: int) -> None:
        limits = Limits(max_lag=0, max_length=self.plan.max_new_tokens, vocabulary=self.plan.model.vocab_size or None)
        fresh = new_findings(self.findings, diagnose(self.rows, limits))
        self.findings.extend(fresh)  # all that was said: what comes and goes is said once
        for finding in fresh:
            self.events.append("finding", round=round_, finding=dataclasses.asdict(finding))
            self.console.always(f"{finding.severity}: {finding.id} since round {finding.since_round}: {finding.cause}")
        if self.config.doctor.stop_on == "critical" and any(finding.severity == "critical" for finding in fresh):
            raise DoctorStop(f"the doctor found something critical in round {round_}: {fresh[0].id}\n  {fresh[0].cure}")
