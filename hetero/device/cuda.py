"""A CUDA device: a stream for each lane, page-locked slabs, events as tickets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from hetero.config import HostLimit, host_limit
from hetero.device.face import (
    COPY_LANES,
    OPPOSITE,
    POISON,
    PROBE_BYTES,
    Accelerator,
    Move,
    Slab,
    Stall,
    Ticket,
    map_slab,
    paged_slab,
)
from hetero.device.lanes import CudaLanes
from hetero.device.locked import LockedMemory
from hetero.device.process import counts
from hetero.device.staging import LEAST_BYTES, StagedTicket, Staging, on_lanes, stages_bytes
from hetero.errors import BudgetError, ConfigError
from hetero.types import Lane, format_bytes

CUDA_ALIGN_BYTES = 256  # cuBLASLt's heuristic is told no more; torch's allocator gives 512
BESIDE = 3  # times as many copies keep the other lane busy all the while
SPIN_CYCLES = 50_000  # of a device's clock while the host queues one copy: 25 us at 2 GHz


class CudaDevice:
    """One CUDA device: a persistent stream per copy lane, events as tickets."""

    # Not even where HBM is RAM (GB10, Jetson), or where kernels may read RAM (GH200): torch refuses
    # operations of its CPU on the device's tensors and the reverse, and streams still order them.
    # A model that fits stays there, and copies nothing.
    same_ram = False
    is_cuda = True
    has_bytes = True
    align_bytes = CUDA_ALIGN_BYTES
    cheap_slabs = False

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device='cuda', but torch {torch.__version__} sees no CUDA device: {why_none()}",
                advice="install a CUDA build of torch and a driver that is new enough for it, unset"
                " CUDA_VISIBLE_DEVICES if that hides the device, or use device='cpu'",
            )
        self.torch_device = torch.device(
            "cuda", torch.cuda.current_device() if index is None else index
        )
        self.name = str(self.torch_device)
        try:
            self._lanes = CudaLanes(self.torch_device)
        except RuntimeError as error:  # the first use of the device
            raise ConfigError(
                f"{self.name} cannot be used: {first_line(error)}",
                advice="end other processes on it (nvidia-smi lists them), or use another one",
            ) from error
        found = torch.cuda.get_device_properties(self.torch_device)
        self.shares_ram = bool(getattr(found, "is_integrated", False))
        self._bytes_per_second: dict[Lane, float] = {}
        self._locked = LockedMemory(self.torch_device, self._lanes.settle)
        self._staging = Staging(self._lanes.queue, self._lanes.sync, self._locked.slab)

    def slab(self, n_bytes: int, *, travels: bool = True) -> Slab:
        return self._locked.slab(n_bytes) if travels else map_slab(n_bytes)

    def stages_bytes(self, largest_bytes: int, pinned: int | None) -> int:
        if pinned is not None and pinned < LEAST_BYTES:
            raise ConfigError(
                f"pinned={pinned} bytes have no room for the stages of copies",
                advice=f"pinned= takes {LEAST_BYTES} bytes or more, best 64MiB or more",
            )
        return stages_bytes(largest_bytes, pinned)

    def open_stages(self, n_bytes: int, pinned: int | None) -> None:
        self._locked.limit = pinned
        self._staging.open(n_bytes)
        for lane in COPY_LANES:  # now: in a step, the probe would count as activations
            self._measure(lane)

    def close_stages(self) -> None:
        self._staging.close()

    def locked_bytes(self) -> int:
        return self._locked.n_bytes

    def paged_slab(self, n_bytes: int) -> Slab:
        return paged_slab(n_bytes)

    def arena(self, n_bytes: int) -> Slab:
        return Slab(n_bytes, self._shared(n_bytes))

    def _shared(self, n_bytes: int) -> torch.Tensor:
        """Return device memory for the lanes, too.

        torch's allocator orders its memory by compute's stream alone: the lanes have to come after
        what is queued there now, and the memory may serve others when they are done with it.
        """
        try:
            block = torch.empty(max(n_bytes, 1), dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free = (self.free_bytes() or 0) + self.reserved_bytes()
            raise BudgetError(
                f"{format_bytes(n_bytes)} of frames and homes are not free on {self.name}:"
                f" {first_line(error)}",
                advice=f"end other processes on the device, or set hbm= below {free} bytes",
                tier="HBM",
            ) from error
        taken = torch.cuda.Event()
        taken.record(torch.cuda.current_stream(self.torch_device))
        for stream in self._lanes.streams.values():
            stream.wait_event(taken)
            block.record_stream(stream)
        return block

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        after = tuple(after)
        staged = lane in COPY_LANES and not self._locked.holds(src if lane is Lane.H2D else dst)
        if staged or self._staging.holds_up(lane, after):
            return self._staging.copy(lane, dst, src, after, staged=staged)
        return self._lanes.queue(lane, dst, src, on_lanes(after))

    def clock(self) -> float:
        return time.monotonic()

    def watch(self, on: bool) -> None:
        self._lanes.watch(on)

    def annotate(self, name: str) -> object:
        return torch.cuda.nvtx.range_start(name)

    def end_annotation(self, handle: object) -> None:
        torch.cuda.nvtx.range_end(handle)

    def wait(self, ticket: Ticket) -> Stall | None:
        begin = time.monotonic()
        event, stopped = self._event(ticket)
        stall = (begin, time.monotonic()) if stopped else None
        if event is None:
            return stall
        stream = torch.cuda.current_stream(self.torch_device)
        first = self._lanes.timing(stream) if self._lanes.is_timed and not event.query() else None
        stream.wait_event(event)
        if first is None:
            return stall
        last = torch.cuda.Event(enable_timing=True)
        last.record(stream)
        end = Ticket(Lane.COMPUTE, 0.0, event=last)
        end.time_by(first)
        return 0.0, end

    def _event(self, ticket: Ticket) -> tuple[torch.cuda.Event | None, bool]:
        """Return the event of a ticket, and whether the host stopped until there was one."""
        if not isinstance(ticket, StagedTicket):
            return ticket.event, False
        stops = not ticket.job.done
        self._staging.wait(ticket)
        return None if ticket.queued is None else ticket.queued.event, stops

    def sync(self, ticket: Ticket) -> Stall | None:
        begin = time.monotonic()
        event, stopped = self._event(ticket)
        if event is not None and not event.query():
            event.synchronize()
            stopped = True
        return (begin, time.monotonic()) if stopped else None

    def query(self, ticket: Ticket) -> bool:
        if isinstance(ticket, StagedTicket):
            return ticket.job.done and all(map(self.query, on_lanes([ticket])))
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
            self._measure(lane)
        return n_bytes / self._bytes_per_second[lane]

    def _measure(self, lane: Lane) -> None:
        """Measure a lane's rate with a stage at the host's end."""
        with self._staging.lent(PROBE_BYTES) as below:
            here = self._shared(below.numel())
            target, source = (here, below) if lane is Lane.H2D else (below, here)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(self._lanes.streams[lane]):
                target.copy_(source, non_blocking=True)  # the first one warms up
                begin.record()
                target.copy_(source, non_blocking=True)
                end.record()
            end.synchronize()
        seconds = max(float(begin.elapsed_time(end)) / 1000, 1e-9)
        self._bytes_per_second[lane] = here.numel() / seconds

    def lane_seconds(self, lane: Lane, moves: Sequence[Move], beside: Sequence[Move] = ()) -> float:
        # 1. make both lanes wait until all is queued: the host is slower than small copies
        self.close()
        stream, other = self._lanes.streams[lane], self._lanes.streams[OPPOSITE[lane]]
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
        self._staging.finish()
        self._lanes.settle()


def why_none() -> str:
    """Return torch's own reason for seeing no CUDA device."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # a build for CPUs; no driver, or an old one
        return first_line(error)
    return "it found none"


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
