"""One engine on a GPU: bfloat16, weights through vLLM's update API, sleep and wake in stages, speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.weight_sync import compare, make_probe
from rollout.types import GroupRequest, Probe, Prompt, WeightBucket

DEMO = Path(__file__).resolve().parents[2] / "rollout" / "tasks" / "demo"
TIED = "model.embed_tokens.weight"
Figure = Callable[[str, float, str], None]


@pytest.fixture(scope="module")
def engine() -> Any:
    from rollout.device import environment
    from rollout.engine import EngineSettings, RolloutEngine

    os.environ.update(environment("cuda"))
    settings = EngineSettings(
        model=str(DEMO), index=0, seed=1, dtype="bfloat16", max_model_len=256, max_num_seqs=256, tensor_parallel=1,
        device="cuda", gpu_memory=0.4, kv_cache_gib=1.0, processed_logprobs=True, sleeps=True,
    )  # fmt: skip
    return RolloutEngine(settings)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    return {name: p.detach() * (1 + 0.02 * torch.randn_like(p)) for name, p in model.named_parameters()}


def sync(engine: Any, weights: dict[str, torch.Tensor], version: int) -> float:
    """A whole sync as the driver does it; seconds. BrokenPromise when the engine holds anything else."""
    shapes = {name: tuple(t.shape) for name, t in weights.items()} | {"lm_head.weight": tuple(weights[TIED].shape)}
    probe = make_probe(shapes, version, "bfloat16")
    shown = weights | {"lm_head.weight": weights[TIED]}
    expected = {
        name: Probe.digest((t if t.ndim == 1 else t[:, torch.from_numpy(probe.columns[name]).long()]).float().numpy())
        for name, t in shown.items()
    }
    began = time.monotonic()
    engine.begin_load()
    arrays = tuple(tensor.contiguous().view(torch.uint16).numpy() for tensor in weights.values())
    engine.load_bucket(WeightBucket(tuple(weights), arrays, "bfloat16"))
    receipt = engine.finish_load(version, probe)
    seconds = time.monotonic() - began
    compare(expected, {"engine-0": receipt}, version)
    return seconds


def generate(engine: Any, size: int, length: int = 32) -> Any:
    from rollout.engine import Sampling

    ids = np.asarray(engine._tokenizer.encode("47+85="), dtype=np.int32)
    request = GroupRequest(Prompt("sum", "47+85=", ids, "132"), 1, 0, 0, size, 11)
    sampling = Sampling(1.0, 1.0, 0, length, (1,), fixed_length=True)
    [group] = [g for groups, _ in engine.generate([request], sampling) for g in groups]
    return group


def test_bfloat16_weights_arrive_and_are_proved(engine: Any, weights: dict[str, torch.Tensor], figure: Figure) -> None:
    sync(engine, weights, 1)
    figure("sync of the demo, proof included", sync(engine, weights, 2), "s")


def test_the_engine_scores_as_transformers_does(engine: Any, weights: dict[str, torch.Tensor], figure: Figure) -> None:
    from transformers import AutoModelForCausalLM

    from learner.logprobs import PolicyModel

    sync(engine, weights, 3)
    group = generate(engine, 4)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    model.load_state_dict(weights, strict=False)
    model.cuda()
    prompt = group.request.prompt.token_ids
    ids = np.concatenate([prompt, group.token_ids[: group.lengths[0]]])
    places = torch.arange(len(prompt) - 1, len(ids) - 1, device="cuda")
    row, targets = torch.from_numpy(ids)[None].long().cuda(), torch.from_numpy(ids[len(prompt) :]).long().cuda()
    with torch.no_grad():
        scored, _ = PolicyModel(model)(row, places, targets, 1.0)
    gap = np.abs(scored.cpu().numpy() - group.sampler_logprobs[: group.lengths[0]])
    figure("engine and transformers differ in bfloat16 by at most", float(gap.max()), "")
    assert gap.max() < 0.5
    assert gap.mean() < 0.05


def test_asleep_it_holds_nothing_and_awake_it_holds_what_was_sent(
    engine: Any, weights: dict[str, torch.Tensor], figure: Figure
) -> None:
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    figure("memory an engine gives up when it sleeps", (asleep - awake) / 2**30, "GiB")
    assert asleep - awake > 0.2 * torch.cuda.mem_get_info()[1], "the KV cache is most of what it was given"
    engine.wake("weights")
    between = torch.cuda.mem_get_info()[0]
    assert asleep - between < 0.1 * (asleep - awake), "weights come back first, and the KV cache not yet"
    other = {name: tensor * 1.05 for name, tensor in weights.items()}
    sync(engine, other, 4)
    engine.wake("kv_cache")
    assert np.isfinite(generate(engine, 2).sampler_logprobs).all()
    sync(engine, weights, 5)


def test_speed_of_one_engine(engine: Any, figure: Figure) -> None:
    generate(engine, 64)
    began = time.monotonic()
    made = generate(engine, 256, length=128)
    figure("one engine, the demo, 256 at once", len(made.token_ids) / (time.monotonic() - began), "tokens/s")
