"""A device without bytes: everything is counted and timed (floor 0).

The library itself runs on it, with models on ``torch.device("meta")``, and so plans for a machine
without it. Time is virtual: a model of compute advances it, and rates give the time of copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hetero.config import HostLimit
from hetero.device import (
    COPY_LANES,
    CUDA_ALIGN_BYTES,
    LANES,
    N_STAGES,
    OPPOSITE,
    CpuDevice,
    Slab,
    Stall,
    Ticket,
    UncountedMemory,
    stages_bytes,
)
from hetero.events import behind
from hetero.internals import without_modes
from hetero.types import Lane, noop

META = torch.device("meta")
_unseen = WeakIdKeyDictionary()


def write_unseen(tensor: torch.Tensor) -> None:
    """Note a write to a tensor without bytes that its version does not show."""
    _unseen[tensor] = _unseen.get(tensor, 0) + 1


def unseen_writes(tensor: torch.Tensor) -> int:
    """Return how many writes were noted."""
    return _unseen.get(tensor, 0) if tensor.is_meta else 0


@dataclass(slots=True)
class DrySlab(Slab):
    """Memory that has a size and no bytes."""

    pieces: dict[int, torch.Tensor] | None = None
    """Where pieces are noted, by their storage."""

    def carve(self, offset: int, n_bytes: int) -> torch.Tensor:
        with without_modes():  # no mode may count it as new memory
            piece = torch.empty(n_bytes, dtype=torch.uint8, device=META)
        if self.pieces is not None:
            self.pieces[piece.untyped_storage()._cdata] = piece
        return piece


CopySeconds = Callable[[Lane, int, bool], float]


class DryDevice(CpuDevice):
    """Stands for a device with its links.

    Args:
        is_cuda: whether it stands for a CUDA device; if not, for a CPU.
        same_ram: whether its memory is RAM, as of a CPU that is not "cpu:sim".
        shares_ram: whether a CUDA device's memory is a part of RAM.
        hbm_bytes: its size; None if it is RAM.
        ram_bytes: RAM that this process may take.
        copy_seconds: (lane, bytes, whether the other lane is busy) -> seconds.
        copies_here: whether the launching thread copies, and only when it waits, as on "cpu:sim":
            until then both ends are held. Stamps have no times then.
        touch_seconds: bytes that compute reads and writes -> seconds.
        stage_seconds: bytes that threads copy between pageable memory and stages -> seconds.
    """

    name = "dry"
    has_bytes = False
    is_modelled = True

    def __init__(
        self,
        *,
        is_cuda: bool = False,
        same_ram: bool = False,
        shares_ram: bool = False,
        hbm_bytes: int | None = None,
        ram_bytes: int,
        copy_seconds: CopySeconds,
        copies_here: bool = False,
        touch_seconds: Callable[[int], float] = lambda n_bytes: 0.0,
        stage_seconds: Callable[[int], float] = lambda n_bytes: 0.0,
    ) -> None:
        super().__init__(META)
        self.is_cuda = is_cuda
        self.same_ram = same_ram
        self.shares_ram = shares_ram or not is_cuda
        self.align_bytes = CUDA_ALIGN_BYTES if is_cuda else CpuDevice.align_bytes
        self.clock_seconds = 0.0
        self.time_passed: Callable[[], None] = lambda: None
        """Called after the clock has moved."""
        self.ram_used: Callable[[], int] = lambda: 0
        """Returns the bytes of RAM that are taken."""
        self.memory = UncountedMemory(hbm_bytes)
        self._ram_bytes = ram_bytes
        self._copy_seconds = copy_seconds
        self._touch_seconds = touch_seconds
        self._stage_seconds = stage_seconds
        self._pinned: int | None = None
        self._stage_bytes = self._locked_bytes = 0
        self.newly_locked_bytes = 0
        """Of all memory that ever was page-locked."""
        self._pageable: dict[int, torch.Tensor] = {}  # all memory that is not page-locked
        self._staged_until = dict.fromkeys(COPY_LANES, 0.0)
        self.copies_here = copies_here
        self._asked: dict[Lane, deque[Ticket]] = {lane: deque() for lane in LANES}
        self._free_at = dict.fromkeys(Lane, 0.0)
        self._aside_seconds = 0.0

    def arena(self, n_bytes: int) -> DrySlab:
        return DrySlab(n_bytes, torch.empty(0, dtype=torch.uint8, device=META))

    def slab(self, n_bytes: int, *, travels: bool = True) -> Slab:
        slab = self.arena(n_bytes)
        if travels and (self._pinned is None or self._locked_bytes + n_bytes <= self._pinned):
            self._locked_bytes += n_bytes
            self.newly_locked_bytes += n_bytes
            slab.unlock = partial(self._unlock, n_bytes)
        elif self._stage_bytes:
            slab.pieces = self._pageable
        return slab

    def paged_slab(self, n_bytes: int) -> Slab:
        return self.slab(n_bytes, travels=False)

    def _unlock(self, n_bytes: int) -> None:
        self._locked_bytes -= n_bytes

    def stages_bytes(self, largest_bytes: int, pinned: int | None) -> int:
        return stages_bytes(largest_bytes, pinned) if self.is_cuda else 0

    def open_stages(self, n_bytes: int, pinned: int | None) -> None:
        self._pinned, self._stage_bytes = pinned, n_bytes
        self._locked_bytes += n_bytes
        self.newly_locked_bytes += n_bytes

    def locked_bytes(self) -> int:
        return self._locked_bytes

    def compute(self, seconds: float) -> None:
        self.pass_until(self.clock_seconds + seconds)

    def pass_until(self, seconds: float) -> None:
        """Let time pass until then, unless it is past."""
        if seconds > self.clock_seconds:
            self.clock_seconds = seconds
            self.time_passed()

    @contextmanager
    def aside(self) -> Iterator[None]:
        if not self.is_cuda:  # the processors are those that compute
            yield
            return
        before, passed = self.clock_seconds, self.time_passed
        self.clock_seconds, self.time_passed = max(before, self._aside_seconds), noop
        try:
            with behind():
                yield
        finally:
            self._aside_seconds = self.clock_seconds
            self.clock_seconds, self.time_passed = before, passed

    def is_busy(self, lane: Lane) -> bool:
        return self._free_at[lane] > self.clock_seconds

    def busy_until(self, lane: Lane, seconds: float) -> None:
        """Note until when a lane is busy with other work."""
        self._free_at[lane] = seconds

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        n_bytes = src.numel()
        if self.copies_here:
            begin = self.clock_seconds
            self.compute(self.copy_seconds(lane, n_bytes))
            ticket = Ticket(lane, self.clock_seconds).was(begin, self.clock_seconds)
            self._asked[lane].append(ticket)
            return ticket
        start = self._start(lane, after)
        busy = lane in COPY_LANES and self._free_at[OPPOSITE[lane]] > start
        host = src if lane is Lane.H2D else dst
        if lane in COPY_LANES and host.untyped_storage()._cdata in self._pageable:
            return self._staged(lane, n_bytes, start, busy)
        return self._occupied(lane, start, self.copy_seconds(lane, n_bytes, busy=busy))

    def lock(self, memory: torch.Tensor, slab: Slab | None = None) -> Callable[[], None] | None:
        n_bytes = memory.numel()
        if self._pinned is not None and self._locked_bytes + n_bytes > self._pinned:
            return None
        self._locked_bytes += n_bytes
        self.newly_locked_bytes += n_bytes
        self._pageable.pop(memory.untyped_storage()._cdata, None)
        return partial(self._unlock, n_bytes)

    def is_direct(self, memory: torch.Tensor) -> bool:
        return memory.untyped_storage()._cdata not in self._pageable

    def on_side_stream(
        self, lane: Lane, work: Callable[[], object], after: Iterable[Ticket], n_bytes: int
    ) -> Ticket:
        work()
        return self.occupy(Lane.COMPUTE, self._touch_seconds(n_bytes), after)

    @contextmanager
    def at(self, seconds: float) -> Iterator[None]:
        """Let a thread of ours, inside the block, be at another time than the launching one."""
        before, passed = self.clock_seconds, self.time_passed
        self.clock_seconds, self.time_passed = seconds, noop
        try:
            yield
        finally:
            self.clock_seconds, self.time_passed = before, passed

    def occupy(self, lane: Lane, seconds: float, after: Iterable[Ticket]) -> Ticket:
        """Return the ticket of other work that takes a lane, after tickets."""
        return self._occupied(lane, self._start(lane, after), seconds)

    def _start(self, lane: Lane, after: Iterable[Ticket]) -> float:
        """Return when a lane is free for work that comes after tickets."""
        return max(self._free_at[lane], self.clock_seconds, *(t.end for t in after), 0.0)

    def _occupied(self, lane: Lane, start: float, seconds: float) -> Ticket:
        end = self._free_at[lane] = start + seconds
        return Ticket(lane, end).was(start, end)

    def _staged(self, lane: Lane, n_bytes: int, start: float, busy: bool) -> Ticket:
        """Return the ticket of a copy through stages: threads and lane work on it side by side, one
        stage apart."""
        stage = min(n_bytes, self._stage_bytes // N_STAGES)
        first = self._stage_seconds(stage), self._copy_seconds(lane, stage, busy)
        whole = self._stage_seconds(n_bytes), self._copy_seconds(lane, n_bytes, busy)
        if lane is Lane.H2D:  # memory, stage, device
            begin = max(self.clock_seconds, self._staged_until[lane])
            self._staged_until[lane] = begin + whole[0]
            end = max(max(start, begin + first[0]) + whole[1], begin + whole[0] + first[1])
            self._free_at[lane] = end
        else:
            begin = max(start + first[1], self._staged_until[lane])
            end = max(begin + whole[0], start + whole[1] + first[0])
            self._staged_until[lane] = end
            self._free_at[lane] = max(start + whole[1], end - N_STAGES * first[0])
        return Ticket(lane, end).was(start, end)

    def wait(self, ticket: Ticket) -> Stall | None:
        begin, asked = self.clock_seconds, self._asked.get(ticket.lane)
        while asked and not ticket.done:
            asked.popleft().done = True
        self.pass_until(ticket.end)
        return (begin, ticket.end) if ticket.end > begin else None

    sync = wait

    def query(self, ticket: Ticket) -> bool:
        if self.copies_here and ticket.lane in LANES:
            return ticket.done
        return ticket.end <= self.clock_seconds

    def mark(self) -> Ticket:
        return Ticket(Lane.COMPUTE, self.clock_seconds)

    def touched(self, n_bytes: int) -> None:
        self.compute(self._touch_seconds(n_bytes))

    def stamp(self) -> Ticket:
        return Ticket(Lane.COMPUTE, 0.0, done=True) if self.copies_here else self.mark()

    def now(self) -> float:
        return self.clock_seconds

    @property
    def clock(self) -> Callable[[], float]:
        return self.now

    def copy_seconds(self, lane: Lane, n_bytes: int, *, busy: bool = False) -> float:
        if lane is Lane.D2D:  # read and written
            return self._touch_seconds(2 * n_bytes)
        return self._copy_seconds(lane, n_bytes, busy)

    def poison(self, dst: torch.Tensor) -> None: ...

    def host_limit(self) -> HostLimit:
        return HostLimit(self._ram_bytes - self.ram_used(), "the machine that is planned for")
