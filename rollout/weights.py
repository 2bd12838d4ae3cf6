"""How weights land in vLLM, and how what landed is read back.

`WeightReceiver` is mixed into vLLM's worker (`worker_extension_cls`), so every method runs where the model lives, also
under tensor parallelism. Every CPU-only oddity of weight loading is in this file:

* `model.load_weights` fails on live CPU weights (linears are packed and their parameters emptied), so loading goes
  through vLLM's layerwise reload, as its own weight-update API does.
* With tied embeddings the output layer keeps a packed copy of the *old* embedding; it must be packed again after every
  load (`_repack_tied_head`). Nothing is raised or logged without that; the receipt is what notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.communication_op import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

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
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            initialize_layerwise_reload(self._model)

    def load_bucket(self, bucket: WeightBucket) -> int:
        """Load some tensors; returns how many. Unknown names and wrong shapes raise (the engine is then unusable)."""
        return self.load_tensors(list(bucket_tensors(bucket)))

    def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        """Load named tensors that already live in this process."""
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            model: Any = self._model
            model.load_weights(iter(tensors))
        return len(tensors)

    def finish_load(self) -> None:
        """Close the weight update: pack what the kernels want packed, the tied output layer included."""
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
        for path, module in self._model.named_modules():
            prefix, _, leaf = path.rpartition(".")
            parts = [f"{prefix}.{part}" if prefix else part for part in fused.get(leaf, [leaf])]
            if isinstance(module, VocabParallelEmbedding | torch.nn.Embedding):
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
        world = get_tensor_model_parallel_world_size()
        if isinstance(module, RowParallelLinear) and world > 1:
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
    world = get_tensor_model_parallel_world_size()
    if parts > 1:
        sizes = [size // world for size in module.output_sizes]
        rows = rows[sum(sizes[:index]) : sum(sizes[: index + 1])]
    if world == 1 or isinstance(module, RowParallelLinear):
        return rows
    rows = tensor_model_parallel_all_gather(rows.contiguous(), dim=0)
    if isinstance(module, QKVParallelLinear) and index > 0 and module.num_kv_head_replicas > 1:
        heads = rows.reshape(-1, module.num_kv_head_replicas, module.head_size, *rows.shape[1:])
        rows = heads[:, 0].reshape(-1, *rows.shape[1:])
    return rows


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
