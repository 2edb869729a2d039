"""Page-locked memory: slabs that are registered with CUDA.

[Note: forks]  A fork shares pages between parent and child. CUDA copies to and from the parent's
pages, so the kernel copies all page-locked ones at the fork, or else the first write moves one of
the two elsewhere. So registered slabs stay out of children: a worker of a DataLoader forks at the
speed of a process without them.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from hetero.device.face import Slab
from hetero.types import format_bytes


class LockedMemory:
    """The page-locked slabs of one device; ``settle`` waits for all its copies."""

    def __init__(self, place: torch.device, settle: Callable[[], None]) -> None:
        self._place = place
        self._settle = settle
        self._sizes: dict[int, int] = {}  # by address
        self._pid = os.getpid()
        self._told = False

    @property
    def n_bytes(self) -> int:
        """The bytes that are page-locked."""
        return sum(self._sizes.values())

    def lock(self, slab: Slab) -> None:
        """Page-lock a mapped slab. If CUDA refuses it stays pageable, and the user is told."""
        first, n_bytes, mapping = slab.block.data_ptr(), slab.block.numel(), slab.mapping
        if mapping is None:
            return
        if int(torch.cuda.cudart().cudaHostRegister(first, n_bytes, 0)) != 0:
            self._refused(n_bytes)
            return
        self._sizes[first] = n_bytes
        advise(mapping, "MADV_DONTFORK")  # see [Note: forks]
        slab.unlock = partial(self._unlock, first, mapping)

    def _unlock(self, first: int, mapping: mmap.mmap) -> None:
        """Undo a registration, unless this is a child, which has none."""
        if self._pid != os.getpid():
            return
        self._settle()
        torch.cuda.cudart().cudaHostUnregister(first)
        del self._sizes[first]
        advise(mapping, "MADV_DOFORK")

    def _refused(self, n_bytes: int) -> None:
        """Forget CUDA's error, and warn."""
        # It is reported by the next launch, whichever that is, and torch binds no cudaGetLastError.
        with suppress(RuntimeError):
            torch.empty(1, device=self._place).fill_(0.0)
        if not self._told:
            warnings.warn(
                f"CUDA refused to page-lock {format_bytes(n_bytes)} beside"
                f" {format_bytes(self.n_bytes)}: copies of that memory are slower, and the results"
                " are the same; `hetero doctor` shows how much may be page-locked",
                stacklevel=2,
            )
        self._told = True


def advise(mapping: mmap.mmap, name: str) -> None:
    """Give the kernel an advice on a mapping, where there is one of this name."""
    if hasattr(mmap, name):
        mapping.madvise(getattr(mmap, name))
