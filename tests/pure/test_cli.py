"""The command line and configuration files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import PlanError
from cluster.run.cli import apply_settings, as_toml, fields, parse
from cluster.run.config import Config

ROOT = Path(__file__).resolve().parents[2]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], capture_output=True, text=True, timeout=60)


def test_the_resolved_configuration_reads_back_to_itself(tmp_path: Path) -> None:
    config = apply_settings(
        Config(preset="r1"),
        {"learner.dual_clip": 11.0, "data.mix": 'a="1"\\', "rollouts": 64, "filter.overlong": True, "kl.kind": "k3"},
    )
    file = tmp_path / "config.toml"
    file.write_text(as_toml(config))
    assert parse(["--config", str(file)]) == config


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "dapo"\n[learner]\nclip_high = 0.5\nclip-low = 0.1\n[filter]\noverlong = false\n')
    config = parse(["--config", str(file), "--learner.clip-high", "0.9"])
    assert (config.learner.clip_high, config.learner.clip_low) == (0.9, 0.1)
    assert config.filter.dynamic_sampling
    assert not config.filter.overlong


def test_an_unknown_key_in_a_file_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text("[learner]\nlearning_rat = 1e-4\nclip_hihg = 0.3\n")
    with pytest.raises(PlanError, match=r"typo\.toml.*learner\.learning_rat"):
        parse(["--config", str(file)])
    file.write_text("[learner]\nclip_hihg = 0.3\n")
    with pytest.raises(PlanError, match=r"learner\.clip_high"):
        parse(["--config", str(file)])


def test_a_broken_or_missing_file_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        parse(["--config", str(tmp_path / "none.toml")])
    file = tmp_path / "broken.toml"
    file.write_text("rollouts = [")
    with pytest.raises(PlanError, match="not valid TOML"):
        parse(["--config", str(file)])


def test_the_flags_are_those_that_were_agreed() -> None:
    agreed = (ROOT / "tests" / "data" / "flags.txt").read_text().split()
    assert [name for name, _ in fields()] == agreed, "a flag was added, renamed or removed: change tests/data/flags.txt"
    assert len(agreed) <= 95


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rolouts", "8"], "--rollouts"),
        (["--rollouts", "many"], "rollouts"),
        (["--rollouts", "8", "--minibatches", "16"], "--minibatches 1"),
        (["trian"], "train"),
        (["plan", "--config", "none.toml"], "none.toml"),
    ],
)
def test_a_wrong_command_line_exits_2_without_a_traceback(words: list[str], said: str) -> None:
    done = launch(*words)
    assert done.returncode == 2
    assert said in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_help_and_plan_import_nothing_heavy() -> None:
    code = (
        "import sys; from cluster.run.commands import dispatch; dispatch(['plan'], lambda c: 0);"
        "heavy = {'torch', 'vllm', 'ray', 'deepspeed', 'transformers', 'pyarrow'};"
        "print(sorted({m.split('.')[0] for m in sys.modules} & heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_placement_may_be_said_without_its_section() -> None:
    assert parse(["--placement", "separate"]).cluster.placement == "separate"
    assert parse(["--placement=cpu"]).cluster.placement == "cpu"


def test_a_reader_that_goes_away_leaves_no_traceback():
    piped = f"{sys.executable} {ROOT / 'launch.py'} presets | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "0\n"
