"""Work whose rate measures a machine, for calibrations and benchmarks (floor 4)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from hetero.io import File, aligned_buffer
from hetero.jobs import Job, Worker
from hetero.memory.extent import PinUse
from hetero.train.update import kernel
from hetero.train.update.formulas import formula_of

SIZE = 4 * 2**20  # bytes of one transfer
SLICE = 2**20  # elements that one thread updates at once
ADAMW = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}


class Split:
    """AdamW on a split master: 12 bytes per parameter, and its bf16 gradient."""

    def __init__(self, numel: int, device: str) -> None:
        self.param = torch.empty(numel, dtype=torch.bfloat16, device=device)
        self.low = torch.empty(numel, dtype=torch.int16, device=device)
        kernel.split_(torch.randn(numel, device=device), self.param, self.low)
        self.states = [torch.zeros(numel, device=device) for _ in range(2)]
        self.grad = torch.randn(numel, device=device).bfloat16()
        self.steps = 0.0
        self._size = SLICE if device == "cpu" else max(1, numel)  # a device takes all at once

    def step(self, native: kernel.Native | None, worker: Worker) -> None:
        """Update all of it in slices, on the worker's threads and this one."""
        formula = formula_of(torch.optim.AdamW)
        if formula is None:
            return
        numbers, after = formula.coefficients(ADAMW, {"step": self.steps}, False)
        self.steps = after["step"]
        slices = [partial(self._update, formula, numbers, at, native) for at in self._starts()]
        worker.submit(Job(slices)).wait()

    def _starts(self) -> range:
        return range(0, self.param.numel(), self._size)

    def _update(self, formula: Any, numbers: Any, at: int, native: kernel.Native | None) -> None:
        cut = slice(at, at + self._size)
        kernel.update(
            formula,
            numbers,
            param=self.param[cut],
            low=self.low[cut],
            grad=self.grad[cut],
            states=[s[cut] for s in self.states],
            factors=(0.5,),
            native=native,
        )


def raw(file: File, use: PinUse, n_threads: int, n_bytes: int, size_bytes: int = SIZE) -> float:
    """Return the bytes per second of moving ``n_bytes`` and doing nothing else.

    For `PinUse.WRITE` every block of ``size_bytes`` is read and then written, as an update does.
    """
    n_blocks = n_bytes // size_bytes
    buffers = [aligned_buffer(size_bytes) for _ in range(n_threads)]

    def work(thread: int) -> None:
        for at in range(thread, n_blocks, n_threads):
            if use is not PinUse.FRESH:
                file.read(at * size_bytes, buffers[thread])
            if use is not PinUse.READ:
                file.write(at * size_bytes, buffers[thread])

    with ThreadPoolExecutor(n_threads) as executor:
        began = time.perf_counter()
        list(executor.map(work, range(n_threads)))
        seconds = time.perf_counter() - began
    return (2 if use is PinUse.WRITE else 1) * n_blocks * size_bytes / seconds
