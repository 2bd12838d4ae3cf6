"""How fast a round was: shares of idle time and of the devices' peak, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.flops import generation_flops, scoring_flops
from cluster.planner.architecture import architecture_of
from cluster.planner.devices import DEVICES, device_called
from cluster.run.metric_table import metric_doc
from cluster.run.speed import Machine, Work, idle_shares, known_machine, tokens_per_second, utilisation
from tests.pure.scored_groups import scored_group

CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 20, "vocab_size": 50,
}  # fmt: skip
SHAPE = architecture_of(CONFIG, "here")
MACHINE = Machine(SHAPE, engines=1e6, ranks=2e6, step_passes=3)
ROW = {"time/generate": 2.0, "time/learn": 4.0, "time/round": 8.0, "tokens/generated": 100, "policy/tokens": 80}


def test_idle_is_what_is_left_of_the_time_between_two_moments() -> None:
    before = Work(100.0, {"engine-0": 5.0, "engine-1": 5.0, "learner-0": 1.0})
    after = Work(110.0, {"engine-0": 9.0, "engine-1": 7.0, "learner-0": 6.0})
    assert idle_shares(before, after) == {"time/engines_idle": pytest.approx(0.7), "time/ranks_idle": 0.5}


def test_a_process_that_was_replaced_in_between_is_left_out() -> None:
    before = Work(100.0, {"engine-0": 50.0, "engine-1": 5.0, "learner-0": 1.0})
    after = Work(110.0, {"engine-0": 2.0, "engine-1": 7.0, "learner-1": 6.0})
    assert idle_shares(before, after) == {"time/engines_idle": pytest.approx(0.8)}
    assert idle_shares(None, after) == {}
    assert idle_shares(before, None) == {}


def test_tokens_per_second_of_phases_that_were_there() -> None:
    speeds = {"time/generate_tokens_per_s": 50.0, "time/learn_tokens_per_s": 20.0, "time/tokens_per_s": 12.5}
    assert tokens_per_second(ROW) == speeds
    assert tokens_per_second({"tokens/generated": 5, "time/generate": 0.0}) == {}


def test_utilisation_counts_what_was_read_and_trained() -> None:
    groups = [scored_group("a", minibatch=0, seed=1), scored_group("b", minibatch=1, seed=2)]
    lengths = np.concatenate([scored.group.lengths for scored in groups])
    advantages = np.array([1.0, -1.0, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0])  # nothing to learn from the second group
    made = generation_flops(SHAPE, [7, 7], lengths, 4)
    first, both = scoring_flops(SHAPE, [7] * 4, lengths[:4]), scoring_flops(SHAPE, [7] * 8, lengths)
    plain = utilisation(ROW, MACHINE, groups, advantages, reference=False, recomputed=True)
    assert plain == {"time/generate_mfu": made / 2e6, "time/learn_mfu": pytest.approx(3 * first / 8e6)}
    with_kl = utilisation(ROW, MACHINE, groups, advantages, reference=True, recomputed=True)
    assert with_kl["time/learn_mfu"] == pytest.approx((4 * both + (both - first)) / 8e6)


def test_the_peak_is_that_of_all_devices_of_a_kind_in_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    gpus = {"engine-0": "NVIDIA H200", "engine-1": "NVIDIA H200", "learner-0": "NVIDIA L4"}

    def machine(**given: Any) -> Machine | None:
        usual: dict[str, Any] = {
            "engine_dtype": "bfloat16",
            "learner_dtype": "bfloat16",
            "tensor_parallel": 2,
            "adapter": False,
        }
        return known_machine(str(tmp_path), given.pop("gpus", gpus), **usual | given)

    known = machine()
    assert known is not None
    assert (known.engines, known.ranks, known.step_passes) == (4 * 989.4e12, 121e12, 3)
    assert machine(adapter=True).step_passes == 2  # type: ignore[union-attr]
    assert machine(engine_dtype="float32").engines is None  # type: ignore[union-attr]
    assert machine(gpus=gpus | {"learner-1": "another"}).ranks is None  # type: ignore[union-attr]
    assert machine(gpus={"engine-0": "", "learner-0": ""}) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "mamba"}))
    assert machine() is None


def test_where_the_peak_is_not_known_the_metric_is_absent() -> None:
    assert utilisation(ROW, None, [scored_group()], np.ones(4), reference=False, recomputed=True) == {}
    assert utilisation({}, MACHINE, [scored_group()], np.ones(4), reference=False, recomputed=True) == {}
    assert utilisation(ROW, MACHINE, [], np.empty(0), reference=False, recomputed=True) == {}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_a_gpu_is_found_under_the_name_that_its_driver_gives_it(name: str, device: str) -> None:
    found = device_called(name)
    assert found is not None
    assert found.name == device


@pytest.mark.parametrize("name", ["", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300X"])
def test_a_gpu_that_is_not_in_the_table_is_not_taken_for_another(name: str) -> None:
    assert device_called(name) is None


def test_every_device_of_the_table_has_a_driver_name() -> None:
    from cluster.planner.devices import DRIVER_NAMES

    assert set(DRIVER_NAMES.values()) == {device.name for device in DEVICES}


def test_all_of_it_is_documented_and_left_out_where_runs_are_compared() -> None:
    names = [
        *("time/engines_idle", "time/ranks_idle", "time/generate_tokens_per_s", "time/learn_tokens_per_s"),
        *("time/tokens_per_s", "time/generate_mfu", "time/learn_mfu", "time/watch"),
    ]
    assert [name for name in names if metric_doc(name) is None] == []
