"""Addends of all ranks, exchanged bucket by bucket and summed in the order of ranks (floor 2).

[Note: order of ranks]  Collectives move bytes; every sum is made here. For micro-step i and rank r
of N, a gradient is ((a(0,0)/N + a(0,1)/N) + ...) + a(k-1,N-1)/N, micro-step first: each product by
the number 1/N and each sum is rounded by itself, in fp32 for a weight with a master, else in the
parameter's dtype, and the first addend is a copy. So N ranks give the bits of one rank with N
micro-batches, whatever carries the bytes.

Every backward pass exchanges every trainable bucket once, in one order on all ranks: a bucket
leaves when this rank's gradients of it are complete, or when the pass is over. The ranks tell each
other which gradients they have; one that no rank has stays None, and a bucket without any is left
out.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from hetero.device import Device, Ticket
from hetero.device.comm import Addends, Comm
from hetero.errors import StateError
from hetero.memory.extent import PinUse, overlap
from hetero.memory.home import Home
from hetero.memory.layout import Bucket, Layout, Segment, row
from hetero.memory.link import Link
from hetero.types import Kind, Lane


@dataclass(frozen=True, slots=True)
class Flight:
    """One exchange that is under way: of the same elements of every share of a bucket."""

    bucket: Bucket
    part: slice
    """Of each share."""
    addends: Addends
    unscale: float


class Sum(NamedTuple):
    """A run of this rank's share to which the same ranks add."""

    run: slice
    last: int
    """Position of the last gradient in it."""
    ranks: tuple[int, ...]
    adds: bool
    """Whether it adds to what an earlier pass left at home."""

    def precedes(self, other: Sum) -> bool:
        """Whether the other one is of the next gradient, and of the same ranks."""
        same = (self.ranks, self.adds) == (other.ranks, other.adds)
        return same and other.last == self.last + 1


SUM_NUMEL = 2**18
PARTS = 16  # exchanges of a bucket: buffers are then small compared with the states
LEAST_PART, MOST_PART = 256, 2**20  # elements of each share in one of them
_offset_of, _end_of = attrgetter("offset"), attrgetter("end")
Open = Callable[[Segment], bool]
"""Prepares a gradient for a sum; returns whether it adds to an earlier one."""


def exchange_bytes(layout: Layout) -> int:
    """Return the HOST memory in which addends leave, and in which others' arrive or the next ones
    leave meanwhile."""
    shares = [b for b in layout.buckets if b.trainable and b.n_shares > 1]
    return max(((1 + b.n_copies) * outbox_bytes(b) for b in shares), default=0)


def outbox_bytes(bucket: Bucket) -> int:
    """Return the most bytes that leave at once: those for ranks with the same share leave once."""
    return bucket.n_shares * part_numel(bucket) * bucket.dtype.itemsize


