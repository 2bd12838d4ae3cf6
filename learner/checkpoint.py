"""One rank's part of a checkpoint: DeepSpeed's shards, and what DeepSpeed leaves out. Nothing is loaded unchecked.

DeepSpeed writes into the final folder, names it before all ranks are done, and executes what it reads. So it is given
our storage instead of its own: writing never raises between two barriers (the failure becomes the rank's vote), and
reading goes through torch's restricted unpickler. Which folder counts is decided in cluster/run/checkpoints.py.

    shards/*.pt              weights and optimizer, as DeepSpeed lays them out
    rank-0.json, ...         random states and counters of each rank
    reference.safetensors    weights of the reference, where it has its own (with LoRA it is the frozen model itself)
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from learner.device import rng_state as device_rng_state
from learner.device import set_rng_state as set_device_rng_state
from learner.lora import is_adapter
from learner.types import SavedFile, Vote

if TYPE_CHECKING:
    from learner.engine import LearnerEngine
    from learner.reference import Reference

SHARDS = "shards"
REFERENCE = "reference.safetensors"
BUCKET_BYTES = 1 << 28


class CheckpointRefused(RuntimeError):
    """A checkpoint that must not, or cannot, be loaded; the text names the file and the reason."""


def save(
    engine: LearnerEngine, reference: Reference | None, directory: Path, reached: Callable[[str], None] = lambda _: None
) -> Vote:
    """Write this rank's part into an existing directory. Collective; a full disk is a vote against, not an error.

    `reached` is called before every file with its name (for injected faults).
    """
    rank = engine.settings.rank
    storage = _Storage(directory, rank, reached, adapter_only=bool(engine.settings.lora_rank))
    _without_recovery_scripts(engine)
    with _replaced_storage(engine, storage):
        # With LoRA only the adapter: the frozen weights are those of the model directory (their hash is in the vote).
        engine.deepspeed.save_checkpoint(
            str(directory), tag=SHARDS, save_latest=False, exclude_frozen_parameters=bool(engine.settings.lora_rank)
        )
    weights = weights_sha256(engine)
    storage.write(f"rank-{rank}.json", lambda path: path.write_text(json.dumps(_rank_state(engine, reference))))
    if reference is not None and reference.model is not None and rank == 0:
        storage.write(REFERENCE, lambda path: _save_reference(reference, path))
    storage.sync_folders()
    return Vote(rank, tuple(storage.files), engine.steps_done, weights, storage.error)


def load(engine: LearnerEngine, reference: Reference | None, directory: Path, files: Iterable[SavedFile]) -> str:
    """Restore this rank from a checkpoint whose manifest lists `files`; returns `weights_sha256`. Collective.

    Each rank checks the files it wrote: owner, size, hash, and that unpickling them would call nothing but what
    tensors and DeepSpeed's own records need. The ranks vote before the first byte is loaded; CheckpointRefused.
    """
    rank = engine.settings.rank
    allowed = deepspeed_classes()
    refusal = ""
    try:
        check([file for file in files if file.rank == rank], directory, allowed)
    except CheckpointRefused as error:
        refusal = str(error)
    refusals = engine.all_sum(torch.tensor([float(bool(refusal))]))
    if float(refusals):
        raise CheckpointRefused(refusal or f"{directory}: another rank refused its part")
    with _replaced_storage(engine, _Storage(directory, rank)):
        path, _ = engine.deepspeed.load_checkpoint(
            str(directory),
            tag=SHARDS,
            load_lr_scheduler_states=False,
            load_module_strict=not engine.settings.lora_rank,  # the hash of all weights is compared afterwards
        )
    if path is None:
        raise CheckpointRefused(f"{directory}: DeepSpeed found nothing to load in {SHARDS}/")
    state = json.loads((directory / f"rank-{rank}.json").read_text())
    if engine.deepspeed.global_steps != state["applied_steps"]:
        raise CheckpointRefused(
            f"{directory}: the shards were saved after {engine.deepspeed.global_steps} applied steps, "
            f"rank-{rank}.json after {state['applied_steps']}"
        )
    engine.steps_done = int(state["steps"])
    if reference is not None:
        if reference.model is not None:
            _load_reference(reference, directory / REFERENCE)
        reference.refreshed_at = int(state["reference_refreshed_at"])
    weights = weights_sha256(engine)
    set_rng_state(state["rng"])  # last: whatever was loaded before may have drawn
    return weights


def read_weights(directory: Path, files: Iterable[SavedFile], zero_stage: int) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers by HF name, out of checked shards, without any rank or process group."""
    shards = [file for file in files if file.name.startswith(f"{SHARDS}/")]
    if zero_stage < 3:
        states = [file for file in shards if file.name.endswith("model_states.pt")]
        check(states, directory, [])
        found = torch.load(directory / states[0].name, weights_only=True, mmap=True, map_location="cpu")["module"]
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        check(shards, directory, deepspeed_classes())
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        found = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=SHARDS)
    return {name.removeprefix("hf."): tensor for name, tensor in found.items()}


def check(files: Iterable[SavedFile], directory: Path, allowed: list[Any]) -> None:
    """CheckpointRefused unless every file is what the manifest says and holds no code."""
    for file in files:
        path = directory / file.name
        if path.is_symlink() or not path.is_file():
            raise CheckpointRefused(f"{path} is not a plain file")
        if path.stat().st_uid != os.geteuid():
            raise CheckpointRefused(
                f"{path} belongs to user {path.stat().st_uid}, this process to {os.geteuid()}: optimizer state is "
                f"loaded only from files of the same user.\n  If you trust it: chown -R {os.geteuid()} {directory}"
            )
        if path.stat().st_size != file.size or sha256_of(path) != file.sha256:
            raise CheckpointRefused(f"{path} is not the file that was saved (size or sha256 differ)")
        if path.suffix == ".pt":
            scan(path, allowed)


