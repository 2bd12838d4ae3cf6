"""The receipt of a real vLLM engine notices every way a weight sync can silently fail."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.errors import BrokenPromise
from cluster.weight_sync import compare, make_probe
from learner import device
from rollout.engine import UPDATE_BACKEND, Sampling
from rollout.types import GroupRequest, Probe, Prompt, Receipt, SharedBucket, WeightBucket

DEMO = Path(__file__).resolve().parents[2] / "rollout" / "tasks" / "demo"

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def engine() -> Any:
    from rollout.device import environment
    from rollout.engine import EngineSettings, RolloutEngine

    os.environ.update(environment("cpu"))
    settings = EngineSettings(
        model=str(DEMO), index=0, seed=1, dtype="float32", max_model_len=512, max_num_seqs=64, tensor_parallel=1,
        device="cpu", gpu_memory=0.5, kv_cache_gib=1.0, processed_logprobs=True,
    )  # fmt: skip
    return RolloutEngine(settings)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """The demo's weights, all of them moved a little."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return {name: p.detach() * (1 + 0.02 * torch.randn_like(p)) for name, p in model.named_parameters()}


def expected(weights: dict[str, torch.Tensor], probe: Probe) -> dict[str, str]:
    shown = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    return {
        name: Probe.digest((t if t.ndim == 1 else t[:, torch.from_numpy(probe.columns[name]).long()]).numpy())
        for name, t in shown.items()
    }


def sync(engine: Any, weights: dict[str, torch.Tensor], sent: dict[str, torch.Tensor] | None = None) -> None:
    """A sync as the driver does it: everything in `weights` is promised, `sent` is what really goes out."""
    shapes = {name: tuple(t.shape) for name, t in weights.items()} | {"lm_head.weight": (128, 64)}
    probe = make_probe(shapes, 3, "float32")
    moving = weights if sent is None else sent
    engine.begin_load()
    if moving:
        engine.load_bucket(WeightBucket(tuple(moving), tuple(t.numpy() for t in moving.values()), "float32"))
    receipt: Receipt = engine.finish_load(3, probe)
    compare(expected(weights, probe), {"engine-0": receipt}, 3)


