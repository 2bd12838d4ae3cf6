"""What an engine takes for a response: whole, with the log-prob of every sampled token, found by its id."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.actors import forget_foreign
from rollout.engine import EngineFault, RolloutEngine
from tests.pure.fake_engines import request


def engine() -> Any:
    """The part of an engine that reads vLLM's outputs; there is no vLLM behind it."""
    bare: Any = RolloutEngine.__new__(RolloutEngine)
    bare.settings, bare.version = SimpleNamespace(index=1), 3
    bare._tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: ["text"] * len(ids))
    return bare


def response(index: int, ids: list[int], logprobs: list[float], reason: str = "stop", seen: Any = None) -> Any:
    flat = SimpleNamespace(logprobs=logprobs, token_ids=ids if seen is None else seen)
    return SimpleNamespace(index=index, token_ids=ids, logprobs=flat, finish_reason=reason)


def test_responses_are_taken_in_their_order_with_the_version_that_made_them() -> None:
    asked = request(7, size=2)
    output = SimpleNamespace(outputs=[response(1, [5], [-0.5], "length"), response(0, [3, 4], [-0.1, -0.2])])
    group = engine()._group(asked, output)
    assert group.token_ids.tolist() == [3, 4, 5]
    np.testing.assert_allclose(group.sampler_logprobs, [-0.1, -0.2, -0.5], rtol=1e-6)
    assert group.lengths.tolist() == [2, 1]
    assert group.finished.tolist() == [True, False]
    assert (group.weights_version, group.engine, group.request) == (3, 1, asked)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (response(0, [3, 4], [-0.1, float("nan")]), "row-7 response 0 has a log-prob that is not finite"),
        (response(0, [3, 4], [-0.1, float("-inf")]), "not finite"),
        (response(0, [3, 4], [-0.1, 0.5]), "above 0"),
        (response(0, [3, 4], [-0.1]), "log-probs are missing for row row-7"),
        (response(0, [3, 4], [-0.1, -0.2], seen=[3, 9]), "log-probs are missing"),
        (SimpleNamespace(index=0, token_ids=[3], logprobs=None, finish_reason="stop"), "log-probs are missing"),
        (response(0, [3, 4], [-0.1, -0.2], "abort"), "row-7 response 0 was broken off .abort."),
    ],
)
def test_an_unsound_response_is_a_fault_of_the_engine_and_says_which_group(broken: Any, said: str) -> None:
    """trl#6166, trl#3867 (the id decides, not the place), whitecircle/halo#8 (a fragment is no response)."""
    with pytest.raises(EngineFault, match=said) as raised:
        engine()._group(request(7, size=1), SimpleNamespace(outputs=[broken]))
    assert raised.value.key == ("row-7", 0)


def test_ports_and_ranks_of_the_environment_are_not_used_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """vllm#43206: every engine would take the same port."""
    environment = {"VLLM_PORT": "5000", "MASTER_PORT": "29500", "HOME": "/root"}
    forget_foreign(environment)
    assert environment == {"HOME": "/root"}
    assert "VLLM_PORT=5000 from the environment is not used" in capsys.readouterr().err
