"""The only door to CUDA, and its fake twins (floor 0).

Three backends behind one face: ``CudaDevice``; ``CpuDevice``, where HBM and HOST are the same RAM;
and ``SimDevice``, whose copies are late on purpose.
"""

from __future__ import annotations

import torch

from hetero.device.cpu import CpuDevice
from hetero.device.cuda import CUDA_ALIGN_BYTES, CudaDevice
from hetero.device.face import (
    ALONE,
    COPY_LANES,
    HUGE_PAGE,
    LANES,
    OPPOSITE,
    POISON,
    Accelerator,
    Device,
    Move,
    Slab,
    Stall,
    Ticket,
    map_slab,
    paged_slab,
    release_slab,
    use_count,
)
from hetero.device.memory import UncountedMemory
from hetero.device.nvrtc import CudaKernel, NoKernel, Toolchain, open_toolchain
from hetero.device.process import (
    Allocated,
    Fragments,
    accelerator_name,
    accelerator_rng,
    allocated,
    check_accelerator_rng,
    checked_rng,
    finish_compute,
    first_line,
    fragments,
    large_blocks_apart,
    n_accelerators,
    return_large_blocks,
    set_accelerator_rng,
    trim_heap,
    unseen,
    use_accelerator,
)
from hetero.device.sim import SimDevice
from hetero.device.staging import N_STAGES, StagedTicket, Staging, lane_threads, stages_bytes
from hetero.errors import ConfigError

__all__ = [
    "ALONE",
    "Accelerator",
    "Allocated",
    "COPY_LANES",
    "CUDA_ALIGN_BYTES",
    "CpuDevice",
    "CudaDevice",
    "CudaKernel",
    "Device",
    "Fragments",
    "Move",
    "HUGE_PAGE",
    "LANES",
    "N_STAGES",
    "NoKernel",
    "OPPOSITE",
    "POISON",
    "SimDevice",
    "Slab",
    "StagedTicket",
    "Staging",
    "Stall",
    "Ticket",
    "Toolchain",
    "UncountedMemory",
    "accelerator_name",
    "accelerator_rng",
    "allocated",
    "check_accelerator_rng",
    "checked_rng",
    "finish_compute",
    "first_line",
    "fragments",
    "lane_threads",
    "large_blocks_apart",
    "map_slab",
    "n_accelerators",
    "paged_slab",
    "open_device",
    "open_toolchain",
    "release_slab",
    "return_large_blocks",
    "set_accelerator_rng",
    "stages_bytes",
    "trim_heap",
    "unseen",
    "use_accelerator",
    "use_count",
]


def open_device(spec: object = None) -> Device:
    """Return the device that a `Config.device` names; a device is returned as it is."""
    if spec is None:
        spec = "cuda" if torch.cuda.is_available() else "cpu"
    if spec == "cpu":
        return CpuDevice()
    if spec == "cpu:sim":
        return SimDevice()
    if spec == "cuda":
        return CudaDevice()
    if isinstance(spec, (CpuDevice, CudaDevice)):
        return spec
    raise ConfigError(f"device={spec!r} is unknown", advice="use 'cuda', 'cpu' or 'cpu:sim'")
