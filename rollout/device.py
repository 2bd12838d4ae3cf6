"""Everything on the rollout side that depends on the device; no other file here asks which one it is.

The CPU's oddities, all of them: no compilation and no pinned threads (the environment), no split prefill (seeded
requests crash on it), memory of the KV cache by an environment variable. Packed layers are found by what a layer has,
not by the device (rollout/weights.py, rollout/readback.py).
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_ENVIRONMENT = {
    "cpu": {
        # The engine core stays in this process: nothing to orphan, and tensors need no pickling.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # "auto" pins OpenMP threads to cores and would pin every engine to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Log-prob ranks are computed by a compiled function even in eager mode; compiling it costs 14 s at first use.
        "TORCHDYNAMO_DISABLE": "1",
        # oneDNN keeps a kernel for every batch size it has met, up to 1024: 450 MB more over ten rounds, and no faster.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
        **_QUIET,
    },
    "cuda": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **_QUIET},
}


def environment(device: str) -> dict[str, str]:
    """Variables that must be set before vLLM is imported."""
    return dict(_ENVIRONMENT[device])


def llm_options(device: str, *, kv_cache_gib: float, gpu_memory: float, sleeps: bool) -> dict[str, Any]:
    """Arguments of vLLM's LLM; on a CPU also the environment variable that goes with them."""
    if device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib)))
        return {"enable_chunked_prefill": False, "enforce_eager": True}
    return {"enable_chunked_prefill": True, "gpu_memory_utilization": gpu_memory, "enable_sleep_mode": sleeps}


def broadcast_group(device: torch.device, host: str, port: int, rank: int, size: int, timeout: float) -> Any:
    """A process group of its own with the learner (rank 0): NCCL between GPUs, gloo between CPUs."""
    import torch

    wait = timedelta(seconds=timeout)
    distributed: Any = torch.distributed  # its process groups carry no types
    store = distributed.TCPStore(host, port, size, is_master=False, timeout=wait)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = wait
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = wait
    return distributed.ProcessGroupGloo(store, rank, size, options)


def identity(device: torch.device) -> str:
    """Name of the physical device, the same in every process that uses it."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def open_shared(device: torch.device, handle: Any) -> torch.Tensor:
    """The memory behind a handle of learner/device.py, without a copy; valid while its owner keeps it."""
    if device.type == "cpu":
        shared: torch.Tensor = pickle.loads(handle)
        return shared
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    # Number 6 is the device's place in the owner's list of devices; here it may be another.
    rebuild: Any = rebuild_cuda_tensor
    opened: torch.Tensor = rebuild(*handle[:6], device.index, *handle[7:])
    return opened


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
