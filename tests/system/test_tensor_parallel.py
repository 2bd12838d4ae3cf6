"""An engine over two devices (two CPU processes): its receipt is whole, with replicated heads and with an adapter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.errors import BrokenPromise
from cluster.weight_sync import compare, make_probe
from learner.engine import load_model
from learner.lora import insert_adapter
from learner.weights import digests, outgoing, shapes
from rollout.engine import Sampling
from rollout.types import GroupRequest, Prompt

DEMO = Path(__file__).resolve().parents[2] / "rollout" / "tasks" / "demo"

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture(params=[0, 8], ids=["all weights", "adapter"])
def lora_rank(request: pytest.FixtureRequest) -> int:
    rank: int = request.param
    return rank


@pytest.fixture
def engine(lora_rank: int) -> Iterator[Any]:
    from rollout.device import environment
    from rollout.engine import EngineSettings, RolloutEngine

    os.environ.update(environment("cpu"))
    settings = EngineSettings(
        model=str(DEMO), index=0, seed=1, dtype="float32", max_model_len=128, max_num_seqs=16, tensor_parallel=2,
        device="cpu", gpu_memory=0.5, kv_cache_gib=1.0, processed_logprobs=True, lora_rank=lora_rank,
    )  # fmt: skip
    made = RolloutEngine(settings)
    yield made
    made._llm.llm_engine.model_executor.shutdown()


@pytest.fixture
def learner(lora_rank: int) -> Any:
    """What learner/weights.py needs of a rank: moved weights, by their own names."""
    torch.manual_seed(0)
    model = load_model(str(DEMO), "float32")
    if lora_rank:
        insert_adapter(model, lora_rank, 2.0 * lora_rank)
    for name, parameter in model.named_parameters():
        if not lora_rank:
            parameter.data *= 1 + 0.02 * torch.randn_like(parameter)
        elif ".lora_B." in name:
            parameter.data.normal_(0, 0.05)

    def gathered(bucket_bytes: int, *, adapter_only: bool = False) -> Any:
        yield [(n, p.detach()) for n, p in model.named_parameters() if not adapter_only or p.requires_grad]

    settings = SimpleNamespace(lora_rank=lora_rank, lora_scaling=2.0)
    return SimpleNamespace(policy=SimpleNamespace(hf=model), gathered=gathered, settings=settings)


def test_the_receipt_of_two_devices_is_that_of_the_whole_model(engine: Any, learner: Any, lora_rank: int) -> None:
    probe = make_probe(shapes(learner), 1, "float32")
    engine.begin_load()
    for bucket in outgoing(learner, "float32", 1 << 28):
        engine.load_bucket(bucket)
    receipt = engine.finish_load(1, probe)
    expected = digests(learner, probe)
    assert sum(".lora_" in name for name in expected) == (2 * 7 * 4 if lora_rank else 0)
    compare(expected, {"engine-0": receipt}, 1)

    ids = torch.tensor(engine._tokenizer.encode("47+85="), dtype=torch.int32).numpy()
    request = GroupRequest(Prompt("sum", "", ids, ""), 1, 0, 0, 2, 11)
    [group] = [g for groups, _ in engine.generate([request], Sampling(1.0, 1.0, 0, 8, (1,))) for g in groups]
    row = torch.tensor([*ids.tolist(), *group.token_ids[: group.lengths[0]].tolist()])
    with torch.no_grad():
        logprobs = torch.log_softmax(learner.policy.hf(row[None]).logits[0].float(), -1)
    for place in range(int(group.lengths[0])):
        mine = float(logprobs[len(ids) - 1 + place, row[len(ids) + place]])
        assert mine == pytest.approx(float(group.sampler_logprobs[place]), abs=1e-4)

    # One share of one layer on one device is enough to be noticed.
    for name, parameter in learner.policy.hf.named_parameters():
        if name.endswith("layers.2.mlp.down_proj.weight") or name.endswith(
            "layers.2.mlp.down_proj.lora_A.default.weight"
        ):
            parameter.data[:, parameter.shape[1] // 2 :] += 0.1
    with pytest.raises(BrokenPromise, match=r"layers\.2\.mlp\.down_proj"):
        compare(digests(learner, probe), {"engine-0": receipt}, 1)
