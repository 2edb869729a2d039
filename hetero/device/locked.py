"""Page-locked memory: slabs that are registered with CUDA, within a budget."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from hetero.device.face import Slab, map_slab
from hetero.forks import keep_out, let_in
from hetero.types import format_bytes

ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class LockedMemory:
    """The page-locked slabs of one device; ``settle`` waits for all copies on its lanes."""

    def __init__(self, place: torch.device, settle: Callable[[], None]) -> None:
        self.limit: int | None = None
        """Bytes that may be page-locked; None: as many as CUDA lets us."""
        self.n_bytes = 0
        """Bytes that are page-locked."""
        self._place = place
        self._settle = settle
        self._wall: int | None = None  # so many bytes were refused
        self._ranges: tuple[list[int], list[int]] = [], []  # first addresses and ends, ascending
        self._changing = threading.RLock()  # a finalizer may come at any time
        self._pid = os.getpid()
        self._told = False

    def slab(self, n_bytes: int) -> Slab:
        """Return a new slab, page-locked if the limit has room for it and CUDA does not refuse."""
        # torch's page-locked allocator rounds up to powers of two; mapping and registering do not
        slab = map_slab(n_bytes)
        mapping = slab.mapping
        first, size = slab.block.data_ptr(), slab.block.numel()
        if mapping is not None and self._has_room(size):
            slab.block.zero_()  # threads touch its pages: CUDA, which would, has one for it
        if mapping is not None and self._register(first, first + size):
            keep_out(mapping)
            slab.unlock = partial(self._unlock, first, mapping)
        return slab

    def lock(self, memory: torch.Tensor, slab: Slab | None = None) -> Callable[[], None] | None:
        """Page-lock the pages of memory under the same conditions; return what undoes it. Processes
        share it, and no fork copies it; or it is a part of a ``slab``, which stays out of children.
        """
        first, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        first, end = first - first % mmap.PAGESIZE, end + -end % mmap.PAGESIZE
        if not memory.numel() or not self._register(first, end):
            return None
        mapping = None if slab is None else slab.mapping
        if mapping is not None:
            keep_out(mapping)
        return partial(self._unlock, first, mapping)

    def _register(self, first: int, end: int) -> bool:
        n_bytes = end - first
        with self._changing:
            if not self._has_room(n_bytes):
                return False
            with torch.cuda.device(self._place):  # no context on another one, for its HBM
                error = int(torch.cuda.cudart().cudaHostRegister(first, n_bytes, 0))
            if error:
                self._refused(n_bytes, is_wall=error != ALREADY_REGISTERED)
                return False
            self.n_bytes += n_bytes
            starts, ends = (each.copy() for each in self._ranges)
            at = bisect_right(starts, first)
            starts.insert(at, first)
            ends.insert(at, end)
            self._ranges = starts, ends
        return True

    def holds(self, piece: torch.Tensor) -> bool:
        """Whether bytes are page-locked."""
        starts, ends = self._ranges
        first = piece.data_ptr()
        at = bisect_right(starts, first) - 1
        return at >= 0 and first + piece.numel() <= ends[at]

    def _has_room(self, n_bytes: int) -> bool:
        after = self.n_bytes + n_bytes
        return not (
            (self.limit is not None and after > self.limit)
            or (self._wall is not None and after >= self._wall)
        )

    def _unlock(self, first: int, mapping: mmap.mmap | None) -> None:
        """Undo a registration, unless this is a child, which has none."""
        if self._pid != os.getpid():
            return
        self._settle()
        with self._changing:
            with torch.cuda.device(self._place):
                torch.cuda.cudart().cudaHostUnregister(first)
            starts, ends = (each.copy() for each in self._ranges)
            at = bisect_left(starts, first)
            self.n_bytes -= ends.pop(at) - starts.pop(at)
            self._ranges = starts, ends
        if mapping is not None:
            let_in(mapping)

    def _refused(self, n_bytes: int, *, is_wall: bool) -> None:
        """Forget CUDA's error; if it was too much, remember that, and warn."""
        # It is reported by the next launch, whichever that is, and torch binds no cudaGetLastError.
        with suppress(RuntimeError):
            torch.empty(1, device=self._place).fill_(0.0)
        if not is_wall:  # others hold a part of these pages: that says nothing of how much may be
            return
        self._wall = self.n_bytes + n_bytes
        if not self._told:
            warnings.warn(
                f"CUDA refused to page-lock {format_bytes(n_bytes)} of RAM on top of"
                f" {format_bytes(self.n_bytes)} that are: the rest is copied through a ring of"
                " stages, with the same results; pinned= keeps below such a wall, and `hetero"
                " doctor` finds it",
                stacklevel=2,
            )
        self._told = True
