"""The interface of devices: tickets, slabs and copies on lanes (floor 0).

[Note: one ordering rule]  A reader of bytes that a lane writes waits for the copy's ticket; a
writer passes the ticket of the bytes' last reader as ``after``. There is no other synchronisation.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetero.config import HostLimit
from hetero.errors import ConfigError
from hetero.forks import is_absent
from hetero.internals import capsule_of, storage_uses
from hetero.types import Lane, format_bytes

POISON = 0xFF  # a NaN in every float format, -1 in every int format
ALONE = 2  # uses of a storage: the tensor, and the handle through which it is counted
LINE = 64  # bytes to which torch aligns its allocations
SMALL = 64 * 2**10  # smaller slabs are not worth a mapping
HUGE = 4 * 2**20  # slabs of so many bytes ask for huge pages
HUGE_PAGE = 2 * 2**20
PROBE_BYTES = 16 * 2**20  # copied to measure a link's rate
COPY_LANES = (Lane.H2D, Lane.D2H)  # the link between device and HOST
LANES = (*COPY_LANES, Lane.D2D)
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
        """Note its begin and end, in seconds of `Device.clock`; an end before its begin stands for
        one that is not known yet."""
        self._begin, self._end = begin, end
        return self

    @property
    def is_known(self) -> bool:
        """Whether `span` tells when it was, at once or after waiting for it."""
        return self._timing is not None or self._end >= self._begin

    def time_by(self, timing: Timing) -> None:
        """Take begin and end from the device's events."""
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
    """The event at which a copy began, and an anchor whose time on the host's clock is known."""

    first: torch.cuda.Event
    anchor: torch.cuda.Event
    anchor_seconds: float


Stall = tuple[float, float | Ticket]  # begin and end, or a ticket that knows both


class Move(NamedTuple):
    """One copy."""

    dst: torch.Tensor
    src: torch.Tensor


class Accelerator(NamedTuple):
    """A device's own description."""

    name: str
    arch: str
    """Compute capability, as "sm_90"."""
    multiprocessors: int
    total_bytes: int
    uuid: str = ""
    """No other device has it."""


class DeviceMemory(Protocol):
    """The counts of HBM."""

    def total_bytes(self) -> int | None:
        """Return its physical size; None if it is RAM."""

    def free_bytes(self) -> int | None:
        """Return the bytes that are free for any process; None if it is RAM."""

    def reserved_bytes(self) -> int:
        """Return the bytes that torch's allocator keeps; 0 if HBM is RAM."""

    def hold_for_compute(self, memory: torch.Tensor) -> None:
        """Let memory of torch's allocator serve others only after all streams that compute."""

    def reset_peak(self) -> None:
        """Start a new measurement of the allocator's peak."""

    def allocated_peak(self) -> int | None:
        """Return the allocator's peak since `reset_peak`; None without such a count."""

    def allocated_bytes(self) -> int | None:
        """Return the bytes of the allocator's tensors now; None without such a count."""