def part_numel(bucket: Bucket) -> int:
    """Return the elements of each share that one exchange moves."""
    return min(bucket.share_numel, max(LEAST_PART, min(-(-bucket.share_numel // PARTS), MOST_PART)))


def sum_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype in which a bucket's gradients add up."""
    return torch.float32 if bucket.has_master else bucket.dtype


class Exchange:
    """Sends this rank's addends to the owners of their shares, and sums those of its own.

    Args:
        expected: returns the positions of a bucket's segments whose gradients a pass makes.
        opens: see `Open`; called for each gradient that any rank has.
        closed: called with it when its sum is at home.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Comm,
        *,
        device: Device,
        link: Link,
        home: Callable[[Bucket], Home],
        expected: Callable[[Bucket], set[int]],
        opens: Open,
        closed: Callable[[Segment], None],
    ) -> None:
        self.unscale = 1.0
        self._layout = layout
        self._comm = comm
        self._device = device
        self._link = link
        self._home = home
        self._expected = expected
        self._opens = opens
        self._closed = closed
        comm.lock_outboxes(device)
        # as backward comes to them if units were registered as they are called
        self._order = [b for b in reversed(layout.buckets) if b.trainable]
        self._completed: list[int] | None = []  # buckets of the first pass, until it is over
        self._next = 0
        self._addends: dict[int, dict[int, torch.Tensor]] = {b.id: {} for b in self._order}
        self._exchanged: set[int] = set()  # buckets of this pass
        self._flight: Flight | None = None
        self._present: list[Segment] = []  # of the bucket under way: those that any rank has
        self._sums: list[Sum] = []  # and the sums of this rank's share

    def add(self, segment: Segment, grad: torch.Tensor) -> None:
        """Take an addend of this rank's, in the parameter's own strides."""
        bucket = self._layout.bucket(segment)
        if bucket.id in self._exchanged:
            raise StateError(
                f"a gradient of {segment.spec.name!r} comes after those of its bucket were summed"
                " over ranks",
                advice="use one backward pass for each micro-batch",
            )
        known = self._addends[bucket.id]
        before = known.get(segment.position)
        known[segment.position] = grad if before is None else before.add_(grad)
        if self._completed is not None and self._expected(bucket) <= known.keys():
            self._completed.append(bucket.id)

    def advance(self) -> None:
        """Begin the exchanges that are due."""
        while self._next < len(self._order):
            bucket = self._order[self._next]
            expected = self._expected(bucket)
            if not (expected and expected <= self._addends[bucket.id].keys()):
                return
            self._begin(bucket)

    def finish_pass(self) -> None:
        """Exchange what is left of a pass; all sums are at home then."""
        while self._next < len(self._order):
            self._begin(self._order[self._next])
        self._finish()
        self.clear()
        self._learn()

    def _learn(self) -> None:
        """From the first pass on keep to the order in which the first rank completed buckets: one
        that comes late holds up all that follow it."""
        if self._completed is None:
            return
        completed, self._completed = self._completed, None
        told = pickle.loads(self._comm.agree(pickle.dumps(completed), "the order of gradients")[0])
        places = {bucket: place for place, bucket in reversed(list(enumerate(told)))}
        self._order.sort(key=lambda bucket: places.get(bucket.id, len(told)))

    def forget(self) -> list[Segment]:
        """Drop the addends of a pass that failed; return the gradients that lack them."""
        lost = [s for b in self._order for s in b.segments if s.position in self._addends[b.id]]
        flight = self._flight
        if flight is not None:
            there, _ = flight.addends.wait()
            if flight.part.start:
                self._home(flight.bucket).changes.end()
            lost += present_in(flight.bucket, there)
        self.clear()
        return lost

    def clear(self) -> None:
        """Begin anew."""
        self._next, self._flight = 0, None
        self._exchanged.clear()
        for addends in self._addends.values():
            addends.clear()

    # -- one bucket ------------------------------------------------------------------------------

    def _begin(self, bucket: Bucket) -> None:
        """Exchange a bucket part by part; the last one stays under way."""
        mine = self._addends[bucket.id]
        here = bytes(segment.position in mine for segment in bucket.segments)
        size, step = bucket.share_numel, part_numel(bucket)
        for start in range(0, size, step):
            self._finish()
            if start and not self._present:
                break  # no rank has a gradient
            part = slice(start, min(start + step, size))
            self._go_down(bucket, part)
            addends = self._comm.exchange(here, f"gradients of bucket {bucket.id} from {start}")
            self._flight = Flight(bucket, part, addends, self.unscale)
        mine.clear()
        self._exchanged.add(bucket.id)
        self._next += 1

    def _go_down(self, bucket: Bucket, part: slice) -> None:
        """Copy a part of this rank's addends into the outbox."""
        mine, numel = self._addends[bucket.id], part.stop - part.start
        box = self._comm.outbox(bucket.n_shares * numel * bucket.dtype.itemsize).view(bucket.dtype)
        landed: list[Ticket] = []
        made = (self._device.mark(),)
        for share in range(bucket.n_shares):
            first = bucket.share(share).start + part.start
            for segment in segments_in(bucket, first, first + numel):
                run = overlap(slice(first, first + numel), slice(segment.offset, segment.end))
                if segment.position not in mine or run.start >= run.stop:
                    continue
                at = share * numel - first
                target = box[at + run.start : at + run.stop].view(torch.uint8)
                source = row(mine[segment.position])[segment.inside(run)].view(torch.uint8)
                landed.append(
                    self._link.move(
                        *(Lane.D2H, target, source),
                        kind=Kind.GRAD,
                        after=made,
                        bucket=bucket.id,
                        why="gradient",
                    )
                )
        for ticket in landed:
            self._link.sync(ticket, kind=Kind.GRAD, bucket=bucket.id)

    def _finish(self) -> None:
        """Sum the addends of the exchange under way."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        with self._link.log.standing("ranks"):
            there, parts = flight.addends.wait()
        bucket, part = flight.bucket, flight.part
        if part.start == 0:
            self._open(bucket, there)
        if not self._present:
            return
        n_bytes = (self._comm.size - 1) * (part.stop - part.start) * bucket.dtype.itemsize
        self._link.count(Lane.REDUCE, n_bytes, kind=Kind.GRAD, bucket=bucket.id, why="gradient")
        first = bucket.share(self._comm.rank).start + part.start
        values = [each.view(bucket.dtype) for each in parts]
        for each in self._sums:
            run = overlap(each.run, slice(first, first + part.stop - part.start))
            if run.start < run.stop:
                self._sum(flight, each._replace(run=run), values, first)
        if part.stop == bucket.share_numel:
            self._home(bucket).changes.end()
            for segment in self._present:
                self._closed(segment)

    def _open(self, bucket: Bucket, there: Sequence[bytes]) -> None:
        """Begin the sums of a bucket, of which each rank tells which gradients it has."""
        self._present = present_in(bucket, there)
        if not self._present:
            return
        sums = [self._sum_of(segment, bucket, there) for segment in self._present]
        self._sums = merged([found for found in sums if found is not None])
        self._home(bucket).changes.begin()

    def _sum_of(self, segment: Segment, bucket: Bucket, there: Sequence[bytes]) -> Sum | None:
        """Return the sum of a gradient's part in this rank's share; None if there is none."""
        adds = self._opens(segment)
        run = overlap(slice(segment.offset, segment.end), bucket.share(self._comm.rank))
        ranks = tuple(r for r, have in enumerate(there) if have[segment.position])
        return Sum(run, segment.position, ranks, adds) if run.start < run.stop else None

    def _sum(self, flight: Flight, each: Sum, values: Sequence[torch.Tensor], start: int) -> None:
        """Add a run; ``values`` of each rank are from element ``start`` of the bucket on."""
        home = self._home(flight.bucket)
        use = PinUse.WRITE if each.adds else PinUse.FRESH
        for run in home.runs(each.run.start, each.run.stop, use):
            total = home.part(run)
            if not total.is_meta:  # a plan has no numbers
                self._add(total, flight, each._replace(run=run), values, start)

    def _add(
        self,
        total: torch.Tensor,
        flight: Flight,
        each: Sum,
        values: Sequence[torch.Tensor],
        start: int,
    ) -> None:
        first = each.run.start
        factors = [f for f in (flight.unscale, 1 / self._comm.size) if f != 1.0]
        for number, rank in enumerate(each.ranks):
            for at in range(first, each.run.stop, SUM_NUMEL):  # an addend stays in the cache
                end = min(at + SUM_NUMEL, each.run.stop)
                here, addend = (
                    total[at - first : end - first],
                    values[rank][at - start : end - start],
                )
                if number == 0 and not each.adds:
                    scaled(here.copy_(addend), factors)
                else:
                    here.add_(scaled(addend.to(here.dtype, copy=True), factors))


def present_in(bucket: Bucket, there: Sequence[bytes]) -> list[Segment]:
    """Return a bucket's gradients that any rank has."""
    return [s for s in bucket.segments if any(have[s.position] for have in there)]


def segments_in(bucket: Bucket, start: int, end: int) -> Sequence[Segment]:
    """Return the segments that have elements in a part of a bucket."""
    first = bisect_right(bucket.segments, start, key=_end_of)
    return bucket.segments[first : bisect_left(bucket.segments, end, key=_offset_of)]


def scaled(values: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    for factor in factors:
        values.mul_(factor)
    return values


def merged(sums: Sequence[Sum]) -> list[Sum]:
    """Join sums of neighbours to which the same ranks add; the padding between them goes along.

    A gradient between them that no rank has now may be at home from an earlier pass.
    """
    found: list[Sum] = []
    for each in sums:
        if found and found[-1].precedes(each):
            each = each._replace(run=slice(found.pop().run.start, each.run.stop))
        found.append(each)
    return found
