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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from hetero.cores import Cores
from hetero.device import Device, Ticket
from hetero.device.comm import Addends, Comm, Relay, relay_of, standing_for
from hetero.errors import DivergenceError
from hetero.jobs import Job, Worker
from hetero.memory.extent import PinUse, overlap
from hetero.memory.home import Home
from hetero.memory.layout import Bucket, Layout, Segment, row
from hetero.memory.link import Link
from hetero.train.gradients.device_sums import DeviceSums, SumSpace
from hetero.train.gradients.rank_sums import Sum, add_up, inside, sum_dtype
from hetero.train.model.host_work import host_work
from hetero.types import Kind, Lane

PARTS = 16  # exchanges of a bucket: buffers are then small compared with the states
LEAST_PART, MOST_PART = 2**12, 2**20  # elements of each share in one of them: a call takes longer
CARVED = 512  # bytes: carvings begin at multiples, as torch's own allocations do
_offset_of, _end_of = attrgetter("offset"), attrgetter("end")


class UnderWay(NamedTuple):
    """A part of every share, exchanged."""

    part: slice
    addends: Addends


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
    group_sums: Sequence[Sequence[Sum]]
    """With a relay: those of this rank's group, for each of `Relay.shares`."""
    home: Home
    unscale: float


def exchange_bytes(layout: Layout, sum_group: int) -> int:
    """Return the HOST memory in which addends leave, and in which others' arrive or the next ones
    leave meanwhile; and in which sums of groups do."""
    shares = [b for b in layout.buckets if b.trainable and b.n_shares > 1]
    return max((crossing_bytes(bucket, sum_group) for bucket in shares), default=0)


def crossing_bytes(bucket: Bucket, sum_group: int) -> int:
    """Return the most bytes that one bucket takes on its way."""
    n_ranks, out = bucket.n_shares * bucket.n_copies, outbox_bytes(bucket)
    straight = out + bucket.n_copies * out
    relay = relay_of(0, n_ranks, bucket.n_shares, sum_group)
    if relay is None:
        return straight
    arrived = sum_group * len(relay.shares) * out // bucket.n_shares
    across = (len(relay.shares) + len(relay.keepers)) * part_numel(bucket)
    return max(straight, out + arrived + across * sum_dtype(bucket).itemsize)


def outbox_bytes(bucket: Bucket) -> int:
    """Return the most bytes that leave at once: those for ranks with the same share leave once."""
    return bucket.n_shares * part_numel(bucket) * bucket.dtype.itemsize