class Device(Protocol):
    """The only calls that the mechanism makes on a device. Bytes are 1-D uint8 tensors."""

    name: str
    torch_device: torch.device
    same_ram: bool
    """Whether compute works on HOST's memory itself, and copies are immediate."""
    shares_ram: bool
    """Whether HBM is a part of RAM, so that what one takes the other has not."""
    is_cuda: bool
    """Whether it is a CUDA device, or stands for one."""
    has_bytes: bool
    """Whether its tensors have memory; if not, they are on the meta device."""
    align_bytes: int
    """Kernels of plain torch find tensors at multiples of it, and may choose by that."""
    is_modelled: bool
    """Whether its time is virtual: then no other thread of ours uses it."""
    cheap_slabs: bool
    """Whether a slab may be made in every step; page-locking one takes long."""

    @property
    def memory(self) -> DeviceMemory:
        """The counts of its HBM."""

    def slab(self, n_bytes: int, *, travels: bool = True) -> Slab:
        """Return zeroed HOST memory. If it ``travels``, CUDA page-locks it as far as it may."""

    def lock(self, memory: torch.Tensor, slab: Slab | None = None) -> Callable[[], None] | None:
        """Page-lock memory that processes share, or a part of a ``slab``, as far as it may be;
        return what undoes that, before the memory goes."""

    def stages_bytes(self, largest_bytes: int, pinned: int | None) -> int:
        """Return the HOST bytes of stages for copies of memory that may not be page-locked, of at
        most ``largest_bytes`` each, if ``pinned`` bytes may be; 0 if copies need none."""

    def open_stages(self, n_bytes: int, pinned: int | None) -> None:
        """Make these stages; slabs from now on and they are page-locked up to ``pinned`` bytes."""

    def close_stages(self) -> None:
        """Give the stages back."""

    def locked_bytes(self) -> int:
        """Return the bytes of HOST that are page-locked."""

    def paged_slab(self, n_bytes: int) -> Slab:
        """Return HOST memory for homes on disk, whose pages come and go one by one."""

    def arena(self, n_bytes: int) -> Slab:
        """Return device memory for frames; `Slab.carve` cuts it into storages."""

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        """Queue a copy of equally many bytes on a lane, after the tickets ``after``."""

    def is_direct(self, memory: torch.Tensor) -> bool:
        """Whether copies of these bytes of HOST go without stages."""

    def on_side_stream(
        self, lane: Lane, work: Callable[[], object], after: Iterable[Ticket], n_bytes: int
    ) -> Ticket:
        """Queue operations on the device's tensors on REDUCE or UPDATE, after tickets and in no
        order with compute; any thread may. They read and write ``n_bytes``."""

    def wait(self, ticket: Ticket) -> Stall | None:
        """Make compute that is queued from now on run after the ticket; returns the stall."""

    def sync(self, ticket: Ticket) -> Stall | None:
        """Block the host until the ticket is done; returns the stall."""

    def query(self, ticket: Ticket) -> bool:
        """Return whether the ticket is done, without blocking."""

    def mark(self) -> Ticket:
        """Return a ticket for all compute queued so far, on the stream of the last `in_order`."""

    def in_order(self) -> None:
        """Let compute that is queued from now on, on whatever stream is current, come after that of
        the stream on which this was called before: a model may compute on streams of its own."""

    def refuse_capture(self) -> None:
        """Raise StateError while a CUDA graph is captured on the current stream."""

    def bring_down(self, src: torch.Tensor, after: Ticket) -> torch.Tensor:
        """Return a copy on HOST, made after a ticket; any thread may, in no order with compute."""

    def touched(self, n_bytes: int) -> None:
        """Note bytes that compute reads and writes, unseen by any clock of operations."""

    def stamp(self) -> Ticket:
        """Return a mark for `seconds_between`."""

    def seconds_between(self, first: Ticket, second: Ticket) -> float:
        """Return the time that compute took between two stamps; waits for the second."""

    def copy_seconds(self, lane: Lane, n_bytes: int) -> float:
        """Return the measured time of a copy of ``n_bytes`` on a free lane."""

    def lane_seconds(self, lane: Lane, moves: Sequence[Move], beside: Sequence[Move] = ()) -> float:
        """Return the time of copies one after another, without the host's overhead.

        Those of ``beside`` run on the other lane meanwhile, over and over; on a device with
        immediate copies, both take turns.
        """

    def facts(self) -> Accelerator | None:
        """Return the device's description; None for the processor."""

    def poison(self, dst: torch.Tensor) -> None:
        """Fill bytes that must not be read with NaN."""

    def check_read(self, src: torch.Tensor) -> None:
        """Raise TransferError if a copy into ``src`` is known to be still queued."""

    def now(self) -> float:
        """Return seconds of the device's clock."""

    @property
    def clock(self) -> Callable[[], float]:
        """What returns seconds for the event log: of the host, or virtual if time is modelled."""

    def aside(self) -> AbstractContextManager[None]:
        """Where time is virtual, let it pass inside a block as on a thread of its own."""

    def watch(self, on: bool) -> None:
        """Begin, or stop, to time copies and marks on the device."""

    def annotate(self, name: str) -> object:
        """Begin a range of that name for the vendor's profiler; returns its handle."""

    def end_annotation(self, handle: object) -> None:
        """End a range, on any thread."""

    def host_limit(self) -> HostLimit:
        """Return how much RAM this process may still take, and the source of that limit."""

    def close(self) -> None:
        """Finish everything queued."""


