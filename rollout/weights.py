"""How weights land in vLLM, and how what landed is read back.

`WeightReceiver` is mixed into vLLM's worker (`worker_extension_cls`), so every method runs where the model lives, also
under tensor parallelism. Every CPU-only oddity of weight loading is in this file:

* `model.load_weights` fails on live CPU weights (linears are packed and their parameters emptied), so loading goes
  through vLLM's layerwise reload, as its own weight-update API does.
* With tied embeddings the output layer keeps a packed copy of the *old* embedding; it must be packed again after every
  load (`_repack_tied_head`). Nothing is raised or logged without that; the receipt is what notices.

With LoRA the model is never loaded again: only the two matrices of every adapted layer arrive, by names that end in
`.lora_A.weight` and `.lora_B.weight`, and go into vLLM's adapter slot. B carries the scaling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.communication_op import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from rollout.engine import ADAPTER_ID
from rollout.types import Probe, WeightBucket


def bucket_tensors(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as torch sees them (no copy)."""
    for name, array in zip(bucket.names, bucket.arrays, strict=True):
        # Arrays out of the object store are read-only; the loader only reads them.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        yield name, tensor.view(torch.bfloat16) if bucket.dtype == "bfloat16" else tensor


class WeightReceiver:
    """Methods that vLLM adds to its worker; called by name through `collective_rpc`."""

    def begin_load(self) -> None:
        """Open a weight update: the model takes checkpoint tensors until `finish_load`."""
        self._adapter: dict[str, torch.Tensor] = {}
        if self._with_adapter:
            return
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            initialize_layerwise_reload(self._model)

    def load_bucket(self, bucket: WeightBucket) -> int:
        """Load some tensors; returns how many. Unknown names and wrong shapes raise (the engine is then unusable)."""
        return self.load_tensors(list(bucket_tensors(bucket)))

    def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        """Load named tensors that already live in this process."""
        if self._with_adapter:
            self._adapter |= {f"base_model.model.{name}": tensor.clone() for name, tensor in tensors}
            return len(tensors)
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            model: Any = self._model
            model.load_weights(iter(tensors))
        return len(tensors)

    def finish_load(self) -> None:
        """Close the weight update: pack what the kernels want packed, the tied output layer included."""
        if self._with_adapter:
            self._place_adapter()
            return
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            finalize_layerwise_reload(self._model, self.model_config)  # type: ignore[attr-defined]
            self._repack_tied_head()

    def open_channel(self, host: str, port: int, rank: int, size: int, timeout: float) -> None:
        """Join the broadcast group of a transport (rank 0 is the learner)."""
        from datetime import timedelta

        distributed: Any = torch.distributed  # its gloo classes carry no types
        store = distributed.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout))
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout)
        self._channel: Any = distributed.ProcessGroupGloo(store, rank, size, options)

    def receive_bucket(self, names: list[str], shapes: list[tuple[int, ...]], dtype: str) -> int:
        """Receive tensors by broadcast from rank 0 and load them."""
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape in shapes]
        for tensor in tensors:
            self._channel.broadcast(tensor, 0).wait()
        return self.load_tensors(list(zip(names, tensors, strict=True)))

    def close_channel(self) -> None:
        """Leave the broadcast group."""
        self._channel = None

    def read_back(self, columns: dict[str, np.ndarray[Any, Any]]) -> dict[str, str]:
        """Digest, for every tensor asked for, of what this engine computes with.

        `columns` is `Probe.columns`. A tensor that cannot be found is left out of the answer; the driver notices.
        """
        held = self._held()
        digests: dict[str, str] = {}
        for name, wanted in columns.items():
            if name in held:
                values = held[name](torch.from_numpy(np.array(wanted, dtype=np.int64)))
                digests[name] = Probe.digest(values.detach().float().cpu().numpy())
        return digests

    @property
    def _with_adapter(self) -> bool:
        return self.vllm_config.lora_config is not None  # type: ignore[attr-defined]

    def _place_adapter(self) -> None:
        """Put the collected adapter into the slot that every request uses, in place of the one before."""
        ranks = {tensor.shape[0] for name, tensor in self._adapter.items() if name.endswith(".lora_A.weight")}
        if len(ranks) != 1:
            raise ValueError(f"an adapter of one rank was expected, got ranks {sorted(ranks)}")
        self._rank = ranks.pop()
        adapters: Any = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            self._adapter,
            PEFTHelper(r=self._rank, lora_alpha=self._rank, target_modules=[]),  # scaling 1: B carries it
            device="cpu",
            dtype=self.vllm_config.lora_config.lora_dtype,  # type: ignore[attr-defined]
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        adapters.remove_adapter(ADAPTER_ID)
        adapters.add_adapter(adapter)
        adapters.activate_adapter(ADAPTER_ID)
        self._slot = adapters.lora_index_to_id.index(ADAPTER_ID)
        self._adapter = {}

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return model

    def _repack_tied_head(self) -> None:
        head: Any = getattr(self._model, "lm_head", None)
        embedding: Any = getattr(getattr(self._model, "model", None), "embed_tokens", None)
        if hasattr(head, "cpu_linear") and embedding is not None and head.weight is embedding.weight:
            head.quant_method.process_weights_after_loading(head)

    def _held(self) -> dict[str, Any]:
        """HF name -> function that reads columns of that tensor from the living model."""
        fused = getattr(self._model, "packed_modules_mapping", {})
        held: dict[str, Any] = {}
        for full_path, module in self._model.named_modules():
            path = full_path.removesuffix(".base_layer")  # what vLLM has wrapped to add an adapter
            prefix, _, leaf = path.rpartition(".")
            parts = [f"{prefix}.{part}" if prefix else part for part in fused.get(leaf, [leaf])]
            if isinstance(module, BaseLayerWithLoRA):
                if hasattr(module, "lora_b_stacked") and hasattr(module, "n_slices"):
                    held |= self._held_adapter(module, parts)
            elif isinstance(module, VocabParallelEmbedding | torch.nn.Embedding):
                held[f"{path}.weight"] = _embedding_reader(module)
            elif hasattr(module, "quant_method") and hasattr(module, "input_size"):
                for index, part in enumerate(parts):
                    held[f"{part}.weight"] = _linear_reader(module, index, len(parts))
                    if getattr(module, "bias", None) is not None:
                        held[f"{part}.bias"] = _bias_reader(module, index, len(parts))
            else:
                for name, parameter in module.named_parameters(recurse=False):
                    held[f"{path}.{name}"] = _whole_reader(parameter)
        return held

    def _held_adapter(self, module: Any, parts: list[str]) -> dict[str, Any]:
        """Readers of the adapter slot of one wrapped linear layer."""
        found: dict[str, Any] = {}
        for index, part in enumerate(parts):
            # One checkpoint layer may fill several slices (a layer that is fused in the checkpoint already).
            slices = [index] if len(parts) == module.n_slices else list(range(module.n_slices))
            found[f"{part}.lora_A.weight"] = _adapter_a_reader(module, slices[0], self._slot, self._rank)
            found[f"{part}.lora_B.weight"] = _adapter_b_reader(module, slices, self._slot, self._rank)
        return found


