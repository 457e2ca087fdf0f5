"""What devices can do, in round numbers: enough to rank layouts, not to predict seconds.

Peaks are the vendors' data sheets', dense, without sparsity. A device gets `EFFICIENCY` of its
arithmetic and `STREAMED` of its memory bandwidth. Ray's names of accelerators are
`ray.util.accelerators`'.
"""

from __future__ import annotations

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
    latency_s: float = 20e-6  # of one collective on one machine
    network_latency_s: float = 60e-6
    kernel_s: float = 40e-6  # of a decoder layer that has next to nothing to do


def _gpu(name: str, gib: float, tflops: float, memory_gbs: float, link_gbs: float) -> Device:
    return Device(name, gib, tflops * 1e12, memory_gbs * GB, link_gbs * GB, network=12.5 * GB)


_GPUS = {
    device.name: device
    for device in (
        _gpu("V100", 16, 125, 900, 150),
        _gpu("T4", 16, 65, 320, 16),
        _gpu("A10G", 24, 70, 600, 32),
        _gpu("L4", 24, 121, 300, 32),
        _gpu("L40S", 48, 362, 864, 32),
        _gpu("A100", 40, 312, 1555, 300),
        _gpu("A100-40G", 40, 312, 1555, 300),
        _gpu("A100-80G", 80, 312, 2039, 300),
        _gpu("H100", 80, 989, 3350, 450),
        _gpu("H200", 141, 989, 4800, 450),
        _gpu("H20", 96, 148, 4000, 450),
        _gpu("B200", 180, 2250, 8000, 900),
        _gpu("AMD-Instinct-MI210", 64, 181, 1600, 50),
        _gpu("AMD-Instinct-MI250X", 64, 191, 1600, 50),
        _gpu("AMD-Instinct-MI300X-OAM", 192, 1307, 5300, 448),
        _gpu("AMD-Instinct-MI325X-OAM", 256, 1307, 6000, 448),
    )
}
_UNKNOWN_GPU = _gpu("GPU", 0, 120, 900, 32)

HOST_LINK = 25 * GB  # between a GPU and its machine's memory
CORE_FLOPS = 30e9  # of a CPU core, float32


def gpu(name: str) -> Device:
    """A GPU by Ray's name; for one that isn't listed, cautious numbers without memory."""
    return _GPUS.get(name, _UNKNOWN_GPU)


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