@dataclass(slots=True)
class Slab:
    """A block of memory of exactly ``n_bytes``; `carve` cuts it into storages."""

    n_bytes: int
    block: torch.Tensor
    mapping: mmap.mmap | None = None
    unlock: Callable[[], None] | None = None
    """Undoes page-locking; None if it is not page-locked."""
    heap: npt.NDArray[np.uint8] | None = None
    """The memory of a small slab, which is not mapped."""
    first: int = 0
    """Byte of the mapping where the block begins."""

    def __del__(self) -> None:
        # before the mapping goes; at exit the driver is gone
        if self.unlock is not None and not sys.is_finalizing():
            release_slab(self)

    @property
    def registered(self) -> bool:
        """Whether it is page-locked."""
        return self.unlock is not None

    @property
    def is_absent(self) -> bool:
        """Whether this is a forked child, which has none of its memory: see [Note: forks]."""
        return is_absent(self.mapping)

    def carve(self, offset: int, n_bytes: int) -> torch.Tensor:
        """Return bytes [offset, offset + n_bytes) as a tensor with its own StorageImpl.

        Two carvings of one range are two storages, each with a use count of its views."""
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.block.device)
        memory = self.mapping if self.heap is None else self.heap
        if memory is not None:
            at = self.first + offset
            return torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes, offset=at)
        piece = self.block[offset : offset + n_bytes]
        # by a capsule: a tensor is refused unless its device is the thread's current one
        return torch.utils.dlpack.from_dlpack(capsule_of(piece))

    def give_back(self, offset: int) -> None:
        """Give the system the whole pages from ``offset`` on, until they are written again. No copy
        may use them meanwhile. Memory that is not mapped stays."""
        first = self.first + -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self.first + self.n_bytes
        if self.mapping is not None and first < end and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED, first, len(self.mapping) - first)


def map_slab(n_bytes: int, *, huge: bool = True, align: int = 1) -> Slab:
    """Map zeroed anonymous memory of exactly ``n_bytes``; pages cost RAM when first touched. It
    begins at a multiple of ``align`` bytes; addresses before it are never touched."""
    # Private: a forked child gets its own copies, as of torch's memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, max(n_bytes, 1) + align - 1, flags=flags)
    except OSError as error:
        raise ConfigError(
            f"the system has no {format_bytes(n_bytes)} of RAM to map: {error.strerror}",
            advice="lower hbm=, which is RAM on cpu and cpu:sim, or host=",
        ) from error
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -whole.data_ptr() % align
    if huge and n_bytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:  # updates stream through homes: fewer page table entries
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            pass
    return Slab(n_bytes, whole[first : first + max(n_bytes, 1)], mapping, first=first)


def paged_slab(n_bytes: int) -> Slab:
    """Map memory for a home on disk, whose pages come and go by extents; aligned to huge pages,
    which save 511 of 512 faults (`pagecache.ask_for_pages`)."""
    return map_slab(n_bytes, huge=False, align=HUGE_PAGE if n_bytes >= HUGE_PAGE else 1)


def heap_slab(n_bytes: int) -> Slab:
    """Return zeroed memory of the heap: mapping a few pages takes longer than using them."""
    whole = np.zeros(max(n_bytes, 1) + LINE, dtype=np.uint8)  # not counted by torch's meters
    first = -whole.ctypes.data % LINE
    memory = whole[first : first + max(n_bytes, 1)]
    return Slab(n_bytes, torch.frombuffer(memory, dtype=torch.uint8), heap=memory)


def release_slab(slab: Slab) -> None:
    """Undo page-locking, after every copy; the memory itself goes when its last tensor does."""
    unlock, slab.unlock = slab.unlock, None
    if unlock is not None:
        unlock()


def use_count(piece: torch.Tensor) -> int:
    """Return how many tensors and handles share the storage of ``piece``."""
    return storage_uses(piece.untyped_storage()._cdata)
