"""Copies between a device and memory that is not page-locked, through a ring of stages.

[Note: through stages]  A copy of pageable memory stops the host. So a thread of the lane's own
copies such bytes piece by piece between the memory and page-locked stages, and queues the copies
between stages and device. A lane stays in order: what is asked for after such a copy, and what has
its ticket in ``after``, comes after it, in the same threads if need be. Whoever waits helps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from mmap import PAGESIZE

import torch

from hetero.cores import Cores
from hetero.device.face import LANES, Slab, Ticket, release_slab
from hetero.errors import HeteroError, TransferError
from hetero.jobs import Job, Worker, thread_budget
from hetero.types import Lane

N_STAGES = 8
MAX_STAGE_BYTES = 8 * 2**20  # so many bytes are copied for longer than a thread's Python takes
LEAST_BYTES = N_STAGES * PAGESIZE  # of a ring
MAX_LANE_THREADS = 4  # more than a link can use

Queue = Callable[[Lane, torch.Tensor, torch.Tensor, Iterable[Ticket]], Ticket]


def lane_threads(cores: int) -> int:
    """Return the threads of each lane: two or more, so that one copies while another waits."""
    return max(2, min(MAX_LANE_THREADS, cores // 4))


def stages_bytes(largest_bytes: int, limit_bytes: int | None = None) -> int:
    """Return the bytes of a ring for copies of at most ``largest_bytes``, within a limit."""
    most = MAX_STAGE_BYTES if limit_bytes is None else min(limit_bytes // N_STAGES, MAX_STAGE_BYTES)
    return N_STAGES * max(PAGESIZE, min(largest_bytes // 2, most) // PAGESIZE * PAGESIZE)


class StagedTicket(Ticket):
    """Of a copy that threads bring about; ``job`` is their work."""

    __slots__ = ("job", "queued")

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane, 0.0)
        self.job: Job
        self.queued: Ticket | None = None
        """The end of its copies on the lane, when all are queued; None if nothing is left to wait
        for then."""

    def span(self) -> tuple[float, float]:
        self.job.settle()
        begin, end = self.job.began or 0.0, self.job.ended or 0.0
        return begin, max(end, self.queued.span()[1] if self.queued is not None else end)


class Stage:
    """A piece of the ring; ``reader`` is the last copy from it to the device."""

    __slots__ = ("bytes", "reader")

    def __init__(self, piece: torch.Tensor) -> None:
        self.bytes = piece
        self.reader: Ticket | None = None


class StageRing:
    """Stages in one page-locked slab; a thread takes one for each piece."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.stage_bytes = slab.n_bytes // N_STAGES
        starts = range(0, N_STAGES * self.stage_bytes, self.stage_bytes)
        self._free = deque(Stage(slab.carve(start, self.stage_bytes)) for start in starts)
        self._changed = threading.Condition()

    @contextmanager
    def stage(self) -> Iterator[Stage]:
        """Lend the stage that was used longest ago; its reader may not be done yet."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            stage = self._free.popleft()
        try:
            yield stage
        finally:
            with self._changed:
                self._free.append(stage)
                self._changed.notify()


class Staging:
    """Copies through stages, each lane's in order.

    Args:
        queue: queues a copy of page-locked memory on a lane.
        sync: waits for such a copy.
        slab: makes page-locked memory.
        n_threads: of each lane, None: as many as suit the cores; 0 copies at once, in the thread
            that asks.
    """

    def __init__(
        self,
        queue: Queue,
        sync: Callable[[Ticket], object],
        slab: Callable[[int], Slab],
        *,
        n_threads: int | None = None,
    ) -> None:
        n_threads = lane_threads(thread_budget() + 1) if n_threads is None else n_threads
        self._queue = queue
        self._sync = sync
        self._slab = slab
        self._workers = {lane: Worker(n_threads) for lane in LANES}
        self._cores = Cores(n_threads)
        self._last: dict[Lane, Job] = {}
        self._asking = threading.RLock()
        self._ring: StageRing | None = None

    @property
    def n_bytes(self) -> int:
        """The bytes of the ring."""
        return 0 if self._ring is None else self._ring.slab.n_bytes

    def open(self, n_bytes: int) -> None:
        """Make the ring, of `stages_bytes`, unless there is one of so many bytes; a smaller one if
        that is not page-locked, but not if none is: each piece costs a copy of its own."""
        if self.n_bytes >= n_bytes:
            return
        self.close()
        pageable = slab = self._slab(n_bytes)
        while not slab.registered and n_bytes > LEAST_BYTES:
            n_bytes = max(LEAST_BYTES, n_bytes // 2 // LEAST_BYTES * LEAST_BYTES)
            slab = self._slab(n_bytes)
        self._ring = StageRing(slab if slab.registered else pageable)

    def close(self) -> None:
        """Finish, and give the ring back; the next copy makes one again."""
        self.finish()
        ring, self._ring = self._ring, None
        if ring is not None:
            release_slab(ring.slab)

    @contextmanager
    def lent(self, n_bytes: int) -> Iterator[torch.Tensor]:
        """Lend a stage to the block; without a ring make one for copies of ``n_bytes``."""
        with self._made(n_bytes).stage() as stage:
            self._land(stage.reader)
            yield stage.bytes

    def _made(self, n_bytes: int) -> StageRing:
        """Return the ring, made for copies of ``n_bytes`` if there is none."""
        while (ring := self._ring) is None:
            self.open(stages_bytes(n_bytes))
        return ring

    # -- copies ----------------------------------------------------------------------------------

    def holds_up(self, lane: Lane, after: Sequence[Ticket]) -> bool:
        """Whether a copy on a lane has to come after one that is not on the lane yet."""
        last = self._last.get(lane)
        if last is not None and not last.done:
            return True
        return any(isinstance(ticket, StagedTicket) and not ticket.job.done for ticket in after)

    def copy(
        self,
        lane: Lane,
        dst: torch.Tensor,
        src: torch.Tensor,
        after: Sequence[Ticket],
        *,
        staged: bool = True,
    ) -> Ticket:
        """Ask for a copy; ``staged`` unless its HOST side is page-locked."""
        ticket = StagedTicket(lane)
        with self._asking:
            pieces: Iterable[Callable[[], None]] = (
                self._pieces(lane, dst, src, after)
                if staged
                else (partial(self._whole, ticket, dst, src, after),)
            )
            before = {t.job for t in after if isinstance(t, StagedTicket) and not t.job.done}
            last = self._last.get(lane)
            if last is not None and not last.done:
                before.add(last)
            end = partial(self._end, ticket, dst) if staged else None
            worker = self._workers[lane]
            ticket.job = self._last[lane] = worker.job(
                pieces, src.numel(), finish=end, after=tuple(before)
            )
            worker.submit(ticket.job)
        return ticket

    def _pieces(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Ticket]
    ) -> list[Callable[[], None]]:
        """Return the work on each piece."""
        ring = self._made(src.numel())
        move = self._up if lane is Lane.H2D else self._down
        size = ring.stage_bytes
        pairs = zip(dst.split(size), src.split(size), strict=True)
        return [partial(move, ring, d, s, after) for d, s in pairs]

    def _up(
        self, ring: StageRing, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Ticket]
    ) -> None:
        with self._cores.one(), ring.stage() as stage:
            self._land(stage.reader)
            piece = stage.bytes[: src.numel()]
            piece.copy_(src)
            stage.reader = self._queue(Lane.H2D, dst, piece, on_lanes(after))

    def _down(
        self, ring: StageRing, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Ticket]
    ) -> None:
        with self._cores.one(), ring.stage() as stage:
            piece = stage.bytes[: src.numel()]
            readers = [] if stage.reader is None else [stage.reader]
            stage.reader = None
            self._land(self._queue(Lane.D2H, piece, src, [*on_lanes(after), *readers]))
            dst.copy_(piece)

    def _whole(
        self,
        ticket: StagedTicket,
        dst: torch.Tensor,
        src: torch.Tensor,
        after: Sequence[Ticket],
    ) -> None:
        """Queue a copy of page-locked memory after staged ones."""
        ticket.queued = self._queue(ticket.lane, dst, src, on_lanes(after))

    def _end(self, ticket: StagedTicket, dst: torch.Tensor) -> None:
        """Note the end of a copy's pieces, which were queued in any order."""
        if ticket.lane is Lane.H2D:
            ticket.queued = self._queue(ticket.lane, dst[:0], dst[:0], ())  # no bytes: a mark

    def _land(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._sync(ticket)

    # -- waits -----------------------------------------------------------------------------------

    def wait(self, ticket: StagedTicket) -> None:
        """Help until a copy is on its lane (H2D), or at home (D2H)."""
        try:
            ticket.job.wait()
        except HeteroError:
            raise
        except RuntimeError as error:
            raise TransferError(
                f"a copy on {ticket.lane.value} through page-locked stages failed: {error}",
                advice="what it was to write is undefined: go on from a checkpoint",
            ) from error

    def queued(self, after: Iterable[Ticket]) -> list[Ticket]:
        """Wait until staged copies of tickets are on their lanes; return tickets that have
        events."""
        after = tuple(after)
        for ticket in after:
            if isinstance(ticket, StagedTicket):
                self.wait(ticket)
        return on_lanes(after)

    def finish(self) -> None:
        """Wait until no copy is left to queue; errors are their waiters'."""
        for job in list(self._last.values()):
            job.settle()


def on_lanes(after: Sequence[Ticket]) -> list[Ticket]:
    """Return tickets of the device's own for tickets whose jobs are done."""
    known = [t.queued if isinstance(t, StagedTicket) else t for t in after]
    return [ticket for ticket in known if ticket is not None]
