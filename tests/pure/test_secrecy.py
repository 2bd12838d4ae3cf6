"""No secret of the environment gets into a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import PlanError
from cluster.run import cli
from cluster.run.metrics import EventLog
from cluster.run.secrecy import hidden, redacted, refuse_secrets, secrets_of

PLANTED = {"HF_TOKEN": "hf_planted0secret", "WANDB_API_KEY": "planted1secret", "HOME": "/root", "MY_KEY": "short"}


def test_secrets_are_known_by_the_names_of_their_variables() -> None:
    environment = PLANTED | {"TOKENIZERS_PARALLELISM": "false...", "RAY_AUTH_TOKEN_PATH": "/tmp/somewhere/token"}
    assert secrets_of(environment) == {"hf_planted0secret": "HF_TOKEN", "planted1secret": "WANDB_API_KEY"}


def test_processes_without_use_for_secrets_get_none_and_all_else() -> None:
    environment = PLANTED | {"TWIN_TOKEN": PLANTED["HF_TOKEN"], "RAY_AUTH_TOKEN": "planted2secret", "LANG": "C.UTF-8"}
    assert hidden(environment) == {"HF_TOKEN": "", "WANDB_API_KEY": "", "TWIN_TOKEN": ""}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "https://user:hf_planted0secret@huggingface.co/x/y"], "--model has the value of .HF_TOKEN"),
        (["--model", "https://oauth2:another@huggingface.co/x/y"], "--model has a user name or token in its URL"),
        (["--cluster.address", "ray://planted1secret.host:10001"], "--cluster.address has the value of .WANDB_API_KEY"),
    ],
)
def test_a_setting_with_a_secret_in_it_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        refuse_secrets(cli.fields(cli.parse(words)), PLANTED)


def test_ordinary_settings_pass() -> None:
    words = ["--model", "https://huggingface.co/x/y", "--reward", "mine.py:reward", "--run", "runs/me@home"]
    refuse_secrets(cli.fields(cli.parse(words)), PLANTED)


def test_texts_are_stripped_of_secrets() -> None:
    text = "401 for https://user:pass@host/x with hf_planted0secret"
    assert redacted(text, PLANTED) == "401 for https://<credentials>@host/x with <HF_TOKEN>"


def test_the_event_log_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted0secret")
    EventLog(tmp_path).append("lost", text="GET https://u:p@host?token=hf_planted0secret failed")
    written = (tmp_path / "events.jsonl").read_text()
    assert "hf_planted0secret" not in written
    assert "u:p" not in written
    assert "<HF_TOKEN>" in written