def scan(path: Path, allowed: list[Any]) -> None:
    """CheckpointRefused when unpickling would call anything but tensor parts and `allowed`; nothing of it is run."""
    try:
        with torch.serialization.safe_globals(allowed):
            torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointRefused(
            f"{path} holds more than tensors and was not loaded: {reason[0] if reason else type(error).__name__}\n"
            f"  Either it is damaged, or somebody put code into it. Do not load it with other tools."
        ) from None


def deepspeed_classes() -> list[Any]:
    """What DeepSpeed's own shards hold besides tensors: plain records, no code of a user."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def weights_sha256(engine: LearnerEngine) -> str:
    """Hash of all parameters, names included (rank 0; empty elsewhere). Collective under ZeRO-3."""
    if engine.settings.rank and engine.settings.zero_stage < 3:
        return ""
    digest = tensors_sha256(item for bucket in engine.gathered(BUCKET_BYTES) for item in bucket)
    return "" if engine.settings.rank else digest


def tensors_sha256(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash of tensors in the order given: name, precision, shape and bits of each."""
    total = hashlib.sha256()
    for name, tensor in named:
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def sha256_of(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rng_state(device: str) -> dict[str, Any]:
    """The random states of this process as JSON: torch, numpy, python, and the device's own."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, python_gauss = random.getstate()
    state = {
        "torch": _as_text(torch.get_rng_state()),
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": [version, list(numbers), python_gauss],
    }
    own = device_rng_state(device)
    return state if own is None else state | {"device": _as_text(own)}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`."""
    torch.set_rng_state(_as_bytes(state["torch"]))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, numbers, python_gauss = state["python"]
    random.setstate((version, tuple(numbers), python_gauss))
    if "device" in state:
        set_device_rng_state(_as_bytes(state["device"]))


def _as_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _rank_state(engine: LearnerEngine, reference: Reference | None) -> dict[str, Any]:
    return {
        "steps": engine.steps_done,
        "applied_steps": engine.deepspeed.global_steps,
        "reference_refreshed_at": reference.refreshed_at if reference is not None else 0,
        "rng": rng_state(engine.settings.device),
    }


def _save_reference(reference: Reference, path: Path) -> None:
    from safetensors.torch import save_file

    assert reference.model is not None
    save_file({name: p.detach().cpu().contiguous() for name, p in reference.model.hf.named_parameters()}, path)


def _load_reference(reference: Reference, path: Path) -> None:
    from safetensors.torch import load_file

    assert reference.model is not None
    saved = load_file(path)
    own = dict(reference.model.hf.named_parameters())
    if saved.keys() != own.keys():
        raise CheckpointRefused(
            f"{path} holds other tensors than the reference: {sorted(saved.keys() ^ own.keys())[:5]}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def _without_recovery_scripts(engine: LearnerEngine) -> None:
    """DeepSpeed would put two executable Python files beside every checkpoint, with writes nobody checks."""
    engine.deepspeed._copy_recovery_script = lambda _: None


@contextmanager
def _replaced_storage(engine: LearnerEngine, storage: _Storage) -> Iterator[None]:
    original = engine.deepspeed.checkpoint_engine
    engine.deepspeed.checkpoint_engine = storage
    try:
        yield
    finally:
        engine.deepspeed.checkpoint_engine = original


class _Storage:
    """The files of one rank, with the methods of DeepSpeed's CheckpointEngine that saving and loading use."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        reached: Callable[[str], None] = lambda _: None,
        *,
        adapter_only: bool = False,
    ) -> None:
        self.files: list[SavedFile] = []
        self.error = ""
        self._adapter_only = adapter_only
        self._directory, self._rank, self._reached = directory, rank, reached

    def write(self, name: str, writer: Callable[[Path], Any]) -> None:
        """Write one file and bring it onto the disk; after the first failure nothing more is tried.

        It must not raise: the other ranks would wait in DeepSpeed's barriers for this one.
        """
        if self.error:
            return
        path = self._directory / name
        try:
            self._reached(name)
            path.parent.mkdir(exist_ok=True)
            writer(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self.files.append(SavedFile(name, self._rank, path.stat().st_size, digest))
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
            self.error = f"{path} could not be written: {error}"

    def sync_folders(self) -> None:
        """Make the names of the files survive a power cut."""
        for folder in (self._directory / SHARDS, self._directory):
            if folder.is_dir():
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                os.fsync(handle)
                os.close(handle)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are made with the first file."""

    def create(self, info: Any) -> None:
        """Nothing to announce."""

    def save(self, state_dict: Any, path: str) -> None:
        """DeepSpeed has a file to write."""
        if self._adapter_only and state_dict.get("module"):
            # DeepSpeed leaves out frozen parameters, but not a tied output layer, which is one of them.
            kept = {name: tensor for name, tensor in state_dict["module"].items() if is_adapter(name)}
            state_dict = state_dict | {"module": kept}
        self.write(os.path.relpath(path, self._directory), lambda target: torch.save(state_dict, target))

    def load(self, path: str, map_location: Any = None) -> Any:
        """DeepSpeed wants a file back: never through the pickle that runs what it finds."""
        with torch.serialization.safe_globals(deepspeed_classes()):
            return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: Any) -> bool:
        """Whether all of it was written."""
        return not self.error

    def is_decoupled(self) -> bool:
        """False: everything is on the disk when `save` returns."""
        return False
