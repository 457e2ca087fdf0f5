"""What devices can do, in round numbers: enough to rank layouts, not to predict seconds.

One table of GPUs by the name that Ray gives them (`ray.util.accelerators`), NVIDIA's and AMD's
alike: memory, arithmetic, bandwidth, links. A kind that is not in it, or that your provider cut,
is given as a setting (`trainer.gpu_kinds`), and wins over the table. Peaks are the vendors' data
sheets', dense, without sparsity; of AMD's two-chip devices, one chip's, which is what a process
sees. A device gets `EFFICIENCY` of its arithmetic and `STREAMED` of its memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 10**9
GIB = 1 << 30
EFFICIENCY = 0.4  # of peak arithmetic, in training
STREAMED = 0.7  # of peak memory bandwidth, in decoding
FLOAT32_SHARE = 1 / 8  # of bf16's arithmetic, where matrices are float32


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's processor and its ways to the others."""

    name: str
    memory_gib: float  # the smallest variant of that name; 0: whatever the machine has
    flops: float  # bf16, a second
    bandwidth: float  # of its own memory, bytes a second
    link: float  # to devices of the same machine, bytes a second each way
    network: float  # to other machines
    vendor: str = ""  # of a GPU: nvidia or amd
    latency_s: float = 20e-6  # of one collective on one machine
    network_latency_s: float = 60e-6
    kernel_s: float = 40e-6  # of a decoder layer that has next to nothing to do


def gpu_of(
    name: str,
    memory_gib: float,
    tflops: float,
    memory_gbs: float,
    link_gbs: float = 32,
    network_gbs: float = 12.5,
    vendor: str = "",
) -> Device:
    """A GPU from its data sheet, in 10^12 operations and 10^9 bytes a second; `Device` says which.

    Without a vendor it is the one that its name says.
    """
    return Device(
        name,
        memory_gib,
        tflops * 1e12,
        memory_gbs * GB,
        link_gbs * GB,
        network_gbs * GB,
        vendor or ("amd" if name.startswith("AMD") else "nvidia"),
    )


_GPUS = {
    device.name: device
    for device in (
        gpu_of("V100", 16, 125, 900, 150),
        gpu_of("T4", 16, 65, 320, 16),
        gpu_of("A10G", 24, 70, 600, 32),
        gpu_of("L4", 24, 121, 300, 32),
        gpu_of("L40S", 48, 362, 864, 32),
        gpu_of("A100", 40, 312, 1555, 300),
        gpu_of("A100-40G", 40, 312, 1555, 300),
        gpu_of("A100-80G", 80, 312, 2039, 300),
        gpu_of("H100", 80, 989, 3350, 450),
        gpu_of("H200", 141, 989, 4800, 450),
        gpu_of("H20", 96, 148, 4000, 450),
        gpu_of("B200", 180, 2250, 8000, 900),
        gpu_of("B300", 270, 2250, 8000, 900),
        gpu_of("GB200", 186, 2500, 8000, 900),
        gpu_of("GB300", 278, 2500, 8000, 900),
        gpu_of("AMD-Instinct-MI210", 64, 181, 1600, 50),
        gpu_of("AMD-Instinct-MI250X", 64, 191, 1600, 50),
        gpu_of("AMD-Instinct-MI250X-MI250", 64, 181, 1600, 50),
        gpu_of("AMD-Instinct-MI300A", 128, 980, 5300, 384),
        gpu_of("AMD-Instinct-MI300X-OAM", 192, 1307, 5300, 448),
        gpu_of("AMD-Instinct-MI300X-HF", 192, 1307, 5300, 448),
        gpu_of("AMD-Instinct-MI325X-OAM", 256, 1307, 6000, 448),
        gpu_of("AMD-Instinct-MI350X-OAM", 288, 2307, 8000, 537),
        gpu_of("AMD-Instinct-MI355X-OAM", 288, 2517, 8000, 537),
    )
}
_UNKNOWN_GPU = gpu_of("GPU", 0, 120, 900, 32)

HOST_LINK = 25 * GB  # between a GPU and its machine's memory
CORE_FLOPS = 30e9  # of a CPU core, float32


def gpu(name: str, kinds: Mapping[str, Device] | None = None) -> Device:
    """A GPU by Ray's name, as `kinds` or else the table have it.

    For one that is in neither, cautious numbers without memory.
    """
    return (kinds or {}).get(name) or _GPUS.get(name, _UNKNOWN_GPU)


def cpu(cores: float) -> Device:
    """A machine's cores as one device; 10 Gbit Ethernet between machines."""
    # flops are given as bf16's, of which float32 gets FLOAT32_SHARE.
    return Device(
        "CPU",
        memory_gib=0,
        flops=cores * CORE_FLOPS / FLOAT32_SHARE / EFFICIENCY,
        bandwidth=20 * GB,
        link=5 * GB,
        network=1.25 * GB,
        latency_s=100e-6,
        network_latency_s=300e-6,
        kernel_s=100e-6,
    )
