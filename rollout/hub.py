"""A model of the Hugging Face hub as a directory of this machine, so that no other process needs network or token."""

from __future__ import annotations

from pathlib import Path

from rollout.types import UserError

_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_NOT_WANTED = ("*/*", "consolidated*")
"""Copies of the weights in other formats, in folders or under Mistral's name."""


def on_this_machine(model: str) -> str:
    """A model directory as it is; for a hub id its snapshot in the hub's cache, fetched first where it is not there.

    UserError when it cannot be had: no such model, no network, one that asks for a token ($HF_TOKEN), or one without
    safetensors.
    """
    if Path(model).is_dir() or Path(model).is_absolute():
        return model
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(model, allow_patterns=list(_WANTED), ignore_patterns=list(_NOT_WANTED)))
    except Exception as error:  # a network has many, of proxies and certificates too, and no class for all of them
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--model {model}: it is no directory here, and cannot be fetched from the hub. {first}\n"
            f"  A model behind a licence needs a token in $HF_TOKEN; without a network, give a directory."
        ) from error
    if not any(found.glob("*.safetensors")):
        raise UserError(
            f"--model {model}: what the hub (or its cache here) has of it holds no *.safetensors.\n"
            f"  Give a model whose weights are safetensors files beside its config.json."
        )
    return str(found)
