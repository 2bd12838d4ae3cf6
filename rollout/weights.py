"""How weights land in vLLM, and how what landed is read back.

They land through vLLM's own weight-update API (start, update for every bucket, finish), in the engine `Arrivals` that
is registered with it. `WeightReceiver` is mixed into vLLM's worker (`worker_extension_cls`), so its methods run where
the model lives, also under tensor parallelism; importing this file there registers `Arrivals`.

* Loading goes through vLLM's layerwise reload: `model.load_weights` fails on live CPU weights (linears are packed and
  their parameters emptied). It keeps what arrives until a layer is whole, so nothing may arrive in memory that is used
  again.
* With tied embeddings on a CPU the output layer keeps a packed copy of the *old* embedding; it must be packed again
  after every load (`_repack_tied_head`). Nothing is raised or logged without that; the receipt is what notices.

With LoRA the model is never loaded again: only the two matrices of every adapted layer arrive, by names that end in
`.lora_A.weight` and `.lora_B.weight`, and go into vLLM's adapter slot. B carries the scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.communication_op import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from rollout.device import broadcast_group, identity, open_shared, synchronise
from rollout.engine import ADAPTER_ID, UPDATE_BACKEND
from rollout.readback import Layers, Slot, held
from rollout.types import Probe, SharedBucket, WeightBucket


def bucket_tensors(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as torch sees them (no copy)."""
    for name, array in zip(bucket.names, bucket.arrays, strict=True):
        # Arrays out of the object store are read-only; the loader only reads them.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        yield name, tensor.view(torch.bfloat16) if bucket.dtype == "bfloat16" else tensor


def shared_tensors(bucket: SharedBucket, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the tensors in the memory of the learner on this device (it will use that memory again)."""
    mine = identity(device)
    if mine not in bucket.handles:
        raise ValueError(f"no learner rank shares device {mine}, only {sorted(bucket.handles)} do")
    buffer = open_shared(device, bucket.handles[mine])
    start = 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        end = start + math.prod(shape)
        yield name, buffer[start:end].reshape(shape).clone()
        start = end
    synchronise(device)  # the copies are made before the owner is told that they are


@dataclass  # not frozen, because vLLM's is not
class Channel(WeightTransferInitInfo):  # type: ignore[misc]
    """A broadcast group to join: the learner is rank 0, this engine's devices are `first_rank` and those after it."""

    host: str
    """Of the learner."""
    port: int
    """Of its store."""
    first_rank: int
    """See above."""
    size: int
    """Members in all."""
    timeout: float
    """Seconds a broadcast may take."""


@dataclass
class Arrival(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket, by one of three ways."""

    bucket: WeightBucket | None = None
    """The tensors themselves."""
    shared: SharedBucket | None = None
    """Where they lie on this device."""
    names: tuple[str, ...] = ()
    """What will come by broadcast, in this order."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """One per name."""
    dtype: str = ""
    """float32 or bfloat16."""


class Arrivals(WeightTransferEngine[Channel, Arrival]):  # type: ignore[misc]
    """vLLM's side of a weight update, whatever way the weights come."""

    init_info_cls = Channel
    update_info_cls = Arrival

    def init_transfer_engine(self, init_info: Channel) -> None:
        """Join the broadcast group."""
        rank = init_info.first_rank + self.parallel_config.rank
        self._channel: Any = broadcast_group(
            self.device, init_info.host, init_info.port, rank, init_info.size, init_info.timeout
        )

    def start_weight_update(self) -> None:
        """Open: the model takes checkpoint tensors until `finish_weight_update`."""
        self.adapter: dict[str, torch.Tensor] = {}
        if self.vllm_config.lora_config is None:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in vLLM, but for a device that may have nothing to wait for (its own raises on a CPU)."""
        self.receive_weights(self.parse_update_info(update_info))
        synchronise(self.device)

    def receive_weights(self, update_info: Arrival) -> None:
        """Load one bucket. Unknown names and wrong shapes raise (the engine is then unusable)."""
        tensors = list(self._tensors(update_info))
        if self.vllm_config.lora_config is None:
            self.model.load_weights(iter(tensors))
        else:
            self.adapter |= {f"base_model.model.{name}": tensor for name, tensor in tensors}

    def finish_weight_update(self) -> None:
        """Close: pack what the kernels want packed, the tied output layer included."""
        if self.vllm_config.lora_config is None:
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_tied_head()

    def shutdown(self) -> None:
        """Leave the broadcast group."""
        self._channel = None

    def _tensors(self, arrival: Arrival) -> Iterator[tuple[str, torch.Tensor]]:
        if arrival.bucket is not None:
            yield from bucket_tensors(arrival.bucket)
        elif arrival.shared is not None:
            yield from shared_tensors(arrival.shared, self.device)
        else:
            for name, shape in zip(arrival.names, arrival.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, arrival.dtype), device=self.device)
                self._channel.broadcast(tensor, 0).wait()
                yield name, tensor

    def _repack_tied_head(self) -> None:
        head: Any = getattr(self.model, "lm_head", None)
        embedding: Any = getattr(getattr(self.model, "model", None), "embed_tokens", None)
        if hasattr(head, "cpu_linear") and embedding is not None and head.weight is embedding.weight:
            head.quant_method.process_weights_after_loading(head)


if UPDATE_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(UPDATE_BACKEND, Arrivals)


class WeightReceiver:
    """Methods that vLLM adds to its worker; called by name through `collective_rpc`."""

    def place_adapter(self) -> None:
        """Put the adapter that has arrived into the slot that every request uses, in place of the one before.

        After vLLM's `finish_weight_update`, which throws adapters out.
        """
        worker: Any = self
        arrived = worker.weight_transfer_engine.adapter
        ranks = {tensor.shape[0] for name, tensor in arrived.items() if name.endswith(".lora_A.weight")}
        if len(ranks) != 1:
            raise ValueError(f"an adapter of one rank was expected, got ranks {sorted(ranks)}")
        rank = ranks.pop()
        adapters = worker.model_runner.lora_manager._adapter_manager
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            arrived,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # scaling 1: B carries it
            device="cpu",
            dtype=worker.vllm_config.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        adapters.remove_adapter(ADAPTER_ID)
        adapters.add_adapter(adapter)
        adapters.activate_adapter(ADAPTER_ID)
        self._slot = Slot(adapters.lora_index_to_id.index(ADAPTER_ID), rank)
        worker.weight_transfer_engine.adapter = {}

    def read_back(self, columns: dict[str, np.ndarray[Any, Any]]) -> dict[str, str]:
        """Digest, for every tensor asked for, of what this engine computes with.

        `columns` is `Probe.columns`. A tensor that cannot be found is left out of the answer; the driver notices.
        """
        layers = Layers(
            column=ColumnParallelLinear,
            row=RowParallelLinear,
            qkv=QKVParallelLinear,
            embedding=VocabParallelEmbedding,
            head=ParallelLMHead,
            with_adapter=BaseLayerWithLoRA,
            gather=tensor_model_parallel_all_gather,
            add=tensor_model_parallel_all_reduce,
            devices=get_tensor_model_parallel_world_size(),
            place=get_tensor_model_parallel_rank(),
        )
        worker: Any = self
        readers = held(worker.model_runner.get_model(), layers, getattr(self, "_slot", None))
        digests: dict[str, str] = {}
        for name, wanted in columns.items():
            if name in readers:
                values = readers[name](torch.from_numpy(np.array(wanted, dtype=np.int64)))
                digests[name] = Probe.digest(values.detach().float().cpu().numpy())
        return digests
