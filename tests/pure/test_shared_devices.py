"""What only a GPU does, driven on a CPU with fakes at the boundary: turns on a shared device, parking, transports."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cluster import transport as transports
from cluster import turns
from cluster.errors import PlanError
from cluster.transport import broadcast, cuda_ipc
from cluster.turns import Turns, memory_share
from learner import device as learner_device
from learner.parking import Parking
from learner.weights import SharedBuckets
from rollout import device as rollout_device
from rollout.engine import EngineSettings, RolloutEngine
from rollout.types import Probe, SharedBucket, WeightBucket

Events = list[tuple[str, ...]]


class FakeActor:
    """Writes down who was asked for what, and answers from a table."""

    def __init__(self, name: str, events: Events, answers: Mapping[str, Any] | None = None) -> None:
        self._name, self._events, self._answers = name, events, answers or {}

    def __getattr__(self, verb: str) -> Any:
        def remote(*args: Any) -> Any:
            self._events.append((self._name, verb, *(str(arg) for arg in args if isinstance(arg, str | int))))
            answer = self._answers.get(verb)
            return answer(*args) if callable(answer) else answer

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (turns, cuda_ipc, broadcast):
        monkeypatch.setattr(module, "fetch_all", lambda refs, seconds, what: dict(refs))


# --- Turns ------------------------------------------------------------------------------------------------------------


def test_a_shared_device_is_handed_over_in_stages() -> None:
    events: Events = []
    engines, ranks = {"engine-0": FakeActor("engine-0", events)}, [FakeActor("learner-0", events)]
    turn = Turns(shared=True, seconds=1.0)
    for _ in range(2):
        turn.to_ranks(ranks, engines)
        events.append(("learn",))
        turn.to_weights(ranks, engines)
        events.append(("sync",))
        turn.to_engines(engines)
        events.append(("generate",))
    once: Events = [
        ("engine-0", "sleep"),
        ("learner-0", "unpark"),
        ("learn",),
        ("learner-0", "park"),
        ("engine-0", "wake", "weights"),
        ("sync",),
        ("engine-0", "wake", "kv_cache"),
        ("generate",),
    ]
    assert events == once * 2
    assert turn.asleep == {}


def test_a_first_sync_wakes_nobody_who_is_awake_and_a_second_minibatch_puts_nobody_to_sleep_again() -> None:
    events: Events = []
    engines = {"engine-0": FakeActor("engine-0", events)}
    turn = Turns(shared=True, seconds=1.0)
    turn.to_weights([], engines)
    turn.to_engines(engines)
    assert events == []
    turn.to_ranks([], engines)
    turn.to_ranks([], engines)
    assert events == [("engine-0", "sleep")]
    turn.forget("engine-0")  # it died and a new one took its place
    turn.to_weights([], engines)
    assert events == [("engine-0", "sleep")]


def test_devices_that_are_not_shared_are_left_alone() -> None:
    events: Events = []
    turn = Turns(shared=False, seconds=1.0)
    everybody = {"engine-0": FakeActor("engine-0", events)}
    turn.to_ranks([FakeActor("learner-0", events)], everybody)
    turn.to_weights([FakeActor("learner-0", events)], everybody)
    turn.to_engines(everybody)
    assert events == []
    assert (memory_share(0.85, shared=False), memory_share(0.85, shared=True), memory_share(0.3, shared=True)) == (
        0.85, 0.5, 0.3,
    )  # fmt: skip


# --- The engine's side of vLLM's interface ----------------------------------------------------------------------------


class FakeLLM:
    """Records what vLLM would be asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, *args))
        return [{"w": "digest"} if method == "read_back" else None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache",))
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))


def engine(lora_rank: int = 0) -> tuple[RolloutEngine, FakeLLM]:
    made = RolloutEngine.__new__(RolloutEngine)
    made.settings = EngineSettings(
        model="", index=3, seed=0, dtype="bfloat16", max_model_len=8, max_num_seqs=1, tensor_parallel=2, device="cuda",
        gpu_memory=0.5, kv_cache_gib=1.0, processed_logprobs=True, sleeps=True, lora_rank=lora_rank,
    )  # fmt: skip
    made._llm, made._loading = FakeLLM(), False
    return made, made._llm


