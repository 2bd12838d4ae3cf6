"""The comparison of receipts with what the learner sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster import weight_sync
from cluster.errors import BrokenPromise
from cluster.waiting import ActorLost
from cluster.weight_sync import compare, make_probe
from rollout.types import Probe, Receipt

SENT = {"model.embed_tokens.weight": "aa", "lm_head.weight": "aa", "model.norm.weight": "bb"}


def receipt(digests: dict[str, str] = SENT, *, version: int = 3, cache_reset: bool = True) -> dict[str, Receipt]:
    return {"engine-1": Receipt(1, version, digests, cache_reset, 0.1)}


def test_an_equal_receipt_is_accepted() -> None:
    compare(SENT, receipt(), 3)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (receipt(SENT | {"lm_head.weight": "old"}), r"different: lm_head\.weight"),
        (receipt({name: "old" for name in SENT}), "did not reach the engine"),
        (receipt({"lm_head.weight": "aa", "model.norm.weight": "bb"}), r"not found.*model\.embed_tokens\.weight"),
        (receipt(version=2), "version 2"),
        (receipt(cache_reset=False), "prefix cache"),
    ],
)
def test_a_difference_names_the_engine_and_the_tensors(got: dict[str, Receipt], said: str) -> None:
    with pytest.raises(BrokenPromise, match=said) as broken:
        compare(SENT, got, 3)
    assert "engine-1" in str(broken.value)


def test_the_probe_looks_at_other_columns_at_every_version() -> None:
    shapes = {"a.weight": (10, 64), "b.weight": (64,)}
    probes = [make_probe(shapes, version, "float32").columns["a.weight"] for version in range(40)]
    assert set(np.concatenate(probes).tolist()) == set(range(64))
    assert len(make_probe(shapes, 0, "float32").columns["b.weight"]) == 0


def test_a_digest_sees_one_changed_value_and_ignores_the_sign_of_zero() -> None:
    values = np.array([[1.0, 0.0], [2.0, 3.0]], dtype=np.float32)
    changed = values.copy()
    changed[1, 1] = np.nextafter(np.float32(3), np.float32(4))
    assert Probe.digest(values) == Probe.digest(np.array([[1.0, -0.0], [2.0, 3.0]], dtype=np.float32))
    assert Probe.digest(values) != Probe.digest(changed)


@pytest.mark.parametrize(("gone", "named"), [("learner-1", "learner-1"), (None, "engine-0")])
def test_a_rank_that_died_is_named_and_not_the_engine_that_waited_for_its_weights(
    gone: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> int:
        raise ActorLost("engine-0", "raised there: an argument cannot be had")

    monkeypatch.setattr(weight_sync, "fetch_all", lambda calls, seconds, what: dict(calls))
    monkeypatch.setattr(weight_sync, "dead_among", lambda calls, seconds: gone)
    actor: Any = SimpleNamespace(usage=SimpleNamespace(remote=int), begin_load=SimpleNamespace(remote=int))
    transport: Any = SimpleNamespace(send=lost)
    with pytest.raises(ActorLost) as raised:
        weight_sync.sync_weights([actor, actor], {"engine-0": actor}, transport, {}, 1, "float32", 1.0, 1.0)
    assert raised.value.name == named
    assert "an argument cannot be had" in str(raised.value)


def test_an_engine_that_does_not_open_a_sync_is_silent_long_before_a_sync_may_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was frozen while others did its work hangs here: it must not hold the run up for a whole sync's time."""
    waited: dict[str, float] = {}

    def fetch(calls: dict[str, object], seconds: float, what: str) -> dict[str, object]:
        waited[what] = seconds
        raise ActorLost("engine-0", what, hung=True)

    monkeypatch.setattr(weight_sync, "fetch_all", fetch)
    actor: Any = SimpleNamespace(begin_load=SimpleNamespace(remote=int))
    with pytest.raises(ActorLost):
        weight_sync.sync_weights([], {"engine-0": actor}, SimpleNamespace(), {}, 1, "float32", 600.0, 15.0)
    assert waited == {"opening the weight sync": 15.0}
