"""Reads tensors back out of a living vLLM model, as the engine computes with them: packed, fused and sharded ones too.

Column j of a linear layer is its output for the j-th unit vector, so no stored weight is needed. Under tensor
parallelism every device holds a share of a layer; the shares are gathered, so a receipt speaks for all devices.
vLLM's classes and functions come in through `Layers`, because only rollout/weights.py imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Reader = Callable[[torch.Tensor], torch.Tensor]
"""Columns asked for -> those columns of the whole tensor (a tensor of one dimension: all of it)."""


@dataclass(frozen=True, slots=True)
class Layers:
    """What this file needs of vLLM."""

    column: Any
    """Linear layers that are split by output."""
    row: Any
    """Linear layers that are split by input."""
    qkv: Any
    """Fused query, key and value, whose key and value heads may be held more than once."""
    embedding: Any
    """Embedding tables, output layers among them."""
    head: Any
    """Output layers."""
    with_adapter: Any
    """Layers that LoRA has wrapped."""
    gather: Callable[..., torch.Tensor]
    """All shares of a tensor, end to end (`dim`), on every device."""
    add: Callable[[torch.Tensor], torch.Tensor]
    """Sum over devices."""
    devices: int
    """Devices of the engine."""
    place: int
    """Which of them this is."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where in the engine's adapter buffers the policy's adapter lies."""

    index: int
    """Slot of vLLM's adapter buffers."""
    rank: int
    """Rank of the adapter; the buffers may have room for more."""


def held(model: Any, layers: Layers, slot: Slot | None) -> dict[str, Reader]:
    """HF name -> reader, for every tensor of the model, and with a `slot` for the adapter in it."""
    fused = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Reader] = {}
    for full_path, module in model.named_modules():
        path = full_path.removesuffix(".base_layer")  # what vLLM has wrapped to add an adapter
        prefix, _, leaf = path.rpartition(".")
        parts = [f"{prefix}.{part}" if prefix else part for part in fused.get(leaf, [leaf])]
        reading = _Reading(module, layers)
        if isinstance(module, layers.with_adapter):
            if slot is not None and hasattr(module, "lora_b_stacked") and hasattr(module, "n_slices"):
                found |= _adapter_readers(module, parts, layers, slot)
        elif isinstance(module, layers.embedding | torch.nn.Embedding):
            found[f"{path}.weight"] = reading.embedding
        elif hasattr(module, "quant_method") and hasattr(module, "input_size"):
            for index, part in enumerate(parts):
                found[f"{part}.weight"] = reading.linear(index, len(parts))
                if getattr(module, "bias", None) is not None:
                    found[f"{part}.bias"] = reading.bias(index, len(parts))
        else:
            for name, parameter in module.named_parameters(recurse=False):
                found[f"{path}.{name}"] = _whole(parameter)
    return found


def _whole(parameter: torch.Tensor) -> Reader:
    return lambda columns: parameter.data if parameter.ndim == 1 else parameter.data[:, columns]


class _Reading:
    """Readers of one layer."""

    def __init__(self, module: Any, layers: Layers) -> None:
        self._module, self._layers = module, layers
        # A model may switch tensor parallelism off for a layer.
        self._shards = int(getattr(module, "tp_size", layers.devices))

    def embedding(self, columns: torch.Tensor) -> torch.Tensor:
        """Tables keep their rows; an output layer is read through the layer, since it may be packed."""
        module = self._module
        rows = module.org_vocab_size if hasattr(module, "org_vocab_size") else module.num_embeddings
        if isinstance(module, self._layers.head):
            values = module.quant_method.apply(module, self._units(columns, module.embedding_dim), bias=None).T
        else:
            values = module.weight.data[:, columns]
        if self._shards > 1:
            values = self._layers.gather(values.contiguous(), dim=0)
        whole: torch.Tensor = values[:rows]
        return whole

    def linear(self, index: int, parts: int) -> Reader:
        """Weight of checkpoint tensor `index` of the `parts` that are fused in the layer."""

        def read(columns: torch.Tensor) -> torch.Tensor:
            module = self._module
            units = self._units(columns, module.input_size)
            if isinstance(module, self._layers.row) and self._shards > 1:
                width = module.input_size_per_partition
                mine = units[:, self._layers.place * width : (self._layers.place + 1) * width].contiguous()
                return self._layers.add(module.quant_method.apply(module, mine, bias=None)).T
            return self._part(module.quant_method.apply(module, units, bias=None).T, index, parts)

        return read

    def bias(self, index: int, parts: int) -> Reader:
        """Bias of checkpoint tensor `index` of the `parts`."""
        return lambda columns: self._part(self._module.bias.data, index, parts)

    def rows(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Rows of part `index` of the layer, those of all devices."""
        module = self._module
        if self._shards == 1 or not isinstance(module, self._layers.column):
            return rows
        rows = self._layers.gather(rows.contiguous(), dim=0)
        if isinstance(module, self._layers.qkv) and index > 0 and module.num_kv_head_replicas > 1:
            heads = rows.reshape(-1, module.num_kv_head_replicas, module.head_size, *rows.shape[1:])
            rows = heads[:, 0].reshape(-1, *rows.shape[1:])
        return rows

    def _part(self, rows: torch.Tensor, index: int, parts: int) -> torch.Tensor:
        shards = self._shards if isinstance(self._module, self._layers.column) else 1
        sizes = [size // shards for size in getattr(self._module, "output_sizes", ())]
        if parts > 1:
            return self.rows(rows[sum(sizes[:index]) : sum(sizes[: index + 1])], index)
        if shards > 1 and len(sizes) > 1:
            # Fused in the checkpoint already: each device holds its share of every part; they are joined part by part.
            return torch.cat([self.rows(share, place) for place, share in enumerate(torch.split(rows, sizes))])
        return self.rows(rows, 0)

    def _units(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        module = self._module
        dtype = getattr(module, "params_dtype", None) or module.weight.dtype
        rows = torch.zeros(len(columns), width, dtype=dtype, device=module.weight.device)
        rows[torch.arange(len(columns)), columns] = 1.0
        return rows


def _adapter_readers(module: Any, parts: list[str], layers: Layers, slot: Slot) -> dict[str, Reader]:
    """Readers of the adapter of one wrapped linear layer."""
    base = _Reading(module.base_layer, layers)

    def a_of(index: int) -> Reader:
        def read(columns: torch.Tensor) -> torch.Tensor:
            values: torch.Tensor = module.lora_a_stacked[index][slot.index, 0, : slot.rank]
            if isinstance(module.base_layer, layers.row) and base._shards > 1:
                values = layers.gather(values.contiguous(), dim=1)
            return values[:, columns]

        return read

    def b_of(slices: list[int]) -> Reader:
        def read(columns: torch.Tensor) -> torch.Tensor:
            values = [module.lora_b_stacked[index][slot.index, 0][:, : slot.rank][:, columns] for index in slices]
            return torch.cat([base.rows(share, index) for index, share in zip(slices, values, strict=True)])

        return read

    found: dict[str, Reader] = {}
    for index, part in enumerate(parts):
        # One checkpoint layer may fill several slices (a layer that is fused in the checkpoint already).
        slices = [index] if len(parts) == module.n_slices else list(range(module.n_slices))
        found[f"{part}.lora_A.weight"] = a_of(slices[0])
        found[f"{part}.lora_B.weight"] = b_of(slices)
    return found