def part_numel(bucket: Bucket) -> int:
    """Return the elements of each share that one exchange moves."""
    return min(bucket.share_numel, max(LEAST_PART, min(-(-bucket.share_numel // PARTS), MOST_PART)))


def workspace_for(buckets: Iterable[Bucket], sum_group: int) -> SumSpace:
    """Return what sums at homes of some buckets on a device take there."""
    slot = partial = 0
    for bucket in buckets:
        wide, numel = sum_dtype(bucket).itemsize, part_numel(bucket)
        slot = max(slot, numel * (wide if sum_group > 1 else bucket.dtype.itemsize))
        partial = max(partial, numel * wide)
    return SumSpace(*(-(-n_bytes // CARVED) * CARVED for n_bytes in (slot, partial)))


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

    @property
    def failed(self) -> bool:
        return self.job.failed

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

    def __init__(
        self, comm: Comm, device: Device, link: Link, cores: Cores, space: SumSpace
    ) -> None:
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
        self._on_device = DeviceSums(device, link, space) if space.n_bytes else None
        self._group_sums = torch.empty(0, device="cpu")  # on their way to the ranks of their shares
        comm.lock_outboxes(device)
        if self._on_device is not None:
            comm.lock_inboxes(device)

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
        under_way: UnderWay | None = None
        passed: UnderWay | None = None
        for start in range(0, size, step):
            arrived = None if under_way is None else (under_way.part, self._join(under_way.addends))
            part = slice(start, min(start + step, size))
            landed = self._go_down(load, part)
            if arrived is not None:
                passed = self._take(load, *arrived, passed)
            for ticket in landed:
                self._link.sync(ticket, kind=Kind.GRAD, bucket=bucket.id)
            under_way = UnderWay(part, self._comm.exchange(what(bucket, part)))
        if under_way is not None:
            passed = self._take(load, under_way.part, self._join(under_way.addends), passed)
        if passed is not None:
            self._sum_groups(load, passed)

    def _take(
        self,
        load: Load,
        part: slice,
        parts: Sequence[torch.Tensor],
        passed: UnderWay | None,
    ) -> UnderWay | None:
        """Sum what has come for a part; with a relay that of this group, which goes on, after the
        groups' sums of the part before were taken."""
        relay = self._comm.relay
        if relay is None:
            self._sum(load, part, parts)
            return None
        if passed is not None:
            self._sum_groups(load, passed)
        sums = self._sum_own_group(load, part, parts, relay)
        return UnderWay(part, self._comm.pass_on(sums, what(load.bucket, part)))

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
        part = slice(0, bucket.share_numel)
        parts = self._join(self._comm.exchange(what(bucket, part)))
        passed = self._take(load, part, parts, None)
        if passed is not None:
            self._sum_groups(load, passed)
        link.sync(ticket, kind=Kind.GRAD, bucket=bucket.id)

    def _join(self, addends: Addends) -> list[torch.Tensor]:
        with self.standing():
            return addends.wait()

    def _go_down(self, load: Load, part: slice) -> list[Ticket]:
        """Copy a part of this rank's addends into the outbox."""
        bucket, mine, numel = load.bucket, load.addends, part.stop - part.start
        box = self._comm.outbox(bucket.n_shares * numel * bucket.dtype.itemsize).view(bucket.dtype)
        landed: list[Ticket] = []
        relay = self._comm.relay
        for share in range(bucket.n_shares):
            first = bucket.share(share).start + part.start
            for segment in segments_in(bucket, first, first + numel):
                run = overlap(slice(first, first + numel), slice(segment.offset, segment.end))
                if segment.position not in mine or run.start >= run.stop:
                    continue
                at = (share if relay is None else relay.place(share)) * numel - first
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
        self._count(bucket, (self._comm.size - 1) * numel * bucket.dtype.itemsize)
        group = self._comm.sum_group
        self._sum_home(load, part, parts, bucket.dtype, self._factors(load), group)

    def _sum_own_group(
        self, load: Load, part: slice, parts: Sequence[torch.Tensor], relay: Relay
    ) -> torch.Tensor:
        """Return the bytes of this group's sums of a part of each of `Relay.shares`."""
        bucket, numel = load.bucket, part.stop - part.start
        n_arrived = (len(relay.members) - 1) * len(relay.shares) * numel
        self._count(bucket, n_arrived * bucket.dtype.itemsize)
        self._comm.summed(sum(each.nbytes for each in parts) + parts[0].nbytes)
        if not self._device.has_bytes:
            n_bytes = len(relay.shares) * numel * sum_dtype(bucket).itemsize
            return self._device.arena(n_bytes).carve(0, n_bytes)
        found = self._room(len(relay.shares) * numel, sum_dtype(bucket)).view(-1, numel)
        values = [each.view(bucket.dtype).view(-1, numel) for each in parts]
        factors = self._factors(load)
        with self._cores():
            for number, sums in enumerate(load.group_sums):
                first = bucket.share(relay.shares[number]).start + part.start
                arrived = [each[number] for each in values]
                for each in inside(sums, slice(first, first + numel)):
                    total = found[number, each.run.start - first : each.run.stop - first]
                    add_up(total, each, arrived, first, factors, relay.sum_group)
        return found.view(-1).view(torch.uint8)

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for sums of this group; those before were sent."""
        n_bytes = numel * dtype.itemsize
        if self._group_sums.nbytes < n_bytes:
            self._group_sums = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        return self._group_sums[:n_bytes].view(dtype)

    def _sum_groups(self, load: Load, passed: UnderWay) -> None:
        """Add what all groups have for a part of this rank's share, in the order of groups."""
        parts, part, bucket = self._join(passed.addends), passed.part, load.bucket
        dtype = sum_dtype(bucket)
        self._count(bucket, (len(parts) - 1) * (part.stop - part.start) * dtype.itemsize)
        self._sum_home(load, part, parts, dtype, [], 1)

    def _sum_home(
        self,
        load: Load,
        part: slice,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        factors: Sequence[float],
        sum_group: int,
    ) -> None:
        """Add a part of this rank's share at home; a sum's ranks are numbers of ``parts``."""
        first = load.bucket.share(self._comm.rank).start + part.start
        here = inside(load.sums, slice(first, first + part.stop - part.start))
        values = self._of(parts, dtype)
        if load.home.on_device:
            self._sum_on_device(load, here, parts, values, first, factors, sum_group)
            return
        self._comm.summed(sum(each.nbytes for each in parts) + parts[0].nbytes)
        with self._cores():
            for each in here:
                use = PinUse.WRITE if each.adds else PinUse.FRESH
                for run in load.home.runs(each.run.start, each.run.stop, use):
                    total = load.home.part(run)
                    if values:
                        one = each._replace(run=run)
                        add_up(total, one, values, first, factors, sum_group)

    def _sum_on_device(
        self,
        load: Load,
        sums: Iterable[Sum],
        parts: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        first: int,
        factors: Sequence[float],
        sum_group: int,
    ) -> None:
        assert self._on_device is not None  # where there are such homes
        if not values:
            self._on_device.pass_time(sum(each.nbytes for each in parts), load.bucket.id)
            return
        self._on_device.add(
            *(load.home, sums, values, first),
            factors=factors,
            sum_group=sum_group,
            after=load.made,
            bucket=load.bucket.id,
        )

    def _factors(self, load: Load) -> list[float]:
        return [f for f in (load.unscale, 1 / self._comm.size) if f != 1.0]

    def _of(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return parts as values; none in a plan, which has no numbers."""
        return [each.view(dtype) for each in parts] if self._device.has_bytes else []

    def _count(self, bucket: Bucket, n_bytes: int) -> None:
        self._link.count(Lane.REDUCE, n_bytes, kind=Kind.GRAD, bucket=bucket.id, why="gradient")


def what(bucket: Bucket, part: slice) -> str:
    return f"gradients of bucket {bucket.id} from {part.start}"


def segments_in(bucket: Bucket, start: int, end: int) -> Sequence[Segment]:
    """Return the segments that have elements in a part of a bucket."""
    first = bisect_right(bucket.segments, start, key=_end_of)
    return bucket.segments[first : bisect_left(bucket.segments, end, key=_offset_of)]