def test_weights_go_through_vllm_s_update_api_and_end_with_an_empty_cache_and_a_receipt() -> None:
    rollout, llm = engine()
    rollout.open_channel("host", 1, 5, 9, 30.0)
    rollout.begin_load()
    bucket = WeightBucket(("w",), (np.zeros(2, dtype=np.float32),), "float32")
    assert rollout.load_bucket(bucket) == 1
    assert rollout.receive_bucket(["a", "b"], [(2,), (3,)], "bfloat16") == 2
    shared = SharedBucket(("w",), ((2,),), "bfloat16", {"GPU-1": b"handle"})
    assert rollout.load_shared(shared) == 1
    receipt = rollout.finish_load(7, Probe({"w": np.array([0], dtype=np.int32)}, "bfloat16"))
    assert [call[0] for call in llm.calls] == [
        "init_weight_transfer_engine", "start_weight_update", "update_weights", "update_weights", "update_weights",
        "finish_weight_update", "reset_prefix_cache", "read_back",
    ]  # fmt: skip
    assert llm.calls[0][1] == {"host": "host", "port": 1, "first_rank": 5, "size": 9, "timeout": 30.0}
    assert llm.calls[3][1] == {"names": ("a", "b"), "shapes": ((2,), (3,)), "dtype": "bfloat16"}
    assert (receipt.engine, receipt.version, receipt.digests, receipt.cache_reset) == (3, 7, {"w": "digest"}, True)


def test_an_engine_that_trains_all_weights_throws_them_away_in_its_sleep_and_one_with_an_adapter_keeps_them() -> None:
    for rank, level in ((0, 2), (8, 1)):
        rollout, llm = engine(lora_rank=rank)
        rollout.sleep()
        rollout.wake("weights")
        rollout.begin_load()
        rollout.finish_load(1, Probe({}, "bfloat16"))
        rollout.wake("kv_cache")
        placed = [("place_adapter",)] if rank else []
        assert llm.calls == [
            ("sleep", level), ("wake_up", ["weights"]), ("start_weight_update",), ("finish_weight_update",), *placed,
            ("reset_prefix_cache",), ("read_back", {}), ("wake_up", ["kv_cache"]),
        ]  # fmt: skip


# --- Optimizer state in host memory -----------------------------------------------------------------------------------


