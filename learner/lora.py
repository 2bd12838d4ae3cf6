"""LoRA through peft: small trainable matrices beside frozen linear layers, by the names the engines know them by.

A layer computes `W x + scaling B A x`. Engines are sent A and `scaling B`, so what they hold is what they compute with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

NAME = "default"  # peft's name for the one adapter
FOLDER = "adapter"
"""Where an exported model keeps the adapter by itself."""


def insert_adapter(model: Any, rank: int, alpha: float) -> None:
    """Freeze the model and put an adapter on every linear layer but the output layer (in place).

    B starts at 0; A is drawn, the same for every run and rank, as the model's own weights are.
    """
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(_config(rank, alpha), model)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """The frozen model underneath, for as long as the block lasts."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def public_name(name: str) -> str:
    """Name of a parameter as in the model's own checkpoint, or `<layer>.lora_A.weight` / `<layer>.lora_B.weight`."""
    return name.replace(".base_layer.", ".").replace(f".{NAME}.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter (either name) belongs to the adapter."""
    return ".lora_A." in name or ".lora_B." in name


def as_sent(name: str, tensor: torch.Tensor, scaling: float) -> torch.Tensor:
    """The tensor as engines hold it: B carries the scaling (computed in float32)."""
    return (tensor.float() * scaling) if ".lora_B." in name else tensor


def merged(named: Iterable[tuple[str, torch.Tensor]], scaling: float) -> dict[str, torch.Tensor]:
    """All weights of the model with `scaling B A` added to W (in float32), under the names of its own checkpoint."""
    found = {public_name(name): tensor for name, tensor in named}
    whole = {name: tensor for name, tensor in found.items() if not is_adapter(name)}
    for name in found:
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            weight = whole[f"{layer}.weight"]
            delta = found[f"{layer}.lora_B.weight"].float() @ found[name].float()
            whole[f"{layer}.weight"] = (weight.float() + scaling * delta).to(weight.dtype)
    return whole


def save_adapter(
    named: Iterable[tuple[str, torch.Tensor]], rank: int, alpha: float, base: str, directory: Path
) -> None:
    """Write the adapter as peft does (`PeftModel.from_pretrained(base_model, directory)` loads it)."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    found = {public_name(name): tensor.cpu().contiguous() for name, tensor in named if is_adapter(name)}
    save_file({f"base_model.model.{name}": tensor for name, tensor in found.items()}, directory / SAFETENSORS)
    config = _config(rank, alpha)
    config.target_modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in found})
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(directory))


SAFETENSORS = "adapter_model.safetensors"


def _config(rank: int, alpha: float) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
