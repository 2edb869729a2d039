"""What a device is to everybody else: tickets, slabs and copies on lanes (floor 0).

[Note: one ordering rule]  Who reads bytes that a lane writes waits for the copy's ticket;
who overwrites bytes passes the ticket of their last reader as ``after``. There is no other
synchronisation anywhere.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetero.config import HostLimit
from hetero.internals import storage_uses
from hetero.types import Lane

POISON = 0xFF  # a NaN in every float format, -1 in every int format
ALONE = 2  # uses of a storage: the tensor asked about, and the handle asked through
LINE = 64  # bytes to which torch aligns what it allocates
SMALL = 64 * 2**10  # bytes of a slab that is not worth a mapping
HUGE = 4 * 2**20  # bytes of a slab from which huge pages are asked for
HUGE_PAGE = 2 * 2**20
PROBE_BYTES = 16 * 2**20  # a copy of so many bytes tells a link's rate
COPY_LANES = (Lane.H2D, Lane.D2H)
OPPOSITE = {Lane.H2D: Lane.D2H, Lane.D2H: Lane.H2D}


class Ticket:
    """Handle of something asynchronous; ``end`` is its end in seconds of the device's clock."""

    __slots__ = ("_begin", "_end", "_timing", "done", "end", "event", "lane")

    def __init__(
        self, lane: Lane, end: float, *, done: bool = False, event: torch.cuda.Event | None = None
    ) -> None:
        self.lane = lane
        self.end = end
        self.done = done
        self.event = event
        self._begin = self._end = 0.0
        self._timing: Timing | None = None

    def was(self, begin: float, end: float) -> Ticket:
        """Note when it was, in seconds of `Device.clock`, as far as is known."""
        self._begin, self._end = begin, end
        return self

    def ended(self, end: float) -> None:
        """Note its end, where its begin was noted before."""
        self._end = end

    def time_by(self, timing: Timing) -> None:
        """Let the device say when it was."""
        self._timing = timing

    def span(self) -> tuple[float, float]:
        """Return begin and end in seconds of `Device.clock`; on CUDA this waits for the end."""
        if self._timing is None or self.event is None:
            return self._begin, max(self._begin, self._end)
        self.event.synchronize()
        first, anchor, seconds = self._timing
        begin = seconds + float(anchor.elapsed_time(first)) / 1000
        return begin, begin + float(first.elapsed_time(self.event)) / 1000


class Timing(NamedTuple):
    """The event at which a copy began, and one whose time on the host's clock is known."""

    first: torch.cuda.Event
    anchor: torch.cuda.Event
    anchor_seconds: float


Stall = tuple[float, float | Ticket]  # begin and end (or who knows both) of standing still


class Move(NamedTuple):
    """One copy."""

    dst: torch.Tensor
    src: torch.Tensor


class Accelerator(NamedTuple):
    """What a device says it is."""

    name: str
    arch: str
    """Compute capability, as "sm_90"."""
    multiprocessors: int
    total_bytes: int


class Device(Protocol):
    """What the mechanism may ask of a device. Bytes are 1-D uint8 tensors."""

    name: str
    torch_device: torch.device
    same_ram: bool
    is_cuda: bool
    """Whether it is a CUDA device, or stands for one."""
    has_bytes: bool
    """Whether there is memory behind its tensors; if not, they are on the meta device."""
    cheap_slabs: bool
    """Whether a slab may come and go with every step; page-locking one takes long."""

    def slab(self, n_bytes: int) -> Slab:
        """Return zeroed HOST memory, page-locked where that means something."""

    def paged_slab(self, n_bytes: int) -> Slab:
        """Return HOST memory whose pages come and go one by one, for what lies on disk."""

    def arena(self, n_bytes: int) -> Slab:
        """Return device memory for frames; its storages are carved by `Slab.carve`."""

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        """Queue a copy of equally many bytes on a lane, after the tickets ``after``."""

    def wait(self, ticket: Ticket) -> Stall | None:
        """Make compute that is queued from now on run after the ticket; returns the stall."""

    def sync(self, ticket: Ticket) -> Stall | None:
        """Block the host until the ticket is done; returns the stall."""

    def query(self, ticket: Ticket) -> bool:
        """Return whether the ticket is done, without blocking."""

    def mark(self) -> Ticket:
        """Return a ticket for all compute queued so far."""

    def touched(self, n_bytes: int) -> None:
        """Note that compute reads and writes so many bytes, where no clock of operations looks."""

    def stamp(self) -> Ticket:
        """Return a mark whose time `seconds_between` can tell."""

    def seconds_between(self, first: Ticket, second: Ticket) -> float:
        """Return the time that compute took between two stamps; waits for the second."""

    def copy_seconds(self, lane: Lane, n_bytes: int) -> float:
        """Return how long a copy of ``n_bytes`` takes on a lane that is free, as measured."""

    def lane_seconds(self, lane: Lane, moves: Sequence[Move], beside: Sequence[Move] = ()) -> float:
        """Return what copies take one after another, with nothing of the host's between them.

        Those of ``beside`` are on the other lane all the while, over and over; where copies are
        done by whoever asks for them, both take turns.
        """

    def facts(self) -> Accelerator | None:
        """Return what the device is; None where it is the processor."""

    def reserved_bytes(self) -> int:
        """Return what torch's allocator keeps of HBM; 0 where it is RAM."""

    def poison(self, dst: torch.Tensor) -> None:
        """Fill bytes that must not be read with NaN."""

    def check_read(self, src: torch.Tensor) -> None:
        """Raise TransferError where a copy into ``src`` is known to be still queued."""

    def now(self) -> float:
        """Return seconds of the device's clock."""

    def clock(self) -> float:
        """Return seconds for the event log: of the host, or virtual ones where time is modelled."""

    def watch(self, on: bool) -> None:
        """Let the device say from here on when its copies and marks were, or stop that."""

    def annotate(self, name: str) -> object:
        """Begin a range of that name for the vendor's profiler; returns its handle."""

    def end_annotation(self, handle: object) -> None:
        """End a range, on any thread."""

    def total_bytes(self) -> int | None:
        """Return the physical size of HBM; None where it is RAM."""

    def free_bytes(self) -> int | None:
        """Return what other users of the device leave of HBM; None where it is RAM."""

    def host_limit(self) -> HostLimit:
        """Return how much RAM this process may still take, and who says so."""

    def reset_peak(self) -> None:
        """Start a new measurement of the allocator's peak."""

    def allocated_peak(self) -> int | None:
        """Return the allocator's peak since `reset_peak`; None where there is no such count."""

    def close(self) -> None:
        """Finish everything queued."""


