"""Gradients on their way down from the device to HOST (floor 2).

A source is held until its copy has landed, and held bytes are bounded. A copy goes straight to its
home, or through a small ring, piece by piece, to jobs that add it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from hetero.device import Device, Slab, Ticket, release_slab
from hetero.jobs import Job
from hetero.memory.layout import row
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.transfers import Landing, Pending, Transfers
from hetero.train.gradients.homes import Growing, standing
from hetero.types import Kind, Lane, Tier

N_STAGES = 8  # pieces on their way or being added
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 512 * 2**10, 16 * 2**20
SHARE = 2048  # of the gradients' bytes: one piece, between these bounds

Consume = Callable[[torch.Tensor, int], Job]


def ring_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the HOST memory of the staging ring for tensors of these sizes."""
    largest = max(sizes_bytes, default=0)
    piece = min(max(sum(sizes_bytes) // SHARE, MIN_PIECE_BYTES), MAX_PIECE_BYTES, largest)
    return N_STAGES * (-(-piece // 16) * 16)


class RingStage:
    """One piece of the ring: filled by a copy, then read by its job."""

    __slots__ = ("_slab", "bytes", "is_filling", "job")

    def __init__(self, slab: Slab) -> None:
        self._slab = slab  # page-locked as long as it lives
        self.bytes = slab.carve(0, slab.n_bytes)
        self.is_filling = False
        self.job: Job | None = None

    def close(self) -> None:
        """Undo page-locking; no copy is under way."""
        release_slab(self._slab)


class GradRing:
    """Gradients on the D2H lane, oldest first, and the ring that stages those to be added.

    Args:
        sizes_bytes: of the tensors that may come.
        most_bytes: of held sources, if there is room; `limit_bytes` may be set lower, and 0 waits
            for every copy.
        lifting: makes room on the device for a copy of a gradient that is at home.
    """

    def __init__(
        self,
        device: Device,
        link: Link,
        ledger: Ledger,
        *,
        sizes_bytes: Sequence[int],
        most_bytes: int,
        lifting: Growing = standing,
    ) -> None:
        self._lifting = lifting
        self.limit_bytes = most_bytes
        self.most_bytes = most_bytes
        self._was_used = False
        self._piece_bytes = ring_bytes(sizes_bytes) // N_STAGES
        self._device = device
        self._link = link
        self._ledger = ledger
        self._copies: Transfers[torch.Tensor] = Transfers()
        self._ends: dict[int, Landing] = {}  # of copies home since all had landed, by parameter
        self._reads: Transfers[Sequence[torch.Tensor]] = Transfers()  # by others, in place
        self._stages: deque[RingStage] = deque()

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        bucket: int,
        index: int | None = None,
        made: Ticket | None = None,
        then: Callable[[], None] | None = None,
    ) -> Landing:
        """Queue a copy of raw bytes (1-D uint8) after the compute that made the source.

        That is the compute so far, unless a ticket ``made`` was marked after it. ``index`` is of
        the parameter to whose home it goes.
        """
        after = (made or self._device.mark(),)
        ticket = self._link.move(
            Lane.D2H, target, source, kind=Kind.GRAD, after=after, bucket=bucket, why="gradient"
        )
        landing = Landing(self._link, ticket, Kind.GRAD, bucket)
        if index is not None:
            self._ends[index] = landing
        self._copies.queue(landing, source, n_bytes=source.numel(), then=then)
        self._was_used = True
        if then is not None or self._copies.bytes_in_flight > self.limit_bytes:
            self.poll()  # else the end of a flush does, once for all of its copies
        return landing

    def mark(self) -> Ticket:
        """Return a ticket for the compute so far: one for many copies."""
        return self._device.mark()

    def in_order(self) -> None:
        """Let compute go on after that which made earlier gradients; see `Device.in_order`."""
        self._device.in_order()

    def n_pieces(self, source: torch.Tensor) -> int:
        """Return how many jobs `hand` makes of a 1-D tensor, once its copies have landed."""
        return len(self._starts(source))

    def _starts(self, source: torch.Tensor) -> range:
        """Return the first element of each piece."""
        whole = max(1, source.numel())
        step = max(1, self._piece_bytes // source.element_size())
        return range(0, whole, whole if self._device.same_ram else step)

    def hand(self, source: torch.Tensor, consume: Consume, *, bucket: int) -> None:
        """Give a 1-D tensor to jobs on HOST: ``consume(piece, first element)`` makes each job."""
        if self._device.same_ram:
            self._link.count(Lane.D2H, source.nbytes, kind=Kind.GRAD, bucket=bucket, why="gradient")
            self._reads.queue(consume(source, 0), (), n_bytes=source.nbytes)
            self._was_used = True
            self.poll()
            return
        starts = self._starts(source)
        for start in starts:
            self._stage_piece(source[start : start + starts.step], start, consume, bucket)

    def hold(self, end: Pending, sources: Sequence[torch.Tensor]) -> None:
        """Hold sources that something else sends until it is over; waits while too much is held."""
        self._reads.queue(end, sources, n_bytes=sum(source.nbytes for source in sources))
        self._was_used = True
        self.poll()

    @contextmanager
    def brought_up(
        self, home: torch.Tensor, place: torch.device, *, bucket: int, more_bytes: int = 0
    ) -> Iterator[torch.Tensor]:
        """Yield a gradient on HOST as the device's kernels may read it inside the block: a copy up,
        which has landed, so that a job may write the home. The block makes ``more_bytes`` of it."""
        if not self._device.is_cuda:
            yield home
            return
        self.finish()  # sources on their way down would have to be on the device with it
        with self._lifting(home.nbytes + more_bytes):
            up = torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=place)
            ticket = self._link.move(
                *(Lane.H2D, row(up).view(torch.uint8), row(home).view(torch.uint8)),
                kind=Kind.GRAD,
                after=(self._device.mark(),),
                bucket=bucket,
                why="norm",
            )
            self._link.sync(ticket, kind=Kind.GRAD, bucket=bucket)
            yield up
            del up  # before what gave way for it comes back

    @property
    def useful_bytes(self) -> int:
        """The limit that lets copies overlap with compute; 0 if nothing went down."""
        return self.most_bytes if self._was_used else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of held sources, as last polled."""
        return self._copies.bytes_in_flight + self._reads.bytes_in_flight

    def sources(self) -> Iterator[torch.Tensor]:
        """Yield the tensors held on the device until their copies have landed."""
        return chain(self._copies.kept(), *self._reads.kept())

    def _stage_piece(self, part: torch.Tensor, start: int, consume: Consume, bucket: int) -> None:
        stage = self._free_stage()
        piece = stage.bytes[: part.nbytes]
        stage.is_filling = True

        def landed() -> None:
            stage.is_filling = False
            stage.job = consume(piece.view(part.dtype), start)

        self.copy(piece, part.view(torch.uint8), bucket=bucket, then=landed)

    def poll(self) -> None:
        """Release landed sources, and wait for the oldest while too much is held."""
        self._copies.poll(self.limit_bytes)
        self._reads.poll(self.limit_bytes)  # of a device whose copies are immediate

    def land(self, indices: Iterable[int]) -> None:
        """Wait for the copies to some parameters' homes, also of gradients taken away since."""
        for index in indices:
            landing = self._ends.pop(index, None)
            if landing is not None:
                landing.wait()

    def finish(self) -> None:
        """Wait until every copy has landed and every job is submitted."""
        self._copies.finish()
        self._ends.clear()

    def _free_stage(self) -> RingStage:
        """Return the stage that was used longest ago, once its bytes are not needed."""
        if len(self._stages) < N_STAGES:
            n_bytes = self._piece_bytes
            self._ledger.charge(Tier.HOST, Kind.GRAD, n_bytes, "staging of gradients")
            self._stages.append(RingStage(self._device.slab(n_bytes)))
            return self._stages[-1]
        self._stages.rotate(-1)
        stage = self._stages[-1]
        while stage.is_filling:
            self._copies.finish_oldest()
        if stage.job is not None:
            stage.job.wait()
            stage.job = None
        return stage

    def close(self) -> None:
        """Finish, and give the ring back."""
        self.finish()
        while self._stages:
            stage = self._stages.pop()
            self._ledger.credit(Tier.HOST, Kind.GRAD, self._piece_bytes)
            if stage.job is not None:
                stage.job.wait()
            stage.close()
