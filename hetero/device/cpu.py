"""A processor as its own device: HBM and HOST are the same RAM, and copies are immediate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle

import torch

from hetero.config import HostLimit, host_limit
from hetero.device.face import (
    OPPOSITE,
    POISON,
    PROBE_BYTES,
    SMALL,
    Accelerator,
    DeviceMemory,
    Move,
    Slab,
    Stall,
    Ticket,
    heap_slab,
    map_slab,
    paged_slab,
)
from hetero.device.memory import UncountedMemory
from hetero.device.process import unseen
from hetero.types import Lane


class CpuDevice:
    """One memory with immediate copies: RAM, or a CUDA device's own, in order of its stream."""

    name = "cpu"
    same_ram = True
    shares_ram = True
    is_cuda = False
    has_bytes = True
    is_modelled = False
    align_bytes = 1
    cheap_slabs = True

    def __init__(
        self,
        torch_device: torch.device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.torch_device = torch_device or torch.device("cpu")
        self._clock = clock
        self.memory: DeviceMemory = UncountedMemory()
        self._done = Ticket(Lane.COMPUTE, 0.0, done=True)
        self._bytes_per_second: float | None = None

    def slab(self, n_bytes: int, *, travels: bool = True) -> Slab:
        return map_slab(n_bytes) if n_bytes >= SMALL else heap_slab(n_bytes)

    def lock(self, memory: torch.Tensor, slab: Slab | None = None) -> Callable[[], None] | None:
        return None

    def stages_bytes(self, largest_bytes: int, pinned: int | None) -> int:
        return 0

    def open_stages(self, n_bytes: int, pinned: int | None) -> None: ...

    def close_stages(self) -> None: ...

    def locked_bytes(self) -> int:
        return 0

    def paged_slab(self, n_bytes: int) -> Slab:
        return paged_slab(n_bytes)

    def arena(self, n_bytes: int) -> Slab:
        return map_slab(n_bytes)

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        begin = self._clock()
        with unseen():
            dst.copy_(src)
        return Ticket(lane, 0.0, done=True).was(begin, self._clock())

    def is_direct(self, memory: torch.Tensor) -> bool:
        return True

    def on_side_stream(
        self, lane: Lane, work: Callable[[], object], after: Iterable[Ticket], n_bytes: int
    ) -> Ticket:
        work()
        return self._done

    def wait(self, ticket: Ticket) -> Stall | None:
        return None

    def sync(self, ticket: Ticket) -> Stall | None:
        return None

    def query(self, ticket: Ticket) -> bool:
        return True

    def mark(self) -> Ticket:
        return self._done

    def in_order(self) -> None: ...

    def refuse_capture(self) -> None: ...

    def bring_down(self, src: torch.Tensor, after: Ticket) -> torch.Tensor:
        self.wait(after)
        return src.to(src.device if src.is_meta else "cpu", copy=True)

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def touched(self, n_bytes: int) -> None: ...

    def stamp(self) -> Ticket:
        return Ticket(Lane.COMPUTE, self.now(), done=True)

    def seconds_between(self, first: Ticket, second: Ticket) -> float:
        return second.end - first.end

    def copy_seconds(self, lane: Lane, n_bytes: int) -> float:
        if self._bytes_per_second is None:
            source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cpu")
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

    def poison(self, dst: torch.Tensor) -> None:
        dst.fill_(POISON)

    def check_read(self, src: torch.Tensor) -> None: ...

    def now(self) -> float:
        return self._clock()

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock

    def watch(self, on: bool) -> None: ...

    def annotate(self, name: str) -> object:
        return None

    def end_annotation(self, handle: object) -> None: ...

    def host_limit(self) -> HostLimit:
        return host_limit()

    def close(self) -> None: ...