class FakeDeepSpeed:
    """What parking touches of DeepSpeed: the optimizer, and its own way for ZeRO 1 and 2."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        self.calls: list[tuple[Any, ...]] = []

    def step(self) -> None:
        self.weight.grad = torch.full((3,), 0.5)
        self.optimizer.step()

    def offload_states(self, include: list[str], pin_memory: bool) -> None:
        self.calls.append(("offload", *include))

    def reload_states(self) -> None:
        self.calls.append(("reload",))


def test_parked_moments_come_back_as_they_were() -> None:
    plain, parked = FakeDeepSpeed(), FakeDeepSpeed()
    parking = Parking(parked, 0, torch.device("cpu"))
    parking.unpark()  # nothing is away yet
    for _ in range(3):
        plain.step()
        parked.step()
        before = [tensor.data_ptr() for tensor in parking.tensors()]
        assert len(before) == 2, "both moments, and not the step counter"
        parking.park()
        assert not {tensor.data_ptr() for tensor in parking.tensors()} & set(before), "they were moved"
        assert parking.parked
        parking.unpark()
    assert torch.equal(plain.weight, parked.weight)
    assert not parked.calls


def test_zero_1_and_2_are_moved_by_deepspeed_itself_and_zero_3_with_its_float32_share() -> None:
    sharded = FakeDeepSpeed()
    parking = Parking(sharded, 2, torch.device("cpu"))
    parking.park()
    parking.unpark()
    assert sharded.calls == [("offload", "optim_states", "hp_params"), ("reload",)]
    whole = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=SimpleNamespace(state={}), fp32_partitioned_groups_flat=[torch.ones(2)])
    )
    assert len(list(Parking(whole, 3, torch.device("cpu")).tensors())) == 1


# --- Transports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "placement", "means"),
    [
        ("auto", "cpu", "object_store"),
        ("auto", "colocated", "cuda_ipc"),
        ("auto", "separate", "broadcast"),
        ("object_store", "separate", "object_store"),
        ("broadcast", "cpu", "broadcast"),
    ],
)
def test_every_placement_has_its_transport(asked: str, placement: str, means: str) -> None:
    assert transports.choose(asked, placement) == means


@pytest.mark.parametrize(
    ("asked", "placement", "says"),
    [
        ("cuda_ipc", "cpu", "Use --cluster.transport object_store"),
        ("cuda_ipc", "separate", "Use --cluster.transport broadcast"),
        ("broadcast", "colocated", "NCCL takes one process per GPU"),
        ("pigeon", "cpu", "Choose one of: broadcast, cuda_ipc, object_store"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_in_the_plan(asked: str, placement: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        transports.choose(asked, placement)


class FakeLearner:
    """A rank with two weights, on a device of its own name."""

    settings = SimpleNamespace(lora_rank=0, lora_scaling=1.0)

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([7.0, 8.0])}

    def gathered(self, bucket_bytes: int, *, adapter_only: bool) -> Any:
        for item in self.weights.items():
            yield [item]


def opened(bucket: SharedBucket, name: str) -> dict[str, torch.Tensor]:
    flat = rollout_device.open_shared(torch.device("cpu"), bucket.handles[name])
    return {bucket.names[0]: flat.reshape(bucket.shapes[0]).clone()}


def test_handles_of_all_ranks_reach_every_engine_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    events: Events = []
    names = iter(["GPU-0", "GPU-1"] * 3)
    monkeypatch.setattr(learner_device, "identity", lambda device: next(names))
    ranks: list[Any] = []
    held: dict[str, dict[str, torch.Tensor]] = {}
    for rank in range(2):
        sharing = SharedBuckets(FakeLearner(), "float32", 1)  # type: ignore[arg-type]
        ranks.append(FakeActor(f"learner-{rank}", events, {"next_shared": sharing.next}))

    def load(gpu: str) -> Any:
        def take(bucket: SharedBucket) -> int:
            # As Ray would carry it to another process.
            held.setdefault(gpu, {}).update(opened(pickle.loads(pickle.dumps(bucket)), gpu))
            return 1

        return take

    engines = {f"engine-{i}": FakeActor(f"engine-{i}", events, {"load_shared": load(f"GPU-{i}")}) for i in range(2)}
    assert cuda_ipc.make().send(ranks, engines, "float32", 1.0) == 2
    for each in held.values():
        assert all(torch.equal(each[name], tensor) for name, tensor in FakeLearner().weights.items())
    verbs = [event[:2] for event in events]
    turn = [
        ("learner-0", "next_shared"),
        ("learner-1", "next_shared"),
        ("engine-0", "load_shared"),
        ("engine-1", "load_shared"),
    ]
    assert verbs[2:] == turn * 2 + turn[:2], "no rank goes on before every engine has its copy"


def test_ranks_that_disagree_about_a_bucket_are_noticed() -> None:
    one = SharedBucket(("a",), ((2,),), "float32", {"GPU-0": b""})
    with pytest.raises(ValueError, match="ranks share other tensors"):
        one.joined(dataclasses.replace(one, names=("b",)))


def test_every_device_of_every_engine_is_a_member_of_the_broadcast_group() -> None:
    events: Events = []
    learner = FakeActor("learner-0", events, {"free_port": ("host", 99)})
    engines = {f"engine-{i}": FakeActor(f"engine-{i}", events, {"devices": size}) for i, size in enumerate((2, 1, 4))}
    broadcast.make().connect([learner], engines, 1)
    assert [event for event in events if event[1] == "open_channel"] == [
        ("learner-0", "open_channel", "host", "99", "8", "1"),
        ("engine-0", "open_channel", "host", "99", "1", "8", "1"),
        ("engine-1", "open_channel", "host", "99", "3", "8", "1"),
        ("engine-2", "open_channel", "host", "99", "4", "8", "1"),
    ]


# --- Devices ----------------------------------------------------------------------------------------------------------


def test_what_follows_from_the_device_is_decided_in_one_file_per_half() -> None:
    assert rollout_device.environment("cpu")["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in rollout_device.environment("cuda")
    options = rollout_device.llm_options("cuda", kv_cache_gib=1.0, gpu_memory=0.4, sleeps=True)
    assert options == {"enable_chunked_prefill": True, "gpu_memory_utilization": 0.4, "enable_sleep_mode": True}
    assert (learner_device.collectives("cuda"), learner_device.local_rank("cuda", 5)) == ("nccl", 0)
    assert learner_device.operators_to_leave_out("cuda") == ()
    assert learner_device.attention("cuda", "float32") == learner_device.attention("cpu", "bfloat16") == "sdpa"


def test_no_other_file_asks_which_device_it_is() -> None:
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    asking = [
        f"{path.relative_to(root)}: {sign}"
        for half in ("rollout", "learner")
        for path in (root / half).rglob("*.py")
        for sign in ('"cuda"', "torch.cuda", '== "cpu"')
        if path.name != "device.py" and sign in path.read_text()
    ]
    assert not asking
