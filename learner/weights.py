"""How weights leave the learner: gathered in buckets, and read as the engines will read them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner import device
from learner.engine import LearnerEngine
from learner.lora import FOLDER, as_sent, merged, public_name, save_adapter
from rollout.types import Probe, SharedBucket, WeightBucket


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


def outgoing_tensors(engine: LearnerEngine, dtype: str, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """All weights (with LoRA: the adapter) in the engines' precision, on the learner's device, bucket by bucket.

    Collective under ZeRO-3. Raises NonFiniteWeights naming the tensors: such weights load without an error and then
    sample token 0 for ever.
    """
    scaling = engine.settings.lora_scaling
    for tensors in engine.gathered(bucket_bytes, adapter_only=bool(engine.settings.lora_rank)):
        broken = [name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())]
        if broken:
            raise NonFiniteWeights(f"weights are not finite and were not published: {', '.join(broken[:5])}")
        yield [(public_name(name), as_sent(name, t, scaling).to(getattr(torch, dtype))) for name, t in tensors]


def outgoing(engine: LearnerEngine, dtype: str, bucket_bytes: int) -> Iterator[WeightBucket]:
    """`outgoing_tensors` as arrays in host memory; only rank 0's result travels."""
    for tensors in outgoing_tensors(engine, dtype, bucket_bytes):
        yield WeightBucket(
            names=tuple(name for name, _ in tensors),
            arrays=tuple(_as_array(tensor) for _, tensor in tensors),
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
    """Rank 0's end of a broadcast group with the engines."""

    def __init__(self, engine: LearnerEngine, host: str, port: int, size: int, timeout: float) -> None:
        """Open the store and the group; returns when every engine has joined."""
        self._device = engine.device
        self._group = device.broadcast_group(self._device, host, port, size, timeout)

    def send(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Broadcast the tensors of a bucket, one by one (one packed buffer is slower beyond a few MB)."""
        for _, tensor in tensors:
            self._group.broadcast(tensor.detach().contiguous(), 0).wait()
        device.synchronise(self._device)


class SharedBuckets:
    """The weights, bucket by bucket, in memory that engines on the same device open (collective under ZeRO-3).

    A bucket lives until the next one is asked for: by then every engine has copied it.
    """

    def __init__(self, engine: LearnerEngine, dtype: str, bucket_bytes: int) -> None:
        """Nothing is gathered yet."""
        self._device, self._dtype = engine.device, dtype
        self._tensors = outgoing_tensors(engine, dtype, bucket_bytes)
        self._buffer: torch.Tensor | None = None

    def next(self) -> SharedBucket | None:
        """The next bucket, or None after the last."""
        self._buffer = None
        device.release(self._device)
        tensors = next(self._tensors, None)
        if tensors is None:
            return None
        self._buffer = torch.cat([tensor.detach().reshape(-1) for _, tensor in tensors])
        device.synchronise(self._device)
        return SharedBucket(
            names=tuple(name for name, _ in tensors),
            shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
            dtype=self._dtype,
            handles={device.identity(self._device): device.share(self._buffer)},
        )


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