def test_a_whole_sync_is_proved(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    sync(engine, weights)


def test_a_sync_that_does_nothing_is_noticed(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    other = {name: tensor + 0.01 for name, tensor in weights.items()}
    with pytest.raises(BrokenPromise, match="does not hold the weights"):
        sync(engine, other, sent={})
    sync(engine, weights)


@pytest.mark.parametrize("dropped", ["model.layers.2.self_attn.k_proj.weight", "model.norm.weight"])
def test_one_dropped_tensor_is_named(engine: Any, weights: dict[str, torch.Tensor], dropped: str) -> None:
    other = {name: tensor + 0.01 for name, tensor in weights.items()}
    with pytest.raises(BrokenPromise, match=dropped.replace(".", r"\.")):
        sync(engine, other, sent={name: tensor for name, tensor in other.items() if name != dropped})
    sync(engine, weights)


def test_a_sync_that_was_cut_short_is_begun_again(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """As when another engine dies in the middle: layers are half loaded, and the next sync brings everything again."""
    other = {name: tensor + 0.01 for name, tensor in weights.items()}
    half = dict(list(other.items())[: len(other) // 2 + 1])
    engine.begin_load()
    engine.begin_load()
    engine.load_bucket(WeightBucket(tuple(half), tuple(t.numpy() for t in half.values()), "float32"))
    sync(engine, weights)


def test_a_tied_output_layer_that_is_not_packed_again_is_noticed(
    engine: Any, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout.weights import Arrivals

    sync(engine, weights)
    other = {name: tensor + 0.01 for name, tensor in weights.items()}
    monkeypatch.setattr(Arrivals, "_repack_tied_head", lambda self: None)
    with pytest.raises(BrokenPromise, match=r"different: lm_head\.weight\n"):
        sync(engine, other)
    monkeypatch.undo()
    sync(engine, weights)


def long_request(size: int) -> GroupRequest:
    ids = (np.arange(300) % 10 + 5).astype(np.int32)
    return GroupRequest(Prompt("long", "", ids, ""), 1, 0, 0, size, 11)


def test_responses_come_from_the_new_weights_and_not_from_the_prefix_cache(
    engine: Any, weights: dict[str, torch.Tensor]
) -> None:
    """A prompt longer than a cache block (128 tokens on a CPU): a forgotten reset would show in the log-probs."""
    from transformers import AutoModelForCausalLM

    from learner.logprobs import PolicyModel

    sampling = Sampling(1.0, 1.0, 0, 8, (1,))
    list(engine.generate([long_request(4)], sampling))
    other = {name: tensor * 1.05 for name, tensor in weights.items()}
    sync(engine, other)
    [group] = [g for groups, _ in engine.generate([long_request(4)], sampling) for g in groups]
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.load_state_dict(other, strict=False)
    ids = np.concatenate([group.request.prompt.token_ids, group.token_ids[: group.lengths[0]]])
    places = torch.arange(299, len(ids) - 1)
    scored, _ = PolicyModel(model)(torch.from_numpy(ids)[None].long(), places, torch.from_numpy(ids[300:]).long(), 1.0)
    assert np.abs(scored.detach().numpy() - group.sampler_logprobs[: group.lengths[0]]).max() < 1e-4


def test_one_response_alone_is_the_same_response(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    sync(engine, weights)
    sampling = Sampling(1.0, 1.0, 0, 24, (1,))
    ids = np.asarray(engine._tokenizer.encode("47+85="), dtype=np.int32)
    request = GroupRequest(Prompt("sum", "47+85=", ids, "132"), 1, 0, 0, 6, 11)
    [group] = [g for groups, _ in engine.generate([request], sampling) for g in groups]
    alone = dataclasses.replace(request, group_size=1, seed=request.seed + 4)
    [single] = [g for groups, _ in engine.generate([alone], sampling) for g in groups]
    start, end = group.offsets[4:6]
    assert np.array_equal(single.token_ids, group.token_ids[start:end])
    assert np.array_equal(single.sampler_logprobs, group.sampler_logprobs[start:end])
    assert len({tuple(group.token_ids[a:b]) for a, b in pairwise(group.offsets)}) > 1, "all responses are the same"


def test_tokens_are_told_before_a_group_is_whole_and_never_fall(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """Supervision takes them for progress: responses of one group end at different times."""
    sync(engine, weights)
    ids = np.asarray(engine._tokenizer.encode("47+85="), dtype=np.int32)
    requests = [GroupRequest(Prompt(f"sum-{n}", "47+85=", ids, "132"), 1, 0, 0, 6, 11 + 100 * n) for n in range(3)]
    items = list(engine.generate(requests, Sampling(1.0, 1.0, 0, 24, (1,)), tick=0.0))
    told = [tokens for _, tokens in items]
    first = next(position for position, (groups, _) in enumerate(items) if groups)
    assert told == sorted(told)
    assert first > 1
    assert told[first - 1] > told[0] > 0
    assert told[-1] == sum(len(group.token_ids) for groups, _ in items for group in groups)


def promise(engine: Any, weights: dict[str, torch.Tensor], take: Callable[[], int]) -> int:
    """A sync whose weights arrive by `take`; how many tensors came."""
    probe = make_probe({n: tuple(t.shape) for n, t in weights.items()} | {"lm_head.weight": (128, 64)}, 5, "float32")
    engine.begin_load()
    taken = take()
    compare(expected(weights, probe), {"engine-0": engine.finish_load(5, probe)}, 5)
    return taken


def test_weights_arrive_through_memory_that_another_process_could_own(
    engine: Any, weights: dict[str, torch.Tensor]
) -> None:
    """The way of cuda_ipc, with host memory for the GPU's: the engine copies, the owner uses it again at once."""
    cpu = torch.device("cpu")

    def take() -> int:
        taken = 0
        for name, tensor in weights.items():
            buffer = tensor.reshape(-1).clone()
            handles = {device.identity(cpu): device.share(buffer)}
            taken += engine.load_shared(SharedBucket((name,), (tuple(tensor.shape),), "float32", handles))
            buffer.fill_(float("nan"))
        return taken

    assert promise(engine, weights, take) == len(weights)


def test_no_rank_on_the_engine_s_device_is_said(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    engine.begin_load()
    with pytest.raises(ValueError, match="no learner rank shares device cpu, only"):
        engine.load_shared(SharedBucket(("model.norm.weight",), ((64,),), "float32", {"GPU-1234": b""}))
    sync(engine, weights)


def test_weights_arrive_by_broadcast(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """The way of NCCL, with gloo: the learner is rank 0 and sends what it has announced."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cpu = torch.device("cpu")
    with ThreadPoolExecutor(1) as learner:
        group = learner.submit(device.broadcast_group, cpu, "127.0.0.1", port, 2, 30.0)
        engine.open_channel("127.0.0.1", port, 1, 2, 30.0)

        def send() -> None:
            for tensor in weights.values():
                group.result().broadcast(tensor.contiguous(), 0).wait()

        def take() -> int:
            sending = learner.submit(send)
            taken = int(engine.receive_bucket(list(weights), [tuple(t.shape) for t in weights.values()], "float32"))
            sending.result()
            return taken

        assert promise(engine, weights, take) == len(weights)
    engine.close_channel()


def test_vllm_still_has_what_the_weights_go_through() -> None:
    """Read from the installed vLLM: the methods, and the arguments, that a GPU worker offers."""
    import inspect

    from vllm import LLM
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    from rollout.weights import Arrivals

    for name, arguments in (
        ("init_weight_transfer_engine", ["init_info"]),
        ("start_weight_update", []),
        ("update_weights", ["update_info"]),
        ("finish_weight_update", []),
        ("shutdown_weight_transfer_engine", []),
    ):
        assert list(inspect.signature(getattr(Worker, name)).parameters) == ["self", *arguments]
    assert {"level", "mode"} <= set(inspect.signature(LLM.sleep).parameters)
    assert "tags" in inspect.signature(LLM.wake_up).parameters
    assert WeightTransferEngineFactory._registry[UPDATE_BACKEND]() is Arrivals
    assert not Arrivals.__abstractmethods__
    sleep_in_stages = inspect.getsource(Worker.wake_up)
    assert '"weights" in tags' in sleep_in_stages, "weights can be woken before the KV cache"
