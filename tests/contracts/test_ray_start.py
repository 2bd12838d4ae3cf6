"""Ray that does not come up is said in a sentence, with what to do, and leaves the signals as they were."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import ray

from cluster.errors import RemoteFailure
from cluster.model_facts import read_model_facts
from cluster.plan import make_plan
from cluster.ray_start import start_ray
from cluster.resources import local_resources
from cluster.run.config import Config
from cluster.run.folder import RunFolder


def test_ray_that_times_out_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    config = Config(rollouts=8)
    plan = make_plan(config, local_resources(), read_model_facts(config.model))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RemoteFailure, match=r"could not start on this machine: The current node timed out.*\n.*busy"):
        start_ray(config, plan, RunFolder.create(tmp_path / "run"), tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
