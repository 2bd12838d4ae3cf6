"""Memory and time of a run before it is started: the arithmetic, by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import PlanError
from cluster.planner import memory, timing
from cluster.planner.architecture import Architecture, architecture_of, read_architecture
from cluster.planner.devices import ALIASES, DEVICES, device_named
from cluster.planner.memory import EngineShape, RankShape
from cluster.planner.search import best, closest, ways_to_fit
from cluster.planner.split import Cluster, Split, estimate
from cluster.planner.timing import Decoding, Pool
from cluster.planner.work import Work
from cluster.resources import Resources
from cluster.run import planning
from cluster.run.cli import parse

MODELS = Path(__file__).parents[1] / "data" / "models"
QWEN_7B, LLAMA_70B, QWEN_SMALL = (str(MODELS / name) for name in ("qwen2.5-7b", "llama-3.1-70b", "qwen3-0.6b"))
GIB = 1 << 30

TINY = Architecture(
    family="qwen3",
    layers=2,
    hidden=64,
    intermediate=192,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=128,
    tied=True,
    qk_norm=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)
RANK = RankShape(
    ranks=1, zero_stage=0, size=4, microbatch_tokens=1000, checkpointing=False, reference=False, on_gpu=False
)
R1 = Work(
    prompts=512,
    group_size=16,
    minibatches=16,
    prompt_tokens=256,
    response_tokens=2048,
    longest=4096,
    longest_row=5120,
    microbatch_tokens=16384,
    max_num_seqs=1024,
    old_logprobs=True,
    reference=False,
)


def config(name: str) -> dict[str, Any]:
    return dict(json.loads((MODELS / name / "config.json").read_text()))


@pytest.mark.parametrize(
    ("directory", "parameters", "kv_bytes"),
    [
        # as counted in the published safetensors files
        (QWEN_7B, 7_615_616_512, 57_344),
        (LLAMA_70B, 70_553_706_496, 327_680),
        (QWEN_SMALL, 596_049_920, 114_688),
    ],
)
def test_parameters_and_cache_of_known_models(directory: str, parameters: int, kv_bytes: int) -> None:
    model = read_architecture(directory)
    assert model.parameters == parameters
    assert model.kv_bytes(2) == kv_bytes


def test_the_demo_has_as_many_parameters_as_its_file_has_numbers() -> None:
    demo = Path(__file__).parents[2] / "rollout" / "tasks" / "demo"
    size = (demo / "model.safetensors").stat().st_size
    header = int.from_bytes((demo / "model.safetensors").read_bytes()[:8], "little") + 8
    assert read_architecture(str(demo)).parameters * 4 == size - header


def test_biases_count() -> None:
    llama = config("llama-3.1-70b")
    plain, biased = architecture_of(llama, "here"), architecture_of(llama | {"attention_bias": True}, "here")
    assert biased.layer_parameters - plain.layer_parameters == 8192 + 2 * 1024 + 8192
    biased = architecture_of(llama | {"mlp_bias": True}, "here")
    assert biased.layer_parameters - plain.layer_parameters == 2 * 28672 + 8192


def test_operations_of_a_forward_pass() -> None:
    # two layers of 64 x (128 + 2 x 64) + 128 x 64 + 3 x 64 x 192 = 61,440 numbers, each 2 operations per token
    assert TINY.layer_matrix == 61_440
    # ten tokens that attend to 5.5 each: 4 operations per query channel; three of them through 128 x 64 of output
    assert TINY.forward_flops(10, 5.5, scored=3) == 2 * 2 * 61_440 * 10 + 4 * 2 * 128 * 5.5 * 10 + 2 * 128 * 64 * 3
    assert TINY.forward_flops(10, 5.5) == TINY.forward_flops(10, 5.5, scored=10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 128}, "mixture of experts"),
        ({"model_type": "qwen3_moe"}, "mixture of experts"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_model_whose_arithmetic_is_not_known_is_refused(change: dict[str, Any], said: str) -> None:
    broken = {key: value for key, value in (config("qwen3-0.6b") | change).items() if value is not None}
    with pytest.raises(PlanError, match=said):
        architecture_of(broken, "here")


@pytest.mark.parametrize(
    ("family", "size", "measured"),
    [("qwen3", 4, 7728), ("qwen3", 2, 4528), ("llama", 4, 6168), ("llama", 2, 3352)],
)
def test_a_layer_keeps_what_autograd_was_seen_to_save(family: str, size: int, measured: int) -> None:
    # counted with torch.autograd.graph.saved_tensors_hooks on transformers' models of this shape
    model = dataclasses.replace(TINY, family=family, qk_norm=family == "qwen3")
    assert memory.layer_activation_bytes(model, size) == measured


def test_state_of_a_rank_by_stage() -> None:
    p = TINY.parameters

    def state(**change: Any) -> dict[str, int]:
        return memory.state_bytes(TINY, dataclasses.replace(RANK, **change))

    assert state() == {"weights": 4 * p, "gradients": 4 * p, "optimizer": 8 * p, "step": 0}
    assert state(ranks=2) == {"weights": 4 * p, "gradients": 4 * p, "optimizer": 8 * p, "step": 4 * p}
    assert state(size=2) == {"weights": 2 * p, "gradients": 2 * p, "optimizer": 12 * p, "step": 4 * p}
    quarter = -(-p // 4)
    assert state(size=2, ranks=4, zero_stage=1)["optimizer"] == 12 * quarter
    assert state(size=2, ranks=4, zero_stage=2)["gradients"] == 2 * quarter + 2 * p
    assert state(size=2, ranks=4, zero_stage=3)["weights"] == 2 * quarter + 2 * p
    assert state(size=2, ranks=4, zero_stage=3, offload=True)["optimizer"] == 0
    assert memory.host_bytes(TINY, dataclasses.replace(RANK, ranks=4, zero_stage=3, offload=True)) == 16 * quarter


def test_zero_3_of_a_large_model_keeps_a_share_and_what_is_gathered() -> None:
    model = read_architecture(LLAMA_70B)
    shape = dataclasses.replace(RANK, ranks=64, zero_stage=3, size=2)
    state = memory.state_bytes(model, shape)
    share = -(-70_553_706_496 // 64)
    assert state["weights"] == 2 * share + 2 * 1_000_000_000
    assert state["gradients"] == 2 * share + 2 * 500_000_000
    assert state["optimizer"] == 12 * share


def test_an_adapter_is_all_that_has_gradients_and_an_optimizer_state() -> None:
    adapter = TINY.adapter(8)
    # q, k, v, o of 64 x 128, 64 x 64, 64 x 64, 128 x 64; gate, up, down of 64 x 192
    assert adapter == 2 * 8 * (2 * (64 + 128) + 2 * (64 + 64) + 3 * (64 + 192))
    state = memory.state_bytes(TINY, dataclasses.replace(RANK, adapter=adapter))
    weights = 4 * (TINY.parameters + adapter)
    assert state == {"weights": weights, "gradients": 4 * adapter, "optimizer": 8 * adapter, "step": 0}
    parts = dict(memory.rank_memory(TINY, dataclasses.replace(RANK, adapter=adapter, reference=True)).parts)
    assert "reference" not in parts  # the frozen model underneath is the reference


def test_memory_of_a_rank_adds_up() -> None:
    found = memory.rank_memory(TINY, RANK)
    p = TINY.parameters
    activations = 1000 * (2 * 7728 + 4 * (2 * 192 + 2 * 64) + 64 * 12 + 20)
    logits = 1000 * 128 * 16
    assert dict(found.parts) == {
        "libraries": memory.CPU_RANK_LIBRARIES,
        "weights": 4 * p,
        "optimizer": 8 * p,
        "gradients": 4 * p,
        "activations": activations,
        "logits": logits,
    }
    assert found.peak == memory.CPU_RANK_LIBRARIES + 16 * p + activations + logits
    assert found.held == memory.CPU_RANK_LIBRARIES + 12 * p
    with_reference = memory.rank_memory(TINY, dataclasses.replace(RANK, reference=True))
    assert with_reference.peak == found.peak + 4 * p


def test_recomputing_keeps_one_layer_and_the_input_of_each() -> None:
    whole = memory.activation_bytes(TINY, RANK)
    thrifty = memory.activation_bytes(TINY, dataclasses.replace(RANK, checkpointing=True))
    assert whole - thrifty == 1000 * (2 * 7728 - (2 * 4 * 64 + 7728))


def test_no_more_logits_than_a_chunk() -> None:
    model = read_architecture(QWEN_7B)
    shape = dataclasses.replace(RANK, size=2, microbatch_tokens=16384)
    assert memory.logit_bytes(model, shape) == (1 << 24) * (16 + 2)
    small = dataclasses.replace(shape, microbatch_tokens=10)
    assert memory.logit_bytes(model, small) == 10 * 152064 * 18


def test_memory_of_an_engine_adds_up() -> None:
    model = read_architecture(QWEN_7B)
    shape = EngineShape(tensor_parallel=2, size=2, responses=100, kv_tokens=1000, on_gpu=True)
    found = dict(memory.engine_memory(model, shape).parts)
    assert found["weights"] == 7_615_616_512
    assert found["KV cache"] == 1000 * 57_344 // 2
    assert found["logits"] == 100 * 152064 * 12
    assert found["activations"] == 16384 * 2 * (3 * 9472 + 4 * 3584)


def test_too_few_key_value_heads_are_copied() -> None:
    model = read_architecture(QWEN_7B)  # 4 key/value heads
    eight = EngineShape(tensor_parallel=8, size=2, responses=1, kv_tokens=0, on_gpu=True)
    assert memory.kv_bytes_per_device(model, eight) == 2 * 28 * 128 * 2


def test_a_tied_output_layer_is_packed_apart_on_a_cpu() -> None:
    shape = EngineShape(tensor_parallel=1, size=4, responses=1, kv_tokens=0, on_gpu=False)
    assert dict(memory.engine_memory(TINY, shape).parts)["weights"] == 4 * (TINY.parameters + 128 * 64)


def test_room_for_the_cache_is_what_is_left() -> None:
    model = read_architecture(QWEN_7B)
    shape = EngineShape(tensor_parallel=1, size=2, responses=256, kv_tokens=0, on_gpu=True)
    fixed = memory.engine_memory(model, shape).peak
    assert memory.kv_room(model, shape, fixed + 57_344 * 1234 + 1) == 1234
    assert memory.kv_room(model, shape, fixed - 1) == 0


def test_devices_are_found_by_their_names() -> None:
    for device in DEVICES:
        assert device_named(device.name.upper()) is device
        assert device.memory > 20 * GIB
        assert device.source
    for alias, name in ALIASES.items():
        assert device_named(alias).name == name
    with pytest.raises(PlanError, match="Perhaps you meant h100"):
        device_named("h1000")


def test_a_step_of_an_engine() -> None:
    cost = Decoding(host=0.004, host_response=1e-5, weights=0.006, context=1e-8, compute=1e-5, between=0.001, sent=2e-6)
    # 100 responses that look back on 1000 tokens: 6 ms of weights and 1 ms of cache against 1 ms of FLOPs
    assert cost.seconds(100, 1000) == pytest.approx(0.004 + 0.001 + 0.001 + 0.0002 + 0.006 + 0.001)
    # 1000 that look back on nothing: 10 ms of FLOPs against 6 ms of weights
    assert cost.seconds(1000, 0) == pytest.approx(0.004 + 0.01 + 0.001 + 0.002 + 0.01)
    assert max(cost.parts(1000, 0), key=cost.parts(1000, 0).__getitem__) == "what the engine does beside the GPU's work"


def test_weights_are_read_once_per_step() -> None:
    model, device = read_architecture(QWEN_7B), device_named("h100")
    cost = timing.decoding(model, device, 2, kv_bytes=28_672)
    assert cost.weights == pytest.approx(2 * (7_615_616_512 - 152064 * 3584) / 2 / (3.35e12 * timing.READING))
    assert cost.context == pytest.approx(28_672 / (3.35e12 * timing.READING))


def test_generation_takes_as_many_steps_as_its_longest_response_or_its_turns() -> None:
    model, device = read_architecture(QWEN_7B), device_named("h100")
    cost = Decoding(host=0.01, host_response=0, weights=0, context=0, compute=0)
    work = dataclasses.replace(R1, prompt_tokens=0)
    # 8192 responses of 2048 tokens on 8 engines, 256 at once: 4 turns of 2048 steps
    assert timing.generate(model, device, work, 8, cost, room=256).seconds == pytest.approx(8192 * 0.01)
    # all 1024 at once: the longest response decides
    assert timing.generate(model, device, work, 8, cost, room=5000).seconds == pytest.approx(4096 * 0.01)


def test_learning_is_operations_over_what_the_ranks_can_do() -> None:
    model, device = read_architecture(QWEN_7B), device_named("h100")
    rows = 8192 * (256 + 2048)
    operations = model.forward_flops(rows, 1152, scored=8192 * 2048)
    once = operations * timing.PADDING / (8 * 989.4e12 * timing.TRAINING)
    assert timing.pass_seconds(model, device, R1, 8) == pytest.approx(once)
    phases = timing.learn(model, device, R1, Pool(8, 1, 8), zero_stage=1, checkpointing=False, offload=False)
    assert [phase.name for phase in phases] == ["old log-probs", "learn", "optimizer"]
    microbatches = rows * timing.PADDING / 8 / 16384
    assert phases[1].seconds == pytest.approx(3 * once + 3 * microbatches * timing.MICROBATCH)
    assert phases[0].seconds == pytest.approx(15 / 16 * (once + microbatches * timing.MICROBATCH))
    assert phases[1].bound == "FLOPs"


def test_a_round_overlaps_as_its_schedule_says() -> None:
    model, cluster = read_architecture(QWEN_7B), Cluster(device_named("h100"), 8, 8)
    split = Split("separate", "streamed", 4, 1, 4, 3, True, False, 4096)
    streamed = estimate(model, R1, cluster, split)
    times = {phase.name: phase.seconds for phase in streamed.phases}
    generate, learn = times["generate"], times["learn"] + times["optimizer"]
    assert "old log-probs" not in times
    expected = times["sync"] + max(generate + learn / 16, generate / 16 + learn)
    assert streamed.seconds == pytest.approx(expected)
    overlapped = estimate(model, R1, cluster, dataclasses.replace(split, schedule="async"))
    times = {phase.name: phase.seconds for phase in overlapped.phases}
    learn = times["old log-probs"] + times["learn"] + times["optimizer"]
    assert overlapped.seconds == pytest.approx(times["sync"] + max(times["generate"], learn))


@pytest.mark.parametrize(("directory", "gpus"), [(QWEN_7B, 8), (LLAMA_70B, 64)])
def test_the_best_split_fits_and_uses_the_gpus(directory: str, gpus: int) -> None:
    found = best(read_architecture(directory), R1, Cluster(device_named("h100"), gpus, 8))
    assert found is not None
    assert not found.shortfalls
    used = found.split.engines * found.split.tensor_parallel
    used = max(used, found.split.ranks) if found.split.placement == "colocated" else used + found.split.ranks
    assert used == gpus
    assert found.rank.peak < 79.6 * GIB
    assert found.kv_tokens > R1.longest_row


def test_what_cannot_fit_says_what_is_missing_and_the_nearest_that_does() -> None:
    model, cluster = read_architecture(LLAMA_70B), Cluster(device_named("a100-40gb"), 4, 8)
    assert best(model, R1, cluster) is None
    nearest = closest(model, R1, cluster)
    assert nearest is not None
    assert nearest.missing > 0
    assert any("GiB" in said for said in nearest.shortfalls)
    ways = ways_to_fit(model, R1, cluster)
    assert ways
    assert "x a100-40gb" in ways[0].what
    gpus = int(ways[0].what.split()[0])
    assert best(model, R1, dataclasses.replace(cluster, gpus=gpus)) is not None


def test_plan_shows_the_capacity_of_named_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", QWEN_7B, "--gpu", "h100", "--gpus", "8", "--rollout.max-new-tokens", "4096"]
    assert planning.main(words) == 0
    said = capsys.readouterr().out
    for part in ("7,615,616,512", "as asked", "missing", "to type", "--learner.zero-stage", "limit"):
        assert part in said


def test_plan_of_what_does_not_fit_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", LLAMA_70B, "--gpu", "4090", "--gpus", "2", "--rollout.max-new-tokens", "4096"]
    assert planning.main(words) == 2
    said = capsys.readouterr().out
    assert "no split of these GPUs fits" in said
    assert "fits with" in said


def test_plan_of_experts_is_refused() -> None:
    with pytest.raises(PlanError, match="mixture of experts"):
        planning.main(["--model", str(MODELS / "qwen3-30b-a3b"), "--gpu", "h100"])


def test_gpus_without_a_kind_are_refused() -> None:
    with pytest.raises(PlanError, match="Add --gpu"):
        planning.main(["--gpus", "16"])


def test_the_gpus_of_this_machine_are_planned_for_when_they_are_in_the_table() -> None:
    config, eight = parse([]), Resources(cpus=96, gpus=8, memory=1 << 40)
    found = planning._local_cluster(config, eight, lambda: "NVIDIA H100 80GB HBM3")
    assert found == Cluster(device_named("h100"), 8, 8)
    assert planning._local_cluster(config, eight, lambda: "some other GPU") is None
    assert planning._local_cluster(config, Resources(cpus=2, gpus=0, memory=1 << 34), lambda: "NVIDIA L4") is None
    assert planning._local_cluster(parse(["--cluster.placement", "cpu"]), eight, lambda: "NVIDIA L4") is None


def test_a_model_that_is_not_known_here_can_still_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 128, "max_position_embeddings": 4096}')
    assert planning.main(["--model", str(tmp_path), "--simulate"]) == 0
    assert "not worked out" in capsys.readouterr().out
