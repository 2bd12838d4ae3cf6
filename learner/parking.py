"""Optimizer state in host memory while engines use the device (colocated): away after learning, back before it.

DeepSpeed's own `offload_states` does it for ZeRO 1 and 2. For ZeRO 3 it wants its own compiled optimizer, and for 0 it
has nothing; there the tensors are moved here: the moments, and under ZeRO 3 each rank's share of the float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from learner import device as devices


class Parking:
    """Where the optimizer state of one rank is."""

    def __init__(self, engine: Any, zero_stage: int, device: torch.device) -> None:
        """`engine` is DeepSpeed's."""
        self._engine, self._stage, self._device = engine, zero_stage, device
        self._pin = devices.can_pin(device.type)
        self.parked = False

    def park(self) -> None:
        """Move it to host memory, and give the device's memory back. A second time changes nothing."""
        if self._stage in (1, 2):
            self._engine.offload_states(include=["optim_states", "hp_params"], pin_memory=self._pin)
        else:
            for tensor in self.tensors():
                tensor.data = self.to_host(tensor.data)
        devices.synchronise(self._device)
        devices.release(self._device)
        self.parked = True

    def unpark(self) -> None:
        """Move it back."""
        if not self.parked:
            return
        if self._stage in (1, 2):
            self._engine.reload_states()
        else:
            for tensor in self.tensors():
                tensor.data = tensor.data.to(self._device)
        devices.synchronise(self._device)
        self.parked = False

    def tensors(self) -> Iterator[torch.Tensor]:
        """What is moved (ZeRO 0 and 3)."""
        wrapper = self._engine.optimizer
        for state in getattr(wrapper, "optimizer", wrapper).state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim)
        yield from getattr(wrapper, "fp32_partitioned_groups_flat", ())

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, pinned where that makes the way back faster."""
        host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=self._pin)
        return host.copy_(data)
