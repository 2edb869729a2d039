"""The way of a bucket's addends between ranks, next to what the model computes (floor 2).

A crossing goes part by part: a part of this rank's addends is copied into the outbox while the part
before it, of all ranks, is summed. Crossings are made one after the other, in the order in which
ranks have agreed on them, by a thread of their own: between ranks its calls have an order of their
own, too. A thread that waits for one that has not begun makes it itself. Where time is modelled,
each is made at once, and takes its time next to compute. On a CPU that is its own device each is
made where it begins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from hetero.cores import Cores
from hetero.device import Device, Ticket
from hetero.device.comm import Addends, Comm, standing_for
from hetero.errors import DivergenceError
from hetero.jobs import Job, Worker
from hetero.memory.extent import PinUse, overlap
from hetero.memory.home import Home
from hetero.memory.layout import Bucket, Layout, Segment, row
from hetero.memory.link import Link
from hetero.train.model.host_work import host_work
from hetero.types import Kind, Lane

SUM_NUMEL = 2**18
PARTS = 16  # exchanges of a bucket: buffers are then small compared with the states
LEAST_PART, MOST_PART = 2**12, 2**20  # elements of each share in one of them: a call takes longer
_offset_of, _end_of = attrgetter("offset"), attrgetter("end")


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


@dataclass(frozen=True)
class Load:
    """What crosses: a bucket's gradients, of which any rank has one."""

    bucket: Bucket
    addends: Mapping[int, torch.Tensor]
    """This rank's, by position."""
    made: Ticket
    """Marked after the compute that made them."""
    sums: Sequence[Sum]
    """Of this rank's share, in the order of elements."""
    home: Home
    unscale: float


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


class Crossing:
    """One bucket on its way; ends where time is modelled when that time has come."""

    def __init__(self, load: Load, fleet: Crossings) -> None:
        self.bucket = load.bucket
        self._fleet = fleet
        self._load: Load | None = load
        self._ends = Ticket(Lane.REDUCE, 0.0, done=True)
        self.job = Job([self._cross], after=fleet.before(), retries=False)

    @property
    def done(self) -> bool:
        return self.job.done and self._ends.end <= self._fleet.now()

    def wait(self) -> None:
        """Block until every sum of this rank's is at home; raises its error, if it failed."""
        self.settle()
        self.job.wait()

    def settle(self) -> None:
        """Block until it is over, or has failed."""
        if not self.done:
            with self._fleet.standing():
                self.job.settle()
                self._fleet.pass_until(self._ends)

    def _cross(self) -> None:
        load, self._load = self._load, None
        assert load is not None
        with self._fleet.aside(), host_work(), self._fleet.telling():
            self._fleet.cross(load)
            self._ends.end = self._fleet.now()


@dataclass(frozen=True)
class Sources:
    """What a crossing reads: not needed once it is over, whatever its end."""

    crossing: Crossing

    @property
    def done(self) -> bool:
        return self.crossing.done

    def wait(self) -> None:
        self.crossing.settle()