def _adapter_a_reader(module: Any, index: int, slot: int, rank: int) -> Any:
    def read(columns: torch.Tensor) -> torch.Tensor:
        held: torch.Tensor = module.lora_a_stacked[index][slot, 0, :rank]
        if isinstance(module.base_layer, RowParallelLinear) and _shards(module) > 1:
            held = tensor_model_parallel_all_gather(held.contiguous(), dim=1)
        return held[:, columns.to(held.device)]

    return read


def _adapter_b_reader(module: Any, slices: list[int], slot: int, rank: int) -> Any:
    def read(columns: torch.Tensor) -> torch.Tensor:
        wanted = columns.to(module.lora_b_stacked[0].device)
        held = [module.lora_b_stacked[index][slot, 0][:, :rank][:, wanted] for index in slices]
        return torch.cat(
            [_whole_rows(module.base_layer, rows, index) for index, rows in zip(slices, held, strict=True)]
        )

    return read


def _whole_reader(parameter: torch.Tensor) -> Any:
    return lambda columns: parameter.data if parameter.ndim == 1 else parameter.data[:, columns]


def _embedding_reader(module: Any) -> Any:
    """Embedding tables keep their rows; an output layer is read through the layer, since it may be packed."""

    def read(columns: torch.Tensor) -> torch.Tensor:
        rows = module.org_vocab_size if hasattr(module, "org_vocab_size") else module.num_embeddings
        if isinstance(module, ParallelLMHead):
            width = module.embedding_dim
            values = module.quant_method.apply(module, _unit_rows(columns, width, module), bias=None).T
        else:
            values = module.weight.data[:, columns]
        if get_tensor_model_parallel_world_size() > 1:
            values = tensor_model_parallel_all_gather(values.contiguous(), dim=0)
        whole: torch.Tensor = values[:rows]
        return whole

    return read


