"""One learner rank as a process of its own, without Ray: trains on a fixed batch and saves weights and metrics.

python tests/system/learner_rank.py RANK RANKS PORT ZERO MICROBATCH_TOKENS OUT [nan] [sampler] [streamed] [computed]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from learner.engine import LearnerEngine, LearnerSettings  # noqa: E402
from learner.settings import Objective  # noqa: E402
from learner.types import Batch, UpdateReport, joined  # noqa: E402
from learner.update import Update  # noqa: E402

DEMO = ROOT / "rollout" / "tasks" / "demo"


def fixed_batch(responses: int = 48) -> Batch:
    """Ragged responses of random tokens in 6 groups and 3 minibatches; two groups without signal."""
    draw = np.random.default_rng(7)
    prompts = draw.integers(3, 9, responses).astype(np.int32)
    lengths = draw.integers(1, 25, responses).astype(np.int32)
    advantages = draw.standard_normal(responses)
    groups = np.arange(responses) // 8
    advantages[np.isin(groups, (0, 3))] = 0.0
    return Batch(
        round=1,
        weights_versions=np.zeros(responses, dtype=np.int32),
        token_ids=draw.integers(3, 20, int(prompts.sum() + lengths.sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=lengths,
        sampler_logprobs=-np.abs(draw.standard_normal(int(lengths.sum()))).astype(np.float32),
        advantages=advantages,
        groups=groups.astype(np.int32),
        minibatches=(groups // 2).astype(np.int32),
        kl_coefs=np.zeros(responses),
        counted=np.ones(responses, dtype=bool),
    )


def part(batch: Batch, minibatch: int) -> Batch:
    """The rows of one minibatch as a batch of their own, as the streamed schedule hands them over."""
    rows = np.flatnonzero(batch.minibatches == minibatch)
    tokens = [batch.token_ids[batch.row_offsets[row] : batch.row_offsets[row + 1]] for row in rows]
    logprobs = [batch.sampler_logprobs[batch.response_offsets[row] : batch.response_offsets[row + 1]] for row in rows]
    by_row = (
        "weights_versions",
        "prompt_lengths",
        "response_lengths",
        "advantages",
        "groups",
        "minibatches",
        "kl_coefs",
    )
    return Batch(
        round=batch.round,
        token_ids=np.concatenate(tokens),
        sampler_logprobs=np.concatenate(logprobs),
        counted=batch.counted[rows],
        **{name: getattr(batch, name)[rows] for name in by_row},
    )


def main() -> None:
    """Train one round and write what came out."""
    rank, ranks, port, zero, tokens = map(int, sys.argv[1:6])
    settings = LearnerSettings(
        model=str(DEMO), rank=rank, ranks=ranks, device="cpu", dtype="float32", zero_stage=zero, lr=1e-3,
        warmup_steps=0, weight_decay=0.0, grad_clip=1.0, microbatch_tokens=tokens, objective=Objective(),
        score_temperature=1.0, old_logprobs="sampler" if "sampler" in sys.argv else "recompute", ref_refresh_steps=0,
        gradient_checkpointing="checkpointing" in sys.argv, offload="offload" in sys.argv, sentinel_rows=2,
        mismatch_limit=1e9, collective_timeout=60.0, seed=rank,
    )  # fmt: skip
    engine = LearnerEngine(settings, "127.0.0.1", port)
    # What a GPU with flash attention does; on a CPU torch's attention keeps the rows apart as well, only slower.
    engine.packs = "packed" in sys.argv
    if "nan" in sys.argv and rank == ranks - 1:
        # One broken gradient on one rank, in the second step only.
        backward, calls = engine.backward, iter(range(1000))

        def broken(loss: torch.Tensor) -> None:
            backward(loss * float("nan") if next(calls) == 1 else loss)

        engine.backward = broken  # type: ignore[method-assign]
    whole = fixed_batch()
    batches = [part(whole, m) for m in np.unique(whole.minibatches)] if "streamed" in sys.argv else [whole]
    reports: list[UpdateReport] = []
    for position, batch in enumerate(batches):
        update = Update(engine, None, batch, first=position == 0)
        if "computed" in sys.argv:  # what has no signal as well
            update.signal = batch.counted
        *_, report = update.run()
        assert isinstance(report, UpdateReport)
        reports.append(report)
    report = joined(reports)
    state = {name: tensor.double() for bucket in engine.gathered(1 << 30) for name, tensor in bucket}
    if rank == 0:
        torch.save(state, sys.argv[6])
        steps = [{"skipped": step.skipped, **step.metrics} for step in report.steps]
        Path(sys.argv[6] + ".json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