class Crossings:
    """Makes crossings, one after the other."""

    def __init__(self, comm: Comm, device: Device, link: Link, cores: Cores) -> None:
        self._comm = comm
        self._device = device
        self._link = link
        # where copies are immediate, a thread would only take turns with the one that computes
        is_aside = not (device.is_modelled or device.same_ram)
        self._worker = Worker(1 if is_aside else 0)
        self._cores: Callable[[], AbstractContextManager[None]] = nullcontext
        if is_aside and not device.is_cuda:  # two teams of torch's threads hinder each other
            self._cores = cores.one
        self._last: Job | None = None
        comm.lock_outboxes(device)

    def begin(self, crossing: Crossing) -> None:
        """Begin a crossing after the ones before it; all ranks begin the same."""
        self._last = crossing.job
        self._worker.submit(crossing.job)

    def before(self) -> list[Job]:
        """Return the crossing that comes first: one that failed fails those after it, too."""
        last = self._last
        return [] if last is None or (last.done and not last.failed) else [last]

    def clear(self) -> None:
        """Begin anew, after a crossing that failed or without one."""
        if self._last is not None and self._last.done:
            self._last = None

    def close(self) -> None:
        self._worker.close()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell other ranks, which wait for this one's next part, if a block fails here alone."""
        try:
            yield
        except DivergenceError:  # they know
            raise
        except BaseException as error:
            self._comm.give_up_exchange(f"fails: {type(error).__name__}: {error}")
            raise

    def refuse(self, error: BaseException) -> None:
        """Tell other ranks that this one cannot begin a crossing on which all have agreed."""
        if self._last is not None:
            self._last.settle()  # its exchanges come before what is told
        self._comm.give_up_exchange(f"fails: {type(error).__name__}: {error}")

    # -- time ------------------------------------------------------------------------------------

    def aside(self) -> AbstractContextManager[None]:
        return self._device.aside()

    def now(self) -> float:
        return self._device.now() if self._device.is_modelled else 0.0

    def pass_until(self, ticket: Ticket) -> None:
        if self._device.is_modelled:
            self._device.wait(ticket)

    def standing(self) -> AbstractContextManager[None]:
        return standing_for(self._comm, self._link.log)

    # -- one bucket ------------------------------------------------------------------------------

    def cross(self, load: Load) -> None:
        """Exchange a bucket part by part, and sum what is of this rank's share."""
        bucket = load.bucket
        if not self._device.has_bytes:
            self._pass(load)
            return
        size, step = bucket.share_numel, part_numel(bucket)
        under_way: tuple[slice, Addends] | None = None
        for start in range(0, size, step):
            found = None if under_way is None else (under_way[0], self._join(under_way[1]))
            part = slice(start, min(start + step, size))
            landed = self._go_down(load, part)
            if found is not None:
                self._sum(load, *found)
            for ticket in landed:
                self._link.sync(ticket, kind=Kind.GRAD, bucket=bucket.id)
            what = f"gradients of bucket {bucket.id} from {start}"
            under_way = part, self._comm.exchange(what)
        if under_way is not None:
            self._sum(load, under_way[0], self._join(under_way[1]))

    def _pass(self, load: Load) -> None:
        """Let the time of a crossing pass, as of one large copy: of a thousand ranks there would be
        too many to walk."""
        bucket, link, device = load.bucket, self._link, self._device
        n_bytes = sum(addend.nbytes for addend in load.addends.values())
        box, sent = (device.arena(n_bytes).carve(0, n_bytes) for _ in range(2))
        ticket = link.move(
            *(Lane.D2H, box, sent),
            kind=Kind.GRAD,
            after=(load.made,),
            bucket=bucket.id,
            why="gradient",
        )
        self._comm.outbox(bucket.n_shares * bucket.share_numel * bucket.dtype.itemsize)
        parts = self._join(self._comm.exchange(f"gradients of bucket {bucket.id}"))
        self._sum(load, slice(0, bucket.share_numel), parts)
        link.sync(ticket, kind=Kind.GRAD, bucket=bucket.id)

    def _join(self, addends: Addends) -> list[torch.Tensor]:
        with self.standing():
            return addends.wait()

    def _go_down(self, load: Load, part: slice) -> list[Ticket]:
        """Copy a part of this rank's addends into the outbox."""
        bucket, mine, numel = load.bucket, load.addends, part.stop - part.start
        box = self._comm.outbox(bucket.n_shares * numel * bucket.dtype.itemsize).view(bucket.dtype)
        landed: list[Ticket] = []
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
                        after=(load.made,),
                        bucket=bucket.id,
                        why="gradient",
                    )
                )
        return landed

    def _sum(self, load: Load, part: slice, parts: Sequence[torch.Tensor]) -> None:
        """Sum a part of this rank's share, of which each rank has sent its addends."""
        bucket, numel = load.bucket, part.stop - part.start
        n_bytes = (self._comm.size - 1) * numel * bucket.dtype.itemsize
        self._link.count(Lane.REDUCE, n_bytes, kind=Kind.GRAD, bucket=bucket.id, why="gradient")
        first = bucket.share(self._comm.rank).start + part.start
        has_bytes = self._device.has_bytes  # a plan has no numbers
        values = [each.view(bucket.dtype) for each in parts] if has_bytes else []
        with self._cores():
            for each in load.sums:
                run = overlap(each.run, slice(first, first + numel))
                if run.start < run.stop:
                    self._sum_run(load, each._replace(run=run), values, first)

    def _sum_run(self, load: Load, each: Sum, values: Sequence[torch.Tensor], start: int) -> None:
        """Add a run; ``values`` of each rank are from element ``start`` of the bucket on."""
        use = PinUse.WRITE if each.adds else PinUse.FRESH
        factors = [f for f in (load.unscale, 1 / self._comm.size) if f != 1.0]
        for run in load.home.runs(each.run.start, each.run.stop, use):
            total = load.home.part(run)
            if values:
                add_up(total, each._replace(run=run), values, start, factors)


def add_up(
    total: torch.Tensor,
    each: Sum,
    values: Sequence[torch.Tensor],
    start: int,
    factors: Sequence[float],
) -> None:
    """Add the addends of a run, in the order of ranks; see [Note: order of ranks]."""
    first = each.run.start
    for number, rank in enumerate(each.ranks):
        for at in range(first, each.run.stop, SUM_NUMEL):  # an addend stays in the cache
            end = min(at + SUM_NUMEL, each.run.stop)
            here, addend = total[at - first : end - first], values[rank][at - start : end - start]
            if number == 0 and not each.adds:
                scaled(here.copy_(addend), factors)
            else:
                here.add_(scaled(addend.to(here.dtype, copy=True), factors))


def segments_in(bucket: Bucket, start: int, end: int) -> Sequence[Segment]:
    """Return the segments that have elements in a part of a bucket."""
    first = bisect_right(bucket.segments, start, key=_end_of)
    return bucket.segments[first : bisect_left(bucket.segments, end, key=_offset_of)]


def scaled(values: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    for factor in factors:
        values.mul_(factor)
    return values
