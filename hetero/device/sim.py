""" "cpu:sim": a device that is late on purpose, the race detector of tests and a tool for users.

It defers copies on seeded fake streams, poisons their destinations, bounds its HBM arena physically
and can model link rates on a virtual clock.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from hetero.crc import crc32
from hetero.device.cpu import CpuDevice
from hetero.device.face import ALONE, COPY_LANES, LANES, POISON, Stall, Ticket, use_count
from hetero.device.process import unseen
from hetero.errors import TransferError
from hetero.events import behind
from hetero.types import Lane

T = TypeVar("T")


@dataclass(slots=True)
class _Deferred:
    ticket: Ticket
    dst: torch.Tensor
    src: torch.Tensor
    after: tuple[Ticket, ...]
    digest: int | None


def one_at_a_time(act: Callable[..., T]) -> Callable[..., T]:
    """Let a method of a device run on one thread at a time."""

    @wraps(act)
    def turn(self: SimDevice, *args: Any, **named: Any) -> T:
        with self._turn:
            return act(self, *args, **named)

    return turn


class SimDevice(CpuDevice):
    """ "cpu:sim": deferred copies on seeded fake streams, poisoned destinations, modelled links.

    Args:
        seed: order in which idle streams make progress by themselves.
        h2d_bytes_per_second, d2h_bytes_per_second: link rates on the virtual clock; None: instant.
        shared_link: both directions share one link, as on a half-duplex bus.
        checked: also digest every source, so that a source changed in flight (write after read)
            is a TransferError and not only a wrong number; so are bytes freed too early.
        lazy: how often a stream makes progress unasked, in [0, 1].

    Time is virtual: `compute` advances it, waiting for a ticket advances it to the ticket's end,
    and a copy's duration uses no core.
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
        self.rates = {
            Lane.H2D: h2d_bytes_per_second,
            Lane.D2H: d2h_bytes_per_second,
            Lane.D2D: None,
        }
        self.is_timed = self.is_modelled = any(self.rates.values())
        """Whether links have rates: then only they and `compute` take time."""
        self.shared_link = shared_link
        self.checked = checked
        self.clock_seconds = 0.0
        self._random = random.Random(seed)
        self._lazy = lazy
        self._queues: dict[Lane, deque[_Deferred]] = {lane: deque() for lane in LANES}
        self._free_at = dict.fromkeys(LANES, 0.0)
        self._aside_seconds = 0.0
        self._turn = threading.RLock()  # gradients for other ranks move on a thread of their own

    def compute(self, seconds: float) -> None:
        """Let the modelled compute stream work for ``seconds``."""
        self.clock_seconds += seconds

    @one_at_a_time
    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        self._tick()
        after = tuple(after)
        rate = self.rates[lane]
        shared = self.shared_link and lane in COPY_LANES
        free_at = max(self._free_at[way] for way in (COPY_LANES if shared else (lane,)))
        start, ready = max(free_at, self.clock_seconds), True
        for before in after:
            start, ready = max(start, before.end), ready and before.done
        end = start + (src.numel() / rate if rate else 0.0)
        self._free_at[lane] = end
        digest = _crc(src) if self.checked and ready and not self._written(src) else None
        if self.checked:
            self._refuse_reuse(dst, after)
            dst, src = dst.detach(), src.detach()  # aliases of our own, for use counts
        if ready:
            with unseen():
                dst.fill_(POISON)
        ticket = Ticket(lane, end)
        if self.is_timed:
            ticket.was(start, end)
        else:
            ticket.was(time.monotonic(), 0.0)
        self._queues[lane].append(_Deferred(ticket, dst, src, after, digest))
        return ticket

    @one_at_a_time
    def on_side_stream(
        self, lane: Lane, work: Callable[[], object], after: Iterable[Ticket], n_bytes: int
    ) -> Ticket:
        self._tick()
        end = self.clock_seconds
        for before in after:
            self._run_to(before)
            end = max(end, before.end)
        work()
        return Ticket(Lane.COMPUTE, end, done=True)

    @one_at_a_time
    def wait(self, ticket: Ticket) -> Stall | None:
        begin = self.clock()
        was_done = ticket.done
        self._run_to(ticket)
        stands = not was_done if not self.is_timed else ticket.end > self.clock_seconds
        self.clock_seconds = max(self.clock_seconds, ticket.end)
        return (begin, self.clock()) if stands else None

    sync = wait

    @one_at_a_time
    def query(self, ticket: Ticket) -> bool:
        self._tick()
        if self.is_timed:  # time decides, not chance
            if ticket.end > self.clock_seconds:
                return False
            self._run_to(ticket)
        return ticket.done

    @one_at_a_time
    def mark(self) -> Ticket:
        # Compute is immediate in this process: everything queued so far has happened.
        self._tick()
        return Ticket(Lane.COMPUTE, self.clock_seconds, done=True)

    def now(self) -> float:
        return self.clock_seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        before = self.clock_seconds
        self.clock_seconds = max(before, self._aside_seconds)
        try:
            with behind():
                yield
        finally:
            self._aside_seconds, self.clock_seconds = self.clock_seconds, before

    def is_busy(self, lane: Lane) -> bool:
        return self._free_at.get(lane, 0.0) > self.clock_seconds

    @property
    def clock(self) -> Callable[[], float]:
        return self._virtual_seconds if self.is_timed else time.monotonic

    def _virtual_seconds(self) -> float:
        return self.clock_seconds

    def copy_seconds(self, lane: Lane, n_bytes: int) -> float:
        rate = self.rates[lane]
        return n_bytes / rate if rate else 0.0

    def close(self) -> None:
        for queue in self._queues.values():
            while queue:
                self._step(queue)

    def _tick(self) -> None:
        if self._random.random() < self._lazy:
            queue = self._queues[self._any_lane()]
            if queue:
                self._step(queue)

    def _any_lane(self) -> Lane:
        """Return the lane that `random.choice` would, without its calls."""
        lanes = LANES if self._queues[Lane.D2D] else COPY_LANES
        bits, n_lanes = self._random.getrandbits, len(lanes)
        while (number := bits(n_lanes.bit_length())) >= n_lanes:
            pass
        return lanes[number]

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
        begin = time.monotonic()
        with unseen():  # whatever operation of the program's this happens in
            item.dst.copy_(item.src)
        item.ticket.done = True
        if not self.is_timed:  # the time it took, not the time it was put off
            item.ticket.was(begin, time.monotonic())

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
        """Refuse a copy of bytes that only queued copies refer to: an allocator may reuse them."""
        queued = [piece for q in self._queues.values() for i in q for piece in (i.dst, i.src)]
        sharing = Counter(piece.untyped_storage()._cdata for piece in queued)
        for piece in (item.dst, item.src):
            if use_count(piece) == ALONE - 1 + sharing[piece.untyped_storage()._cdata]:
                raise TransferError(
                    f"early free: a copy on {item.ticket.lane.value} uses bytes that were let go",
                    advice="hold both sides of a copy until its ticket was waited for",
                )

    @one_at_a_time
    def check_read(self, src: torch.Tensor) -> None:
        """Raise TransferError if a queued copy has yet to write ``src``."""
        if self._written(src):
            raise TransferError(
                "read before ready: a copy into these bytes is still queued",
                advice="wait for the ticket of the copy first",
            )


def _crc(piece: torch.Tensor) -> int:
    return crc32(memoryview(piece.detach().contiguous().view(torch.uint8).numpy()))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    a0, b0 = a.data_ptr(), b.data_ptr()
    return a0 < b0 + b.numel() * b.element_size() and b0 < a0 + a.numel() * a.element_size()
