"""What a process that does nothing else takes of CUDA devices: ``python -m tests.gpu.alone NAME``.

Each prints one number.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import nn

import hetero
from hetero.device import CudaDevice
from hetero.types import Lane


def contexts_elsewhere() -> int:
    """Return how many devices other than the second have a context after copies there."""
    torch.cuda.set_device(1)
    device = CudaDevice()
    arena, slab = device.arena(1 << 20), device.slab(1 << 20)
    pageable = torch.ones(1 << 20, dtype=torch.uint8)
    for below in (slab.block, pageable):  # by this thread, and by threads of the lanes
        device.sync(device.copy(Lane.H2D, arena.block, below))
        device.sync(device.copy(Lane.D2H, below, arena.block))
    driver = ctypes.CDLL("libcuda.so.1")
    flags, active = ctypes.c_uint(), ctypes.c_int()
    found = 0
    for index in range(torch.cuda.device_count()):
        assert not driver.cuDevicePrimaryCtxGetState(index, *map(ctypes.byref, (flags, active)))
        found += bool(active.value) and index != 1
    return found


def share_of_libraries() -> float:
    """Return the share of free HBM that libraries and kernels take outside of torch's allocator, in
    the first steps of a model of many kinds of layers."""
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    before = _outside()
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
    model: Any = nn.Sequential(
        nn.Conv1d(256, 256, 3), nn.GroupNorm(8, 256), layer, nn.Linear(256, 9)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(model, optimizer, device="cuda", precision="bf16")
    for _ in range(3):
        x = torch.randn(8, 256, 258, device="cuda", dtype=torch.bfloat16)
        hetero.backward(model(x).float().square().mean())
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (_outside() - before) / free


def _outside() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


if __name__ == "__main__":
    print(vars(sys.modules[__name__])[sys.argv[1]]())
