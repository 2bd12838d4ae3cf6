"""What GPUs have: memory, bandwidth, FLOPs and links, each with where the number is from.

Memory is what nvidia-smi calls memory.total (the name on the box is rounded up). FLOPs are dense bfloat16 with float32
accumulation; datasheets that print the figure with sparsity are halved. Links count one direction, per GPU.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from cluster.errors import PlanError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU."""

    name: str
    """What it is called in `--gpu`."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second between memory and cores."""
    flops: float
    """Dense bfloat16 FLOPs per second."""
    link: float
    """Bytes per second to the other GPUs of the node, one direction (NVLink, else PCIe)."""
    network: float
    """Bytes per second to other nodes, one direction, per GPU: an assumption about the usual node, not of the GPU."""
    source: str
    """Where the numbers are from."""


def _device(name: str, mib: int, tb_s: float, tflops: float, link: float, network: float, source: str) -> Device:
    return Device(name, mib * MIB, tb_s * 1e12, tflops * 1e12, link * 1e9, network * 1e9, source)


INFINIBAND_400 = 50.0  # one 400 Gb/s adapter per GPU (DGX H100, H200, B200 reference designs)
INFINIBAND_200 = 25.0  # one 200 Gb/s adapter per GPU (DGX A100)
ETHERNET_100 = 3.1  # 100 Gb/s shared by four GPUs

DEVICES: tuple[Device, ...] = (
    #        name          MiB    TB/s   TFLOPS  link    network
    _device("a100-40gb", 40960, 1.555, 312.0, 300.0, INFINIBAND_200, "NVIDIA A100 datasheet, SXM4 40 GB, NVLink 3"),
    _device("a100-80gb", 81920, 2.039, 312.0, 300.0, INFINIBAND_200, "NVIDIA A100 datasheet, SXM4 80 GB, NVLink 3"),
    _device("h100", 81559, 3.35, 989.4, 450.0, INFINIBAND_400, "NVIDIA H100 datasheet, SXM5 (1979 with sparsity)"),
    _device("h100-pcie", 81559, 2.0, 756.0, 64.0, INFINIBAND_200, "NVIDIA H100 datasheet, PCIe 5 (1513 with sparsity)"),
    _device("h200", 143771, 4.8, 989.4, 450.0, INFINIBAND_400, "NVIDIA H200 datasheet, SXM (1979 with sparsity)"),
    _device("h20", 97871, 4.0, 148.0, 450.0, INFINIBAND_400, "press and resellers (no public NVIDIA datasheet)"),
    _device("b200", 183359, 8.0, 2250.0, 900.0, INFINIBAND_400, "NVIDIA HGX B200, per GPU (4500 with sparsity)"),
    _device("l40s", 46068, 0.864, 362.05, 32.0, ETHERNET_100, "NVIDIA L40S datasheet, PCIe 4 (733 with sparsity)"),
    _device("l4", 23034, 0.3, 121.0, 32.0, ETHERNET_100, "NVIDIA L4 datasheet, PCIe 4 (242 with sparsity)"),
    _device("a10", 23028, 0.6, 125.0, 32.0, ETHERNET_100, "NVIDIA A10 datasheet, PCIe 4"),
    _device("rtx-a6000", 49140, 0.768, 154.8, 32.0, ETHERNET_100, "NVIDIA RTX A6000 datasheet, PCIe 4, no bridge"),
    _device("rtx-3090", 24576, 0.936, 71.0, 32.0, ETHERNET_100, "NVIDIA GA102 whitepaper, PCIe 4, no bridge"),
    _device("rtx-4090", 24564, 1.008, 165.2, 32.0, ETHERNET_100, "NVIDIA Ada whitepaper, PCIe 4"),
    _device("rtx-5090", 32607, 1.792, 209.5, 64.0, ETHERNET_100, "NVIDIA RTX Blackwell whitepaper, PCIe 5"),
)
ALIASES = {
    "a100": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "h100-sxm": "h100",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "a6000": "rtx-a6000",
}


DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA H20": "h20",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
}
"""What the driver (and so torch) calls them; variants with other clocks have other names and are not in here."""


def device_called(driver_name: str) -> Device | None:
    """The device that a driver calls so; None for one that is not in the table."""
    name = DRIVER_NAMES.get(driver_name)
    return None if name is None else next(device for device in DEVICES if device.name == name)


def device_named(name: str) -> Device:
    """The device of a name; PlanError with the nearest name and the list for an unknown one."""
    wanted = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    wanted = ALIASES.get(wanted, wanted)
    known = {device.name: device for device in DEVICES}
    if wanted in known:
        return known[wanted]
    close = difflib.get_close_matches(wanted, [*known, *ALIASES], n=1, cutoff=0.5)
    hint = f" Perhaps you meant {close[0]}." if close else ""
    raise PlanError(f"--gpu {name}: not in the table.{hint}\n  All: {', '.join(known)}.")
