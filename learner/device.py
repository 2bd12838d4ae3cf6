"""Everything on the learner side that depends on the device; no other file here asks which one it is.

The CPU's oddities: one thread, no compilation (the environment), and DeepSpeed's shared-memory operator switched off.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

_ENVIRONMENT: dict[str, dict[str, str]] = {
    "cpu": {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # oneDNN would keep a kernel for every batch size it has met.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    },
    "cuda": {},
}


def environment(device: str) -> dict[str, str]:
    """Variables that must be set before torch and DeepSpeed are imported."""
    return dict(_ENVIRONMENT[device])


def local_rank(device: str, rank: int) -> int:
    """Which device of the process: its one GPU (Ray shows it no other), or its own number where all share the cores."""
    return 0 if device == "cuda" else rank


def collectives(device: str) -> str:
    """Backend of the ranks' process group."""
    return "nccl" if device == "cuda" else "gloo"


def attention(device: str, dtype: str) -> str:
    """transformers' name of the attention to use: flash attention where it is installed and can be, else torch's own.

    Only flash attention takes ragged batches without padding, and it computes in 16 bits.
    """
    if device == "cpu" or dtype == "float32":
        return "sdpa"
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"


def can_pin(device: str) -> bool:
    """Whether host memory can be pinned for faster copies to the device."""
    return device == "cuda"


def operators_to_leave_out(device: str) -> tuple[str, ...]:
    """DeepSpeed operators that must not be built: 45 s and a compiler for what gloo does as well."""
    return ("deepspeed_shm_comm",) if device == "cpu" else ()


def broadcast_group(device: torch.device, host: str, port: int, size: int, timeout: float) -> Any:
    """A process group of its own with the engines, as rank 0: NCCL between GPUs, gloo between CPUs."""
    wait = timedelta(seconds=timeout)
    distributed: Any = torch.distributed  # its process groups carry no types
    store = distributed.TCPStore(host, port, size, is_master=True, timeout=wait, wait_for_workers=False)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = wait
        return distributed.ProcessGroupNCCL(store, 0, size, options)
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = wait
    return distributed.ProcessGroupGloo(store, 0, size, options)


def identity(device: torch.device) -> str:
    """Name of the physical device, the same in every process that uses it."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def share(buffer: torch.Tensor) -> Any:
    """A handle by which another process on this device opens the buffer in place (rollout/device.py: open_shared).

    The buffer must be kept until the other process is done with it.
    """
    if buffer.device.type == "cpu":
        sharing: Any = torch.multiprocessing
        sharing.set_sharing_strategy("file_system")  # no socket between the two processes
        shared: Any = buffer
        return bytes(ForkingPickler.dumps(shared.share_memory_()))
    from torch.multiprocessing.reductions import reduce_tensor

    reduce: Any = reduce_tensor
    return reduce(buffer)[1]


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give memory that torch keeps for itself back to the device, for the engine beside it."""
    if device.type == "cuda":
        cuda: Any = torch.cuda
        cuda.empty_cache()
        cuda.ipc_collect()


def rng_state(device: str) -> torch.Tensor | None:
    """Random state of the device, where it has one of its own."""
    return torch.cuda.get_rng_state() if device == "cuda" else None


def set_rng_state(state: torch.Tensor) -> None:
    """The inverse of `rng_state`."""
    torch.cuda.set_rng_state(state)