def _linear_reader(module: Any, index: int, parts: int) -> Any:
    """Column j of a (possibly packed, possibly fused) linear is its output for the j-th unit vector."""

    def read(columns: torch.Tensor) -> torch.Tensor:
        if isinstance(module, RowParallelLinear) and _shards(module) > 1:
            width = module.input_size_per_partition
            start = get_tensor_model_parallel_rank() * width
            unit = _unit_rows(columns, module.input_size, module)[:, start : start + width].contiguous()
            reduced: torch.Tensor = tensor_model_parallel_all_reduce(module.quant_method.apply(module, unit, bias=None))
            return reduced.T
        output = module.quant_method.apply(module, _unit_rows(columns, module.input_size, module), bias=None).T
        return _fused_part(module, output, index, parts)

    return read


def _bias_reader(module: Any, index: int, parts: int) -> Any:
    return lambda columns: _fused_part(module, module.bias.data, index, parts)


def _fused_part(module: Any, rows: torch.Tensor, index: int, parts: int) -> torch.Tensor:
    """Rows of one checkpoint tensor inside a fused one, whole again under tensor parallelism."""
    shards = _shards(module) if isinstance(module, ColumnParallelLinear) else 1
    sizes = [size // shards for size in getattr(module, "output_sizes", ())]
    if parts > 1:
        return _whole_rows(module, rows[sum(sizes[:index]) : sum(sizes[: index + 1])], index)
    if shards > 1 and len(sizes) > 1:
        # Fused in the checkpoint already: each device holds its share of every part, so they are joined part by part.
        return torch.cat([_whole_rows(module, share, place) for place, share in enumerate(torch.split(rows, sizes))])
    return _whole_rows(module, rows, 0)


def _whole_rows(module: Any, rows: torch.Tensor, index: int) -> torch.Tensor:
    """Rows of part `index` of a layer from all devices of a tensor-parallel engine."""
    if _shards(module) == 1 or not isinstance(module, ColumnParallelLinear):
        return rows
    rows = tensor_model_parallel_all_gather(rows.contiguous(), dim=0)
    if isinstance(module, QKVParallelLinear) and index > 0 and module.num_kv_head_replicas > 1:
        heads = rows.reshape(-1, module.num_kv_head_replicas, module.head_size, *rows.shape[1:])
        rows = heads[:, 0].reshape(-1, *rows.shape[1:])
    return rows


def _shards(module: Any) -> int:
    """Over how many devices a layer is split (1 where a model switches that off for a layer)."""
    return int(getattr(module, "tp_size", get_tensor_model_parallel_world_size()))


def _unit_rows(columns: torch.Tensor, width: int, module: Any) -> torch.Tensor:
    rows = torch.zeros(len(columns), width, dtype=_compute_dtype(module), device=_device(module))
    rows[torch.arange(len(columns)), columns] = 1.0
    return rows


def _compute_dtype(module: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(module, "params_dtype", None) or module.weight.dtype
    return dtype


def _device(module: Any) -> torch.device:
    device: torch.device = module.weight.device
    return device
