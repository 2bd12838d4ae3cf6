"""A batch of learning: old log-probs, then one optimizer step per minibatch, each made of microbatches.

A round may be one batch, or several, each with the next minibatches: the steps are the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from learner.aggregate import Denominators
from learner.batching import LaidOut, Rows, pack_rows, pad_rows, plan_microbatches, rows_with_signal
from learner.engine import LearnerEngine
from learner.objective import Partial, finish_metrics, merge_partials, objective_terms, pack_partial, unpack_partial
from learner.reference import Reference
from learner.types import Batch, StepReport, UpdateReport


class MismatchError(RuntimeError):
    """Engine and learner disagree about the log-probs of the same tokens."""


class Update:
    """Trains one rank's share of a batch, minibatch by minibatch.

    All ranks make the same plan from the same batch; a rank's result does not depend on how many ranks there are,
    beyond the order of floating-point sums.
    """

    def __init__(self, engine: LearnerEngine, reference: Reference | None, batch: Batch, *, first: bool = True) -> None:
        """`reference` is None without a KL term; `first` says that no step of the round has been made yet.

        Later batches need the sampler's old log-probs: the policy of before the round is not there any more.
        """
        if not first and engine.settings.old_logprobs != "sampler":
            raise ValueError("old log-probs cannot be recomputed after the first step of a round")
        self.engine, self.reference, self.batch, self.first = engine, reference, batch, first
        self.minibatches = [int(m) for m in np.unique(batch.minibatches)]
        self._lengths = batch.prompt_lengths.astype(np.int64) + batch.response_lengths
        self.signal = rows_with_signal(batch)
        """(B,) the responses that are computed: the others cannot move the weights."""
        self._old: np.ndarray | None = None  # (T,), this rank's rows only
        self._trained = 0

    def run(self) -> Iterator[int | UpdateReport]:
        """Yields after every microbatch the number of minibatches done (a sign of life), and the report at the end."""
        started = time.monotonic()
        # Once the policy has moved on, a difference is no fault of anybody's.
        mismatch = self.check_mismatch() if self.first and self.batch.current else None
        seconds_old = 0.0
        if self.engine.settings.old_logprobs == "sampler":
            self._old = self.batch.sampler_logprobs
        elif len(self.minibatches) > 1:
            began = time.monotonic()
            yield from self.recompute_old()
            seconds_old = time.monotonic() - began
        reports: list[StepReport] = []
        for position, minibatch in enumerate(self.minibatches):
            for item in self.step(minibatch, first=self.first and position == 0):
                reports += [] if item is None else [item]
                yield len(reports)
        yield UpdateReport(tuple(reports), seconds_old, time.monotonic() - started, mismatch, self._trained)

    def check_mismatch(self) -> tuple[float, float]:
        """Score a few responses and compare with the engine's log-probs, before anything is trained on them.

        Returns (mean, largest) difference of this rank's tokens; raises MismatchError above the limit.
        """
        settings = self.engine.settings
        count = min(settings.sentinel_rows * settings.ranks, self.batch.size)
        rows = np.linspace(0, self.batch.size - 1, count).astype(np.int64)[settings.rank :: settings.ranks]
        if not len(rows):
            rows = np.zeros(1, dtype=np.int64)
        padded = self._lay_out(rows)
        with torch.no_grad():
            logprobs, _ = self.engine.score(self._tensors(padded))
        gap = (logprobs.cpu().double() - torch.from_numpy(self.batch.sampler_logprobs[padded.flat]).double()).abs()
        if not bool(torch.isfinite(gap).all()) or float(gap.max()) > settings.mismatch_limit:
            worst = int(gap.nan_to_num(nan=torch.inf).argmax())
            row = int(padded.rows[np.searchsorted(np.cumsum(self.batch.response_lengths[rows]), worst, side="right")])
            raise MismatchError(
                f"engine and learner differ by {float(gap.max()):.3g} (limit {settings.mismatch_limit:g}) in the "
                f"log-prob of one token, {float(gap.mean()):.3g} on average, response {row} of round "
                f"{self.batch.round}. Likely causes, in this order: weights that did not reach the engine (stale or "
                f"tied output layer), sampling at another temperature or with top-p/top-k, a prefix cache of older "
                f"weights, token ids that were decoded and encoded again, an engine in another precision."
            )
        return float(gap.mean()), float(gap.max())

    def recompute_old(self) -> Iterator[int]:
        """Log-probs under the policy as it is now, for every minibatch but the first (there they are the new ones)."""
        self._old = np.full(len(self.batch.sampler_logprobs), np.nan, dtype=np.float32)
        for minibatch in self.minibatches[1:]:
            for rows in self._plan(minibatch):
                if len(rows) or self.engine.settings.zero_stage == 3:
                    padded = self._lay_out(rows if len(rows) else np.zeros(1, dtype=np.int64))
                    with torch.no_grad():
                        logprobs, _ = self.engine.score(self._tensors(padded))
                    if len(rows):
                        self._old[padded.flat] = logprobs.float().cpu().numpy()
                yield 0

    def step(self, minibatch: int, *, first: bool) -> Iterator[StepReport | None]:
        """One optimizer step: yields None after every microbatch, and its report at the end.

        The ranks vote before it: nobody applies an update that is not finite anywhere.
        """
        engine = self.engine
        denominators = self._denominators(minibatch)
        partials: list[Partial] = []
        finite = True
        for rows in self._plan(minibatch):
            loss, partial = self._terms(rows, denominators, first)
            finite = finite and bool(torch.isfinite(loss.detach()))
            partials.append(partial)
            engine.backward(loss)
            self._trained += len(rows)
            yield None
        merged = self._reduce(merge_partials(partials))
        healthy = finite and engine.local_gradients_finite()
        vote = engine.all_sum(torch.tensor([0.0 if healthy else 1.0]))
        applied, norm, rate = False, float("nan"), engine.learning_rate()
        if float(vote) == 0.0:
            applied, norm = engine.step()
        else:
            engine.drop_gradients()
        engine.steps_done += 1
        metrics = finish_metrics(merged, denominators) | {"policy/grad_norm": norm, "policy/lr": rate}
        if self.reference is not None:
            self.reference.after_step(engine)
        yield StepReport(engine.steps_done, minibatch, not applied, metrics)

    def _plan(self, minibatch: int) -> list[Rows]:
        rows = np.flatnonzero((self.batch.minibatches == minibatch) & self.signal)
        settings = self.engine.settings
        return plan_microbatches(
            rows,
            self._lengths,
            settings.rank,
            settings.ranks,
            settings.microbatch_tokens,
            packed=self.engine.packs,
        )

    def _denominators(self, minibatch: int) -> Denominators:
        """Counts of the whole minibatch, every rank and microbatch, groups without signal included."""
        rows = self.batch.minibatches == minibatch
        lengths = np.where(self.batch.counted, self.batch.response_lengths, 0)[rows]
        return Denominators(responses=int(rows.sum()), tokens=int(lengths.sum()))

    def _terms(self, rows: Rows, denominators: Denominators, first: bool) -> tuple[torch.Tensor, Partial]:
        """Loss of one microbatch. Without rows: a zero that still goes through the model, for ZeRO's collectives."""
        empty = not len(rows)
        padded = self._lay_out(np.zeros(1, dtype=np.int64) if empty else rows)
        tensors = self._tensors(padded)
        # Before the policy's own pass, and for empty microbatches too: it may be the same model under ZeRO-3 (LoRA).
        reference = None if self.reference is None else self.reference.score(tensors)
        logprobs, entropy = self.engine.score(tensors)
        if empty:
            return logprobs.sum() * 0.0, {}
        device = logprobs.device
        mask = torch.from_numpy(padded.response_mask).to(device)

        def spread(flat: torch.Tensor) -> torch.Tensor:
            return torch.zeros(mask.shape, dtype=flat.dtype, device=device).masked_scatter(mask, flat)

        def known(values: np.ndarray) -> torch.Tensor:
            return spread(torch.from_numpy(values[padded.flat]).to(device))

        anchored_at_sampler = self.engine.settings.old_logprobs == "sampler"
        recomputed = self._old is not None and (anchored_at_sampler or not first)
        loss, partial = objective_terms(
            self.engine.settings.objective,
            spread(logprobs),
            known(self._old) if recomputed and self._old is not None else spread(logprobs.detach()),
            mask,
            torch.from_numpy(self.batch.advantages[rows]).to(device),
            denominators,
            ref_logprobs=None if reference is None else spread(reference),
            # Where the old log-probs are the sampler's, there is no difference to measure or to correct.
            sampler_logprobs=None if anchored_at_sampler else known(self.batch.sampler_logprobs),
            kl_coefs=torch.from_numpy(self.batch.kl_coefs[rows]).to(device),
            counted=torch.from_numpy(self.batch.counted[rows]).to(device),
        )
        return loss, partial | {"entropy": float(entropy.double().sum()), "entropy_tokens": float(len(entropy))}

    def _lay_out(self, rows: Rows) -> LaidOut:
        return (pack_rows if self.engine.packs else pad_rows)(self.batch, rows)

    def _tensors(self, laid_out: LaidOut) -> dict[str, torch.Tensor]:
        arrays = {"input_ids": laid_out.input_ids, "positions": laid_out.positions, "targets": laid_out.targets}
        if laid_out.position_ids is not None:
            arrays["position_ids"] = laid_out.position_ids
        return {name: torch.from_numpy(array).to(self.engine.device) for name, array in arrays.items()}

    def _reduce(self, partial: Partial) -> Partial:
        sums, maxima = pack_partial(partial)
        return unpack_partial(self.engine.all_sum(sums), self.engine.all_max(maxima))
