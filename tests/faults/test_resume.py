"""A run that was killed anywhere and resumed ends as if nothing had happened: same weights, same metrics."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from cluster.run.journal import round_files
from tests.faults.leftovers import Leftovers
from tests.faults.runs import Ended, differences, launch, rows_of, salvaged_groups, state_of

SMALL = (
    "--rollouts", "64", "--rounds", "3", "--rollout.engines", "1", "--learner.ranks", "1", "--eval.size", "16",
    "--kl.kind", "k3_weighted", "--kl.ref-refresh-steps", "6", "--quiet",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    ended = launch(*SMALL, "--run", str(run))
    assert ended.code == 0, ended.text
    return run


def was_killed(ended: Ended) -> bool:
    return ended.code == -signal.SIGKILL


def test_a_run_stopped_in_every_round_and_resumed_is_the_same_run(undisturbed: Path, tmp_path: Path) -> None:
    run, leftovers = tmp_path / "stopped", Leftovers()
    around = leftovers.environment
    ended = launch(
        *SMALL, "--run", str(run), fault="sync.send:0:1:kill9", environment=around
    )  # updated, not yet published
    assert was_killed(ended), ended.text
    assert state_of(run)[0] == 0

    ended = launch("resume", str(run), fault="score@2:0:2:kill9", environment=around)  # half of the round is generated
    assert was_killed(ended), ended.text
    assert state_of(run)[0] == 1

    ended = launch("resume", str(run), fault="bwd@0:0:3:nan", environment=around)  # no step of the round is finite
    assert ended.code == 3, ended.text
    assert "3 optimizer steps were not finite" in ended.text
    assert f"resume {run}" in ended.text
    assert state_of(run)[0] == 2

    ended = launch("resume", str(run), fault="ckpt.latest:0:3:kill9", environment=around)  # renamed, not yet named
    assert was_killed(ended), ended.text
    assert state_of(run)[0] == 2

    ended = launch("resume", str(run), environment=around)
    assert ended.code == 0, ended.text
    assert salvaged_groups(run) == [4, 2, 4, 4]
    assert differences(rows_of(undisturbed), rows_of(run)) == []
    assert state_of(run) == state_of(undisturbed)
    assert (run / "model/model.safetensors").read_bytes() == (undisturbed / "model/model.safetensors").read_bytes()
    assert list(round_files(run)) == [1, 2, 3]
    assert all(file.suffix == ".parquet" for file in round_files(run).values())
    assert not list((run / "checkpoints").glob(".tmp-*"))
    assert leftovers.found() == []


@pytest.mark.slow
def test_a_full_disk_costs_one_checkpoint_and_a_finished_run_goes_on_when_it_is_given_more_rounds(
    undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "longer"
    first = launch(*SMALL, "--run", str(run), "--rounds", "2", fault="ckpt.shard:0:1:enospc")
    assert first.code == 0, first.text
    assert "No space left on device" in first.text
    assert "the next round tries again" in first.text
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["LATEST", "round-00000", "round-00002"]
    more = launch("resume", str(run), "--rounds", "3")
    assert more.code == 0, more.text
    assert state_of(run) == state_of(undisturbed)
    assert differences(rows_of(undisturbed), rows_of(run)) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--learner.lr", "0.1"), "--learner.lr 0.0002 -> 0.1|--learner.lr None -> 0.1"),
        (("--rollouts", "128"), "--rollouts 64 -> 128"),
        (("--group-size", "8"), "--group-size None -> 8"),
        (("--learner.ranks", "2"), "written by 1 learner rank.*this machine would use 2"),
        (("--rounds", "2"), "already committed 3 rounds"),
        (("--seed", "1"), "--seed 0 -> 1"),
        (("--run", "elsewhere"), "no --run"),
    ],
)
def test_a_resume_that_would_not_be_the_same_run_is_refused(
    words: tuple[str, ...], why: str, undisturbed: Path
) -> None:
    before = state_of(undisturbed)
    ended = launch("resume", str(undisturbed), *words)
    assert ended.code == 2
    assert re.search(why, ended.text), ended.text
    assert "Traceback" not in ended.text
    assert state_of(undisturbed) == before
