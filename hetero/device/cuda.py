"""A CUDA device: a stream for each lane, page-locked slabs, events as tickets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from hetero.config import HostLimit, host_limit
from hetero.device.face import (
    LANES,
    OPPOSITE,
    POISON,
    PROBE_BYTES,
    Accelerator,
    Move,
    Slab,
    Stall,
    Ticket,
    Timing,
    map_slab,
    paged_slab,
    release_slab,
)
from hetero.device.locked import LockedMemory
from hetero.device.process import counts
from hetero.errors import ConfigError
from hetero.types import Lane

CUDA_ALIGN_BYTES = 256  # cuBLASLt's heuristic is told no more; torch's allocator gives 512
BESIDE = 3  # times as many copies keep the other lane busy all the while
SPIN_CYCLES = 50_000  # of a device's clock while the host queues one copy: 25 us at 2 GHz


class CudaDevice:
    """One CUDA device: a persistent stream per copy lane, events as tickets."""

    same_ram = False
    is_cuda = True
    has_bytes = True
    align_bytes = CUDA_ALIGN_BYTES
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
        self._streams = {lane: torch.cuda.Stream(self.torch_device) for lane in LANES}
        self._bytes_per_second: dict[Lane, float] = {}
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._locked = LockedMemory(self.torch_device, self.close)

    def slab(self, n_bytes: int) -> Slab:
        # torch's page-locked allocator rounds up to powers of two; mapping and registering do not
        slab = map_slab(n_bytes)
        self._locked.lock(slab)
        return slab

    def paged_slab(self, n_bytes: int) -> Slab:
        return paged_slab(n_bytes)

    def arena(self, n_bytes: int) -> Slab:
        return Slab(n_bytes, self._shared(n_bytes))

    def _shared(self, n_bytes: int) -> torch.Tensor:
        """Return device memory for the lanes, too.

        torch's allocator orders its memory by compute's stream alone: the lanes have to come after
        what is queued there now, and the memory may serve others when they are done with it.
        """
        block = torch.empty(max(n_bytes, 1), dtype=torch.uint8, device=self.torch_device)
        taken = torch.cuda.Event()
        taken.record(torch.cuda.current_stream(self.torch_device))
        for stream in self._streams.values():
            stream.wait_event(taken)
            block.record_stream(stream)
        return block

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
        """Return the begin of a copy, if times are watched."""
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

    def touched(self, n_bytes: int) -> None: ...

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
            here = self._shared(PROBE_BYTES)
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
        # 1. make both lanes wait until all is queued: the host is slower than small copies
        self.close()
        stream, other = self._streams[lane], self._streams[OPPOSITE[lane]]
        beside = [*beside] * BESIDE
        cycles = SPIN_CYCLES * (len(moves) + len(beside))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            queued = torch.cuda.Event()
            queued.record()
        other.wait_event(queued)
        # 2. queue the copies on the other lane, then the timed ones
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
        return counts(self.torch_device).reserved_bytes

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
        return counts(self.torch_device).peak_bytes

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
