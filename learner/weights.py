"""How weights leave the learner: gathered in buckets, and read as the engines will read them back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.engine import LearnerEngine
from learner.lora import FOLDER, as_sent, merged, public_name, save_adapter
from rollout.types import Probe, WeightBucket


class NonFiniteWeights(RuntimeError):
    """Weights that must not be published."""


def shapes(engine: LearnerEngine) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor an engine must prove, the tied output layer included.

    With LoRA: the frozen weights, which are never sent, and both matrices of every adapted layer.
    """
    named = engine.policy.hf.named_parameters()
    found = {public_name(name): tuple(getattr(p, "ds_shape", p.shape)) for name, p in named}
    tied = _tied_head(engine)
    if tied is not None:
        found["lm_head.weight"] = found[tied]
    return found


def outgoing(engine: LearnerEngine, dtype: str, bucket_bytes: int) -> Iterator[WeightBucket]:
    """All weights (with LoRA: the adapter) as buckets in the engines' precision; only rank 0's result travels.

    Collective under ZeRO-3. Raises NonFiniteWeights naming the tensors: such weights load without an error and then
    sample token 0 for ever.
    """
    scaling = engine.settings.lora_scaling
    for tensors in engine.gathered(bucket_bytes, adapter_only=bool(engine.settings.lora_rank)):
        broken = [name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())]
        if broken:
            raise NonFiniteWeights(f"weights are not finite and were not published: {', '.join(broken[:5])}")
        yield WeightBucket(
            names=tuple(public_name(name) for name, _ in tensors),
            arrays=tuple(_as_array(as_sent(name, t, scaling).to(getattr(torch, dtype))) for name, t in tensors),
            dtype=dtype,
        )


def digests(engine: LearnerEngine, probe: Probe) -> dict[str, str]:
    """What the receipts of the engines must show. Collective under ZeRO-3."""
    dtype = getattr(torch, probe.dtype)
    found: dict[str, str] = {}
    tied = _tied_head(engine)
    for tensors in engine.gathered(bucket_bytes=1 << 28):
        for own_name, own in tensors:
            name, tensor = public_name(own_name), as_sent(own_name, own, engine.settings.lora_scaling)
            for shown in (name, "lm_head.weight") if name == tied else (name,):
                columns = torch.from_numpy(np.array(probe.columns[shown], dtype=np.int64)).to(tensor.device)
                values = tensor if tensor.ndim == 1 else tensor[:, columns]
                found[shown] = Probe.digest(values.to(dtype).float().cpu().numpy())
    return found


class BroadcastSender:
    """Rank 0's end of a broadcast group with the engines (gloo)."""

    def __init__(self, host: str, port: int, size: int, timeout: float) -> None:
        """Open the store and the group; returns when every engine has joined."""
        wait = timedelta(seconds=timeout)
        distributed: Any = torch.distributed  # its gloo classes carry no types
        store = distributed.TCPStore(host, port, size, is_master=True, timeout=wait, wait_for_workers=False)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = wait
        self._group: Any = distributed.ProcessGroupGloo(store, 0, size, options)

    def send(self, bucket: WeightBucket) -> None:
        """Broadcast the tensors of a bucket, one by one (one packed buffer is slower beyond a few MB)."""
        for array in bucket.arrays:
            tensor = torch.from_numpy(array)
            self._group.broadcast(tensor.view(torch.bfloat16) if bucket.dtype == "bfloat16" else tensor, 0).wait()


def _tied_head(engine: LearnerEngine) -> str | None:
    """Name of the parameter the output layer shares, or None when it has its own."""
    head = engine.policy.hf.get_output_embeddings()
    named = {id(parameter): name for name, parameter in engine.policy.hf.named_parameters()}
    name = named.get(id(head.weight))
    return None if name is None or name == "lm_head.weight" else name


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of the tensor as numpy; bfloat16 as its uint16 bits."""
    copy = tensor.detach().cpu().contiguous().clone()
    return copy.view(torch.uint16).numpy() if copy.dtype == torch.bfloat16 else copy.numpy()


def export(engine: LearnerEngine, directory: Path) -> None:
    """Write weights and configuration in Hugging Face format (safetensors). Collective under ZeRO-3; rank 0 writes.

    With LoRA: the adapter merged into the weights, and by itself in the folder `adapter`.
    """
    state: dict[str, torch.Tensor] = {}
    for tensors in engine.gathered(bucket_bytes=1 << 28):
        if engine.settings.rank == 0:
            state |= {name: tensor.cpu() for name, tensor in tensors}
    if engine.settings.rank == 0:
        write_model(engine.policy.hf, state, engine.settings.lora_rank, engine.settings.lora_alpha, directory)


def write_model(model: Any, state: dict[str, torch.Tensor], rank: int, alpha: float, directory: Path) -> None:
    """Write a model directory from the parameters by their own names; `rank` 0 where there is no adapter."""
    if rank:
        save_adapter(state.items(), rank, alpha, model.config.name_or_path, directory / FOLDER)
        state = merged(state.items(), alpha / rank)
    model.save_pretrained(directory, state_dict=state, safe_serialization=True)
