"""Every command of the README is one that works as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import launch

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r"^(?:\./setup\.sh && )?python launch\.py (.*)$", (ROOT / "README.md").read_text(), re.M)
OTHER = {"plan", "presets", "bench", "resume", "eval", "report", "doctor", "check-reward", "export", "lesson"}


def test_the_readme_has_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "./setup.sh && python launch.py --rollouts 8192 --minibatches 16\n" in text
    assert "./setup.sh test && .venv/bin/python -m pytest\n" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command, comments=True)
    if words[0] in OTHER - {"plan", "presets"}:
        # These need a run or take minutes: their flags are read, nothing is started.
        words = [words[0], "--help"]
    elif words[0] not in OTHER:
        model, prompts = tmp_path / "model", tmp_path / "questions.jsonl"
        model.mkdir()
        (model / "config.json").write_text('{"vocab_size": 128, "max_position_embeddings": 4096}')
        prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
        here = {"path/to/model": str(model), "questions.jsonl": str(prompts)}
        words = ["plan", *(here.get(word, word) for word in words)]
    monkeypatch.chdir(tmp_path)
    assert exit_code(words) == 0, capsys.readouterr().err
    assert len(capsys.readouterr().out.splitlines()) > 4


def exit_code(words: list[str]) -> object:
    """How a command line ends; `--help` leaves by SystemExit."""
    try:
        return launch.main(words)
    except SystemExit as end:
        return end.code or 0