@dataclass(slots=True)
class Slab:
    """A block of memory of exactly ``n_bytes``, cut into storages of their own by `carve`."""

    n_bytes: int
    block: torch.Tensor
    mapping: mmap.mmap | None = None
    registered: bool = False
    heap: npt.NDArray[np.uint8] | None = None
    """The memory of a small one, which is not mapped."""
    first: int = 0
    """Byte of the mapping where the block begins."""

    def __del__(self) -> None:
        # Registered pages must be given back before the mapping goes; at exit the driver is gone.
        if self.registered and not sys.is_finalizing() and torch.cuda.is_available():
            release_slab(self)

    def carve(self, offset: int, n_bytes: int) -> torch.Tensor:
        """Return bytes [offset, offset + n_bytes) as a tensor with its own StorageImpl.

        Two carvings of the same range are two storages, so each one's use count tells whether
        a view of it is alive.
        """
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.block.device)
        memory = self.mapping if self.heap is None else self.heap
        if memory is not None:
            at = self.first + offset
            return torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes, offset=at)
        piece = self.block[offset : offset + n_bytes]
        return torch.utils.dlpack.from_dlpack(piece)

    def give_back(self, offset: int) -> None:
        """Let the system have the whole pages from ``offset`` on, until they are written again.

        Nothing may read or write there meanwhile; of memory that is not mapped nothing goes.
        """
        first = self.first + -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self.first + self.n_bytes
        if self.mapping is not None and first < end and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED, first, len(self.mapping) - first)


def map_slab(n_bytes: int, *, huge: bool = True, align: int = 1) -> Slab:
    """Map zeroed anonymous memory of exactly ``n_bytes``; pages cost RAM when first touched.

    With ``align`` it begins at a multiple of so many bytes: addresses before it are never touched.
    """
    # Private: a forked child gets copies of its own, as it does of torch's memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, max(n_bytes, 1) + align - 1, flags=flags)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -whole.data_ptr() % align
    if huge and n_bytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:  # updates stream through homes: a page table entry for 2 MiB, not for 4 KiB
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            pass
    return Slab(n_bytes, whole[first : first + max(n_bytes, 1)], mapping, first=first)


def paged_slab(n_bytes: int) -> Slab:
    """Map memory for a home on disk, whose pages come and go by extents.

    Huge pages are asked for where extents are whole ones, which takes an address that is a multiple
    of theirs: an extent is then one fault, and not 512 (`pool._ask_for_pages`).
    """
    return map_slab(n_bytes, huge=False, align=HUGE_PAGE if n_bytes >= HUGE_PAGE else 1)


def heap_slab(n_bytes: int) -> Slab:
    """Return zeroed memory of the heap: to map a few pages takes longer than to use them."""
    whole = np.zeros(max(n_bytes, 1) + LINE, dtype=np.uint8)  # which no meter of torch's counts
    first = -whole.ctypes.data % LINE
    memory = whole[first : first + max(n_bytes, 1)]
    return Slab(n_bytes, torch.frombuffer(memory, dtype=torch.uint8), heap=memory)


def release_slab(slab: Slab) -> None:
    """Undo page-locking; the memory itself goes when its last tensor does."""
    if slab.registered:
        torch.cuda.cudart().cudaHostUnregister(slab.block.data_ptr())
        slab.registered = False


def use_count(piece: torch.Tensor) -> int:
    """Return how many tensors and handles share the storage of ``piece``."""
    return storage_uses(piece.untyped_storage()._cdata)
