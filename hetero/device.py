"""The only door to CUDA, and its fake twins (floor 0).

Three backends behind one face: ``CudaDevice``; ``CpuDevice``, where HBM and HOST are the same RAM
and copies are immediate; and ``SimDevice`` ("cpu:sim"), which defers copies on seeded fake
streams, poisons what is not there yet, bounds its HBM arena physically and can model link rates on
a virtual clock. It is the race detector of the tests and a tool for users.

[Note: one ordering rule]  Whoever reads bytes that a lane writes waits for the copy's ticket;
whoever overwrites bytes passes the ticket of their last reader as ``after``. There is no other
synchronisation anywhere.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple, Protocol

import torch

from hetero.config import HostLimit, host_limit
from hetero.errors import ConfigError, TransferError
from hetero.types import Lane

POISON = 0xFF  # a NaN in every float format, -1 in every int format
ALONE = 2  # uses of a storage: the tensor asked about, and the handle asked through
HUGE = 4 * 2**20  # bytes of a slab from which huge pages are asked for
PROBE_BYTES = 16 * 2**20  # a copy of so many bytes tells a link's rate
COPY_LANES = (Lane.H2D, Lane.D2H)
OPPOSITE = {Lane.H2D: Lane.D2H, Lane.D2H: Lane.H2D}
BESIDE = 3  # times as many copies on one lane outlast those on the other
SPIN_CYCLES = 50_000  # of a device's clock while the host queues one copy: 25 us at 2 GHz


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
        """Queue a copy of equally many bytes on a lane, behind ``after``."""

    def wait(self, ticket: Ticket) -> Stall | None:
        """Make compute that is queued from now on run after the ticket; returns the stall."""

    def sync(self, ticket: Ticket) -> Stall | None:
        """Block the host until the ticket is done; returns the stall."""

    def query(self, ticket: Ticket) -> bool:
        """Return whether the ticket is done, without blocking."""

    def mark(self) -> Ticket:
        """Return a ticket for all compute queued so far."""

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
        """Fill bytes that nobody may read with NaN."""

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

    def __del__(self) -> None:
        # Registered pages must be given back before the mapping goes; at exit the driver is gone.
        if self.registered and not sys.is_finalizing() and torch.cuda.is_available():
            release_slab(self)

    def carve(self, offset: int, n_bytes: int) -> torch.Tensor:
        """Return bytes [offset, offset + n_bytes) as a tensor with its own StorageImpl.

        Two carvings of the same range are two storages, so each one's use count tells whether
        somebody still holds a view of it.
        """
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.block.device)
        if self.mapping is not None:
            return torch.frombuffer(self.mapping, dtype=torch.uint8, count=n_bytes, offset=offset)
        piece = self.block[offset : offset + n_bytes]
        return torch.utils.dlpack.from_dlpack(piece)


def map_slab(n_bytes: int, *, huge: bool = True) -> Slab:
    """Map zeroed anonymous memory of exactly ``n_bytes``; pages cost RAM when first touched."""
    # Private: a forked child gets copies of its own, as it does of torch's memory.
    mapping = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and n_bytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:  # updates stream through homes: a page table entry for 2 MiB, not for 4 KiB
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            pass
    return Slab(n_bytes, torch.frombuffer(mapping, dtype=torch.uint8), mapping)


def use_count(piece: torch.Tensor) -> int:
    """Return how many tensors and handles share the storage of ``piece``."""
    return int(torch._C._storage_Use_Count(piece.untyped_storage()._cdata))


class CpuDevice:
    """One memory, and copies that are done when they are asked for: RAM, or a CUDA device's own,
    where the current stream orders them."""

    name = "cpu"
    same_ram = True
    is_cuda = False
    has_bytes = True
    cheap_slabs = True

    def __init__(self, torch_device: torch.device | None = None) -> None:
        self.torch_device = torch_device or torch.device("cpu")
        self._done = Ticket(Lane.COMPUTE, 0.0, done=True)
        self._bytes_per_second: float | None = None

    def slab(self, n_bytes: int) -> Slab:
        return map_slab(n_bytes)

    def paged_slab(self, n_bytes: int) -> Slab:
        return map_slab(n_bytes, huge=False)  # a huge page would span several extents

    def arena(self, n_bytes: int) -> Slab:
        return map_slab(n_bytes)

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        begin = time.monotonic()
        dst.copy_(src)
        return Ticket(lane, 0.0, done=True).was(begin, time.monotonic())

    def wait(self, ticket: Ticket) -> Stall | None:
        return None

    def sync(self, ticket: Ticket) -> Stall | None:
        return None

    def query(self, ticket: Ticket) -> bool:
        return True

    def mark(self) -> Ticket:
        return self._done

    def stamp(self) -> Ticket:
        return Ticket(Lane.COMPUTE, self.now(), done=True)

    def seconds_between(self, first: Ticket, second: Ticket) -> float:
        return second.end - first.end

    def copy_seconds(self, lane: Lane, n_bytes: int) -> float:
        if self._bytes_per_second is None:
            source = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
            target = torch.zeros_like(source)
            start = time.monotonic()
            target.copy_(source)
            self._bytes_per_second = PROBE_BYTES / (time.monotonic() - start)
        return n_bytes / self._bytes_per_second

    def lane_seconds(self, lane: Lane, moves: Sequence[Move], beside: Sequence[Move] = ()) -> float:
        start = time.perf_counter()
        for move, other in zip(moves, cycle(beside or [None])):
            self.sync(self.copy(lane, move.dst, move.src))
            if other is not None:
                self.sync(self.copy(OPPOSITE[lane], other.dst, other.src))
        return time.perf_counter() - start

    def facts(self) -> Accelerator | None:
        return None

    def reserved_bytes(self) -> int:
        return 0

    def poison(self, dst: torch.Tensor) -> None:
        dst.fill_(POISON)

    def check_read(self, src: torch.Tensor) -> None: ...

    def now(self) -> float:
        return time.monotonic()

    def clock(self) -> float:
        return time.monotonic()

    def watch(self, on: bool) -> None: ...

    def annotate(self, name: str) -> object:
        return None

    def end_annotation(self, handle: object) -> None: ...

    def total_bytes(self) -> int | None:
        return None

    def free_bytes(self) -> int | None:
        return None

    def host_limit(self) -> HostLimit:
        return host_limit()

    def reset_peak(self) -> None: ...

    def allocated_peak(self) -> int | None:
        return None

    def close(self) -> None: ...


@dataclass(slots=True)
class _Deferred:
    ticket: Ticket
    dst: torch.Tensor
    src: torch.Tensor
    after: tuple[Ticket, ...]
    digest: int | None


class SimDevice(CpuDevice):
    """ "cpu:sim": deferred copies on seeded fake streams, poisoned destinations, modelled links.

    Args:
        seed: order in which idle streams make progress by themselves.
        h2d_bytes_per_second, d2h_bytes_per_second: link rates on the virtual clock; None: instant.
        shared_link: both directions share one link, as on a half-duplex bus.
        checked: also digest every source, so that a source changed in flight (write after read)
            is a TransferError and not only a wrong number; so are bytes that nobody holds any more.
        lazy: how often a stream makes progress unasked, in [0, 1].

    Time is virtual: `compute` advances it, waiting for a ticket advances it to the ticket's end,
    and no core is used by a copy's duration.
    """

    name = "cpu:sim"
    same_ram = False

    def __init__(
        self,
        *,
        seed: int = 0,
        h2d_bytes_per_second: float | None = None,
        d2h_bytes_per_second: float | None = None,
        shared_link: bool = False,
        checked: bool = False,
        lazy: float = 0.25,
    ) -> None:
        super().__init__()
        self.rates = {Lane.H2D: h2d_bytes_per_second, Lane.D2H: d2h_bytes_per_second}
        self.shared_link = shared_link
        self.checked = checked
        self.clock_seconds = 0.0
        self._random = random.Random(seed)
        self._lazy = lazy
        self._queues: dict[Lane, deque[_Deferred]] = {lane: deque() for lane in COPY_LANES}
        self._free_at = dict.fromkeys(COPY_LANES, 0.0)

    def compute(self, seconds: float) -> None:
        """Let the modelled compute stream work for ``seconds``."""
        self.clock_seconds += seconds

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        self._tick()
        after = tuple(after)
        rate = self.rates[lane]
        free_at = max(self._free_at.values()) if self.shared_link else self._free_at[lane]
        start = max(free_at, self.clock_seconds, *(t.end for t in after), 0.0)
        end = start + (src.numel() / rate if rate else 0.0)
        self._free_at[lane] = end
        ready = all(t.done for t in after)
        digest = _crc(src) if self.checked and ready and not self._written(src) else None
        if self.checked:
            self._refuse_reuse(dst, after)
            dst, src = dst.detach(), src.detach()  # ours: it shows who else refers to the bytes
        if ready:
            dst.fill_(POISON)
        ticket = Ticket(lane, end)
        if self.is_timed:
            ticket.was(start, end)
        else:
            ticket.was(time.monotonic(), 0.0)
        self._queues[lane].append(_Deferred(ticket, dst, src, after, digest))
        return ticket

    def wait(self, ticket: Ticket) -> Stall | None:
        begin = self.clock()
        was_done = ticket.done
        self._run_to(ticket)
        stands = not was_done if not self.is_timed else ticket.end > self.clock_seconds
        self.clock_seconds = max(self.clock_seconds, ticket.end)
        return (begin, self.clock()) if stands else None

    sync = wait

    def query(self, ticket: Ticket) -> bool:
        self._tick()
        if self.is_timed:  # then time decides, and not chance
            if ticket.end > self.clock_seconds:
                return False
            self._run_to(ticket)
        return ticket.done

    def mark(self) -> Ticket:
        # Compute runs at once in this process, so everything queued so far has happened.
        self._tick()
        return Ticket(Lane.COMPUTE, self.clock_seconds, done=True)

    def now(self) -> float:
        return self.clock_seconds

    @property
    def is_timed(self) -> bool:
        """Whether links have rates: time is what they and `compute` take then."""
        return any(self.rates.values())

    def is_busy(self, lane: Lane) -> bool:
        """Whether a lane copies now."""
        return self._free_at.get(lane, 0.0) > self.clock_seconds

    def clock(self) -> float:
        return self.clock_seconds if self.is_timed else time.monotonic()

    def copy_seconds(self, lane: Lane, n_bytes: int) -> float:
        rate = self.rates[lane]
        return n_bytes / rate if rate else 0.0

    def close(self) -> None:
        for queue in self._queues.values():
            while queue:
                self._step(queue)

    def _tick(self) -> None:
        if self._random.random() < self._lazy:
            queue = self._queues[self._random.choice(COPY_LANES)]
            if queue:
                self._step(queue)

    def _run_to(self, ticket: Ticket) -> None:
        while not ticket.done:
            queue = self._queues.get(ticket.lane)
            if not queue:
                raise TransferError(f"deadlock: a ticket of lane {ticket.lane.value} cannot fire")
            self._step(queue)

    def _step(self, queue: deque[_Deferred]) -> None:
        if self.checked:
            self._refuse_freed(queue[0])
        item = queue.popleft()
        for ticket in item.after:
            self._run_to(ticket)
        if item.digest is not None and _crc(item.src) != item.digest:
            raise TransferError(
                "write after read: the source of a copy changed while the copy was in flight",
                advice="the writer must pass the copy's ticket as after=",
            )
        item.dst.copy_(item.src)
        item.ticket.done = True
        if not self.is_timed:
            item.ticket.was(item.ticket.span()[0], time.monotonic())

    def _written(self, src: torch.Tensor) -> bool:
        return any(_overlap(item.dst, src) for q in self._queues.values() for item in q)

    def _refuse_reuse(self, dst: torch.Tensor, after: tuple[Ticket, ...]) -> None:
        """Refuse to overwrite bytes that a queued copy still reads or writes."""
        for lane, queue in self._queues.items():
            for item in queue:
                if item.ticket in after or not (_overlap(item.src, dst) or _overlap(item.dst, dst)):
                    continue
                raise TransferError(
                    f"early reuse: bytes are overwritten while a copy on {lane.value} uses them",
                    advice="pass the ticket of that copy as after=",
                )

    def _refuse_freed(self, item: _Deferred) -> None:
        """Refuse a copy of bytes that only queued copies refer to: an allocator gives them away."""
        queued = [piece for q in self._queues.values() for i in q for piece in (i.dst, i.src)]
        sharing = Counter(piece.untyped_storage()._cdata for piece in queued)
        for piece in (item.dst, item.src):
            if use_count(piece) == ALONE - 1 + sharing[piece.untyped_storage()._cdata]:
                raise TransferError(
                    f"early free: a copy on {item.ticket.lane.value} uses bytes that were let go",
                    advice="hold both sides of a copy until somebody has waited for its ticket",
                )

    def check_read(self, src: torch.Tensor) -> None:
        """Raise TransferError when a queued copy has yet to write what is about to be read."""
        if self._written(src):
            raise TransferError(
                "read before ready: a copy into these bytes is still queued",
                advice="wait for the ticket of the copy first",
            )


def _crc(piece: torch.Tensor) -> int:
    return zlib.crc32(memoryview(piece.detach().contiguous().view(torch.uint8).numpy()))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    a0, b0 = a.data_ptr(), b.data_ptr()
    return a0 < b0 + b.numel() * b.element_size() and b0 < a0 + a.numel() * a.element_size()


class CudaDevice:
    """One CUDA device: a persistent stream per copy lane, events as tickets."""

    same_ram = False
    is_cuda = True
    has_bytes = True
    cheap_slabs = False

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device='cuda', but torch {torch.__version__} sees no CUDA device",
                advice="install a CUDA build of torch and a driver, or use device='cpu'",
            )
        self.torch_device = torch.device(
            "cuda", torch.cuda.current_device() if index is None else index
        )
        self.name = str(self.torch_device)
        self._streams = {lane: torch.cuda.Stream(self.torch_device) for lane in COPY_LANES}
        self._bytes_per_second: dict[Lane, float] = {}
        self._anchor: tuple[torch.cuda.Event, float] | None = None

    def slab(self, n_bytes: int) -> Slab:
        # torch's page-locked allocator rounds to powers of two; mapping and registering is exact.
        slab = map_slab(n_bytes)
        status = torch.cuda.cudart().cudaHostRegister(slab.block.data_ptr(), max(n_bytes, 1), 0)
        slab.registered = int(status) == 0
        if not slab.registered:  # pageable then, which is slower and still right
            torch.cuda.cudart().cudaGetLastError()  # or the next kernel launch reports it
        return slab

    def paged_slab(self, n_bytes: int) -> Slab:
        return map_slab(n_bytes, huge=False)

    def arena(self, n_bytes: int) -> Slab:
        block = torch.empty(max(n_bytes, 1), dtype=torch.uint8, device=self.torch_device)
        return Slab(n_bytes, block)

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        stream = self._streams[lane]
        for ticket in after:
            if ticket.event is not None:
                stream.wait_event(ticket.event)
        with torch.cuda.stream(stream):
            first = self._timing(stream)
            dst.copy_(src, non_blocking=True)
            event = torch.cuda.Event(enable_timing=first is not None)
            event.record(stream)
        ticket = Ticket(lane, 0.0, event=event)
        if first is not None:
            ticket.time_by(first)
        else:
            ticket.was(time.monotonic(), 0.0)
        return ticket

    def _timing(self, stream: torch.cuda.Stream) -> Timing | None:
        """Return the begin of a copy, where somebody wants to know it."""
        if self._anchor is None:
            return None
        first = torch.cuda.Event(enable_timing=True)
        first.record(stream)
        return Timing(first, *self._anchor)

    def clock(self) -> float:
        return time.monotonic()

    def watch(self, on: bool) -> None:
        self._anchor = None
        if on:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.torch_device))
            event.synchronize()
            self._anchor = event, time.monotonic()

    def annotate(self, name: str) -> object:
        return torch.cuda.nvtx.range_start(name)

    def end_annotation(self, handle: object) -> None:
        torch.cuda.nvtx.range_end(handle)

    def wait(self, ticket: Ticket) -> Stall | None:
        if ticket.event is None:
            return None
        stream = torch.cuda.current_stream(self.torch_device)
        first = None if self._anchor is None or ticket.event.query() else self._timing(stream)
        stream.wait_event(ticket.event)
        if first is None:
            return None
        last = torch.cuda.Event(enable_timing=True)
        last.record(stream)
        stall = Ticket(Lane.COMPUTE, 0.0, event=last)
        stall.time_by(first)
        return 0.0, stall

    def sync(self, ticket: Ticket) -> Stall | None:
        if ticket.event is None or ticket.event.query():
            return None
        begin = time.monotonic()
        ticket.event.synchronize()
        return begin, time.monotonic()

    def query(self, ticket: Ticket) -> bool:
        return ticket.event is None or bool(ticket.event.query())

    def mark(self) -> Ticket:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return Ticket(Lane.COMPUTE, 0.0, event=event)

    def stamp(self) -> Ticket:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return Ticket(Lane.COMPUTE, 0.0, event=event)

    def seconds_between(self, first: Ticket, second: Ticket) -> float:
        if first.event is None or second.event is None:
            return 0.0
        second.event.synchronize()
        return float(first.event.elapsed_time(second.event)) / 1000

    def copy_seconds(self, lane: Lane, n_bytes: int) -> float:
        if lane not in self._bytes_per_second:
            below = self.slab(PROBE_BYTES)
            here = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=self.torch_device)
            target, source = (here, below.block) if lane is Lane.H2D else (below.block, here)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(self._streams[lane]):
                target.copy_(source, non_blocking=True)  # the first one warms up
                begin.record()
                target.copy_(source, non_blocking=True)
                end.record()
            end.synchronize()
            release_slab(below)
            seconds = max(float(begin.elapsed_time(end)) / 1000, 1e-9)
            self._bytes_per_second[lane] = PROBE_BYTES / seconds
        return n_bytes / self._bytes_per_second[lane]

    def lane_seconds(self, lane: Lane, moves: Sequence[Move], beside: Sequence[Move] = ()) -> float:
        # 1. let both lanes wait until everything is queued: the host is slower than small copies
        self.close()
        stream, other = self._streams[lane], self._streams[OPPOSITE[lane]]
        beside = [*beside] * BESIDE
        cycles = SPIN_CYCLES * (len(moves) + len(beside))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            queued = torch.cuda.Event()
            queued.record()
        other.wait_event(queued)
        # 2. queue what runs beside, then what is timed
        with torch.cuda.stream(other):
            for move in beside:
                move.dst.copy_(move.src, non_blocking=True)
        with torch.cuda.stream(stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for move in moves:
                move.dst.copy_(move.src, non_blocking=True)
            end.record()
        end.synchronize()
        seconds = float(begin.elapsed_time(end)) / 1000
        self.close()
        return seconds

    def facts(self) -> Accelerator | None:
        found = torch.cuda.get_device_properties(self.torch_device)
        arch = f"sm_{found.major}{found.minor}"
        return Accelerator(found.name, arch, found.multi_processor_count, found.total_memory)

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch_device))

    def poison(self, dst: torch.Tensor) -> None:
        dst.fill_(POISON)

    def check_read(self, src: torch.Tensor) -> None: ...

    def now(self) -> float:
        return time.monotonic()

    def total_bytes(self) -> int | None:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def host_limit(self) -> HostLimit:
        return host_limit()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def allocated_peak(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def release_slab(slab: Slab) -> None:
    """Undo page-locking; the memory itself goes when its last tensor does."""
    if slab.registered:
        torch.cuda.cudart().cudaHostUnregister(slab.block.data_ptr())
        slab.registered = False


def finish_compute() -> None:
    """Wait for everything queued on the CUDA device, where there is one (benchmarks)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def accelerator_name() -> str | None:
    """Return the CUDA device's name, None where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def return_large_blocks() -> None:
    """Let memory of freed tensors of 4 MiB and more go back to the system at once, in this process.

    glibc raises that bound to the size of what was freed, up to 32 MiB, and then keeps such blocks
    in a heap that fragments: a model three times its RAM took twice its budget (measured). What an
    update's operations leave between them is smaller and stays: to give it back each time makes
    AdamW three times slower (measured, 1 MiB blocks).
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)
    except (OSError, AttributeError):
        return  # not glibc


_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1


class Allocated(NamedTuple):
    """What torch's allocator counts on a device, in bytes."""

    now_bytes: int
    peak_bytes: int
    """Since the process, or whoever last reset it, began."""
    reserved_bytes: int
    """Taken from the driver: tensors, and blocks kept for the next ones."""


def allocated(place: torch.device) -> Allocated | None:
    """Return what torch's allocator counts; None where there is no such count, as on a CPU."""
    if place.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(place)
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
    return Allocated(*(int(stats.get(n, 0)) for n in (*names, "reserved_bytes.all.current")))


def accelerator_rng(place: torch.device) -> torch.Tensor | None:
    """Return the state of a CUDA device's generator; None for a CPU."""
    return torch.cuda.get_rng_state(place) if place.type == "cuda" else None


def set_accelerator_rng(place: torch.device, state: torch.Tensor) -> None:
    """Set the state of a CUDA device's generator; nothing on a CPU."""
    if place.type == "cuda":
        torch.cuda.set_rng_state(state, place)


def trim_heap() -> None:
    """Hand freed heap pages back to the system, so that moved parameters do not count twice."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc: nothing to trim


def open_device(spec: object = None) -> Device:
    """Return the device that a `Config.device` names; an object is taken as it is."""
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
