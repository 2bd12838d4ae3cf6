"""One learner rank as a process of its own, without Ray: trains, saves or restores, and trains on.

python tests/system/checkpoint_rank.py RANK RANKS PORT ZERO DTYPE CHECKPOINT MODE [LORA_RANK]

whole     two rounds, save, two more rounds
resumed   restore, two rounds
full      one round, save while rank 1 may write no file above 50 kB, one more round
refused   restore, and say why it was refused
Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from learner.checkpoint import CheckpointRefused, load, save, tensors_sha256, weights_sha256  # noqa: E402
from learner.engine import LearnerEngine, LearnerSettings  # noqa: E402
from learner.reference import Reference  # noqa: E402
from learner.settings import Objective  # noqa: E402
from learner.types import SavedFile  # noqa: E402
from learner.update import Update  # noqa: E402
from tests.system.learner_rank import DEMO, fixed_batch  # noqa: E402


def train(engine: LearnerEngine, reference: Reference, rounds: int) -> None:
    """Rounds of three steps; the reference is refreshed every four, so it differs from the policy when it is saved."""
    for _ in range(rounds):
        batch = replace(fixed_batch(), kl_coefs=fixed_batch().kl_coefs + 0.01)
        for _ in Update(engine, reference, batch).run():
            pass


def main() -> None:
    """See above."""
    rank, ranks, port, zero = map(int, sys.argv[1:5])
    dtype, folder, mode = sys.argv[5], Path(sys.argv[6]), sys.argv[7]
    lora = int(sys.argv[8]) if len(sys.argv) > 8 else 0
    settings = LearnerSettings(
        model=str(DEMO), rank=rank, ranks=ranks, device="cpu", dtype=dtype, zero_stage=zero, lr=1e-3, warmup_steps=9,
        weight_decay=0.0, grad_clip=1.0, microbatch_tokens=256, objective=Objective(kl="k3_weighted"),
        score_temperature=1.0, old_logprobs="recompute", ref_refresh_steps=0 if lora else 4,
        gradient_checkpointing=False, offload=False, sentinel_rows=2, mismatch_limit=1e9,
        collective_timeout=120.0, seed=rank, lora_rank=lora, lora_alpha=2.0 * lora,
    )  # fmt: skip
    engine = LearnerEngine(settings, "127.0.0.1", port)
    reference = Reference(engine)
    said: dict[str, object] = {}
    if mode == "whole":
        train(engine, reference, 2)
        vote = save(engine, reference, folder)
        said["vote"] = asdict(vote)
        (folder.parent / f"files-{rank}.json").write_text(json.dumps([asdict(file) for file in vote.files]))
        train(engine, reference, 2)
    elif mode == "full":
        train(engine, reference, 1)
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        said["vote"] = asdict(save(engine, reference, folder))
        train(engine, reference, 1)
    else:
        listed = [
            SavedFile(**file)
            for each in range(ranks)
            for file in json.loads((folder.parent / f"files-{each}.json").read_text())
        ]
        try:
            said["loaded"] = load(engine, reference, folder, listed)
            for _ in range(2):
                # As on a device that engines use in between; the run that is not resumed does without.
                engine.park()
                engine.unpark()
                train(engine, reference, 1)
        except CheckpointRefused as refusal:
            said["refused"] = str(refusal)
    said |= {
        "weights": weights_sha256(engine),
        "reference": "" if reference.model is None else tensors_sha256(reference.model.hf.named_parameters()),
        "refreshed_at": reference.refreshed_at,
        "steps": engine.steps_done,
        "next_random": torch.rand(1).item(),
    }
    sys.stdout.write("\n" + json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
