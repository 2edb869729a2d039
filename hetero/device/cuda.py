"""A CUDA device: a stream for each lane, page-locked slabs, events as tickets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hetero.config import HostLimit, host_limit
from hetero.device.face import (
    COPY_LANES,
    LANES,
    POISON,
    Accelerator,
    Move,
    Slab,
    Stall,
    Ticket,
    map_slab,
    paged_slab,
)
from hetero.device.lanes import Collective, CudaLanes
from hetero.device.locked import LockedMemory
from hetero.device.memory import CudaMemory
from hetero.device.process import counts_memory, first_line, settle_backward_at_exit
from hetero.device.rates import LaneRates
from hetero.device.staging import (
    LEAST_BYTES,
    MAX_STAGE_BYTES,
    StagedTicket,
    Staging,
    on_lanes,
    stages_bytes,
)
from hetero.errors import ConfigError, StateError
from hetero.types import Lane

CUDA_ALIGN_BYTES = 256  # cuBLASLt's heuristic is told no more; torch's allocator gives 512


class CudaDevice:
    """One CUDA device: a persistent stream per copy lane, events as tickets."""

    # Not even where HBM is RAM (GB10, Jetson), or where kernels may read RAM (GH200): torch refuses
    # operations of its CPU on the device's tensors and the reverse, and streams still order them.
    # A model that fits stays there, and copies nothing.
    same_ram = False
    is_cuda = True
    has_bytes = True
    is_modelled = False
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
            probe = torch.ones(1, device=self.torch_device).add_(1)  # torch may have no kernels
        except RuntimeError as error:  # the first use of the device
            raise ConfigError(
                f"{self.name} cannot be used: {first_line(error)}",
                advice="end other processes on it (nvidia-smi lists them), use another one, or"
                " install a build of torch with kernels for it (torch.cuda.get_arch_list())",
            ) from error
        if not counts_memory(self.torch_device):
            raise ConfigError(
                f"torch's allocator of {self.name} does not count its memory: it caches none, or is"
                " another one",
                advice="unset PYTORCH_NO_CUDA_MEMORY_CACHING, and use torch's own allocator, or"
                " PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync",
            )
        del probe
        settle_backward_at_exit(self.torch_device)
        found = torch.cuda.get_device_properties(self.torch_device)
        self.shares_ram = bool(getattr(found, "is_integrated", False))
        self._locked = LockedMemory(self.torch_device, self._lanes.settle)
        self._staging = Staging(self._lanes.queue, self._lanes.sync, self._locked.slab)
        self.memory = CudaMemory(self.torch_device, self._lanes, is_ram=self.shares_ram)
        self._rates = LaneRates(self._lanes, self._staging, self.memory)
        self._computing: torch.cuda.Stream | None = None  # as of the last `in_order`

    def slab(self, n_bytes: int, *, travels: bool = True) -> Slab:
        return self._locked.slab(n_bytes) if travels else map_slab(n_bytes)

    def lock(self, memory: torch.Tensor, slab: Slab | None = None) -> Callable[[], None] | None:
        return self._locked.lock(memory, slab)

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
        for lane in LANES:  # now: in a step, the probe would count as activations
            self._rates.measure(lane)

    def close_stages(self) -> None:
        self._staging.close()

    def locked_bytes(self) -> int:
        return self._locked.n_bytes

    def paged_slab(self, n_bytes: int) -> Slab:
        return paged_slab(n_bytes)

    def arena(self, n_bytes: int) -> Slab:
        return Slab(n_bytes, self.memory.take(n_bytes))

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        after = tuple(after)
        staged = lane in COPY_LANES and not self._locked.holds(src if lane is Lane.H2D else dst)
        if staged or self._staging.holds_up(lane, after):
            return self._staging.copy(lane, dst, src, after, staged=staged)
        return self._lanes.queue(lane, dst, src, on_lanes(after))

    def is_direct(self, memory: torch.Tensor) -> bool:
        return self._locked.holds(memory)

    def on_side_stream(
        self, lane: Lane, work: Callable[[], object], after: Iterable[Ticket], n_bytes: int
    ) -> Ticket:
        return self._lanes.on_side_stream(lane, work, self._staging.queued(after))

    def launch(self, begin: Callable[[], Collective], after: Iterable[Ticket]) -> Ticket:
        """Queue a collective of another library; see `CudaLanes.launch`. The host waits until
        staged copies of ``after`` are on their lanes."""
        return self._lanes.launch(begin, self._staging.queued(after))

    @property
    def clock(self) -> Callable[[], float]:
        return time.monotonic

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

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
        event, stream = torch.cuda.Event(), torch.cuda.current_stream(self.torch_device)
        event.record(stream)
        self.memory.computes_on(stream)
        return Ticket(Lane.COMPUTE, 0.0, event=event)

    def refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a CUDA graph of a prepared model is being captured: its replays would read memory"
                " that holds other weights by then",
                advice="capture the model before hetero.prepare, or run it without a graph",
            )

    def in_order(self) -> None:
        stream = torch.cuda.current_stream(self.torch_device)
        before = self._computing
        if stream == before:
            return
        self._computing = stream
        self.memory.computes_on(stream)
        if before is not None:
            stream.wait_stream(before)

    def bring_down(self, src: torch.Tensor, after: Ticket) -> torch.Tensor:
        found = torch.empty(src.shape, dtype=src.dtype, device="cpu")
        if not src.numel():
            return found
        pieces = (each.view(torch.uint8).split(MAX_STAGE_BYTES) for each in (found, src))
        for here, there in zip(*pieces, strict=True):  # gradients go down in between
            self.sync(self.copy(Lane.D2H, here, there, (after,)))
        return found

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
        return self._rates.seconds(lane, n_bytes)

    def lane_seconds(self, lane: Lane, moves: Sequence[Move], beside: Sequence[Move] = ()) -> float:
        return self._rates.of_moves(lane, moves, beside)

    def facts(self) -> Accelerator | None:
        found = torch.cuda.get_device_properties(self.torch_device)
        arch = f"sm_{found.major}{found.minor}"
        counts = found.multi_processor_count, found.total_memory
        return Accelerator(found.name, arch, *counts, uuid=str(found.uuid))

    def poison(self, dst: torch.Tensor) -> None:
        dst.fill_(POISON)

    def check_read(self, src: torch.Tensor) -> None: ...

    def now(self) -> float:
        return time.monotonic()

    def host_limit(self) -> HostLimit:
        return host_limit()

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
