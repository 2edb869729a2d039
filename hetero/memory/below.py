"""Moves bytes between replicas and their homes, below HBM (floor 1, mechanism).

[Note: written codes]  A coded home (codec.py) rounds the values written to it. A replica that was
written or exposed is encoded when it is flushed or pinned next, and refreshed from the codes, so
eviction never changes a computed value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hetero.device import Device, Ticket
from hetero.device.comm import Comm, standing_for
from hetero.errors import StateError
from hetero.memory.asked import AskedFrames
from hetero.memory.codec import ENCODED_AT_ONCE, Workspace, is_finite
from hetero.memory.extent import PinUse
from hetero.memory.home import Home
from hetero.memory.homecopy import HomeCopy, HomeEvents
from hetero.memory.layout import Segment, row
from hetero.memory.link import Link
from hetero.memory.replica import Replica
from hetero.memory.shown import refresh
from hetero.types import CopyState, Kind, Lane

ABSENT, FILLING, CLEAN, DIRTY, FLUSHING = CopyState
UNDO = "undo"  # why a fetch overwrites a DIRTY replica


class Way(Protocol):
    """Keeps a replica and its home the same."""

    def expose(self, replica: Any) -> None:
        """The user's code may write a replica from now on without a trace."""

    def written(self, replica: Any) -> None:
        """A replica was written."""

    def flush(self, replica: Any, copy: HomeCopy) -> None:
        """Bring the writes to a replica home, and return when they are there."""

    def refetch(self, replica: Any, copy: HomeCopy) -> None:
        """Let a replica that is held show what is at home."""

    def undo(self, replica: Any, copy: HomeCopy) -> None:
        """Undo the writes to a replica that is held, since its last flush."""


class LocalBelow:
    """Fetches replicas from their homes and flushes them there. ``counts`` are the manager's; codes
    are decoded in ``workspace``."""

    def __init__(
        self,
        device: Device,
        link: Link,
        *,
        events: HomeEvents,
        workspace: Workspace | None,
        counts: Counter[str],
    ) -> None:
        self._device = device
        self._link = link
        self._events = events
        self._workspace = workspace
        self._counts = counts

    def expose(self, replica: Replica) -> None:
        """See [Note: exposed bytes]."""
        replica.exposed = True

    def written(self, replica: Replica) -> None:
        """See [Note: written codes]."""
        if not replica.bucket.codec.exact:
            replica.show(None)
            replica.exposed = True

    def fetch(self, replica: Replica, copy: HomeCopy, after: Iterable[Ticket], why: str) -> None:
        """Queue copies of the whole home up; call `wait_fetch` before the first read."""
        bucket, home, was = replica.bucket, copy.home, replica.state
        if not home.changes.are_made:
            with home.changes.standing(self._link.log):
                home.changes.wait()
        copy.check_digest()
        replica.move(FILLING, UNDO if why == UNDO else "fetch")
        copy.fetched()
        after, size = (*after, *home.written_at), home.item_dtype.itemsize
        items = home.items(0, bucket.segments[-1].end)
        try:
            for run, part in home.parts(items.start, items.stop, PinUse.READ):
                place = replica.incoming[run.start * size : run.stop * size]
                source = part.view(torch.uint8)
                replica.ready = self._move(home.lane, place, source, replica, after, why)
                if home.stays:
                    copy.reader = replica.ready
                else:  # not page-locked, and given back after the pin
                    self._sync(replica.ready, replica)
            self._join(replica, after)
        except BaseException:
            replica.ready = None
            replica.move(ABSENT if was is ABSENT else CLEAN, "fail")  # its old state, for a retry
            raise
        if replica.ready is None:
            replica.move(CLEAN, "ready")

    def _join(self, replica: Replica, after: Iterable[Ticket]) -> None:
        """Add what other homes keep of a bucket, after the copies from ours; if there are none,
        after the tickets for which they would have waited."""

    def _arrive(self, ticket: Ticket, replica: Replica) -> None:
        """Make compute wait for all of a replica's bytes."""
        self._link.wait(ticket, kind=Kind.PARAM, bucket=replica.bucket.id)

    def refetch(self, replica: Replica, copy: HomeCopy, why: str = "refresh") -> None:
        """Fetch the home's present bytes into a replica, in place, so that leases see them too."""
        self.fetch(replica, copy, (self._device.mark(),), why)
        self.wait_fetch(replica)

    def undo(self, replica: Replica, copy: HomeCopy) -> None:
        """Fetch what is at home over what was written."""
        self.refetch(replica, copy, UNDO if replica.dirty else "refresh")

    def wait_reader(self, copy: HomeCopy) -> None:
        """Block the host until the last fetch from a home has read it: a thread writes next. If
        compute writes next, compute waits."""
        if copy.reader is not None:
            wait = self._link.wait if copy.home.on_device else self._link.sync
            wait(copy.reader, kind=Kind.PARAM, bucket=copy.bucket.id)
            copy.reader = None

    def wait_fetch(self, replica: Replica) -> None:
        """Make compute wait for the fetch under way; the replica may be read from here on."""
        if replica.ready is None:
            return
        self._arrive(replica.ready, replica)
        # it may leave unread, and copies on other lanes into its frames are not in order after it
        replica.ready, replica.idle = None, replica.ready
        bucket, codec = replica.bucket, replica.bucket.codec
        if not codec.exact:  # see [Note: decoded in place]
            end = bucket.segments[-1].end
            arrived = replica.incoming[: codec.n_bytes(end, bucket.dtype)]
            codec.decode(arrived, replica.flat, self._workspace)
            self._device.touched(codec.touched_bytes(end, bucket.dtype))
            replica.idle = self._device.mark()
        replica.move(CLEAN, "ready")

    def flush(self, replica: Replica, copy: HomeCopy) -> None:
        """Copy dirty chunks home (all, if the replica is exposed) and wait until they have landed.
        If that fails the replica stays dirty, and the next flush begins again."""
        bucket = replica.bucket
        if replica.exposed and not replica.dirty and self._is_unchanged(replica, copy.home):
            return
        for run in replica.seen_runs if replica.exposed else ():
            replica.write(run.start, run.stop)
        if not replica.dirty:
            return
        self._events.writing(bucket.id)
        if bucket.codec.exact:
            with self._flushing(replica, copy):
                for dirty in replica.dirty_runs():
                    self._bring_home(replica, copy, dirty)
        else:
            self._recode(replica, copy)
        self._counts["flush"] += 1

    def _is_unchanged(self, replica: Replica, home: Home) -> bool:
        """Whether a replica that this rank alone may have exposed is as it is at home.

        A write would have to be the same on all ranks, and all of them would have to meet for it.
        """
        if not home.is_shared:
            return False
        if not home.codec.exact:
            values = self._values(replica, 0, replica.bucket.segments[-1].end)
            parts = ((s.offset, row(home.read(s))) for s in replica.bucket.segments)
            pairs = ((values[at : at + part.numel()], part) for at, part in parts)
        else:
            pairs = (
                (self._values(replica, run.start, run.stop), part)
                for seen in replica.seen_runs
                for run, part in home.parts(seen.start, seen.stop, PinUse.READ)
            )
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)

    def merge_writes(self, replica: Replica, copy: HomeCopy) -> None:
        """Both copies were written: copy home the segments that were not written there."""
        bucket = replica.bucket
        self._events.writing(bucket.id)
        self.wait_fetch(replica)
        theirs: set[Segment] = set(copy.changed())
        replica.write(0, bucket.segments[-1].end)
        with self._flushing(replica, copy):
            for segment in bucket.segments:
                if segment not in theirs:
                    self._bring_home(replica, copy, slice(segment.offset, segment.end))
        replica.exposed = False

    @contextmanager
    def _flushing(self, replica: Replica, copy: HomeCopy) -> Iterator[None]:
        copy.move(FILLING, "fetch")
        replica.move(FLUSHING, "flush")
        try:
            with copy.home.changes.meeting(f"the weights of {copy.unit!r}"):
                yield
        except BaseException:
            copy.move(CLEAN, "fail")
            replica.move(DIRTY, "fail")
            raise
        copy.move(CLEAN, "ready")
        replica.move(CLEAN, "ready")
        copy.note_digest()
        refresh(copy.home)

    def _bring_home(self, replica: Replica, copy: HomeCopy, elements: slice) -> None:
        """Overwrite elements at home; `HomeEvents.overwriting` is called before and after."""
        size = replica.bucket.dtype.itemsize
        for run in copy.home.runs(elements.start, elements.stop, PinUse.WRITE):
            landed = self._events.overwriting(replica.bucket, run.start, run.stop)
            source = replica.bytes[run.start * size : run.stop * size]
            after = (self._device.mark(),)
            target = copy.home.part(run).view(torch.uint8)
            ticket = self._move(copy.home.way_home, target, source, replica, after, "flush")
            self._sync(ticket, replica)
            landed()

    def _recode(self, replica: Replica, copy: HomeCopy) -> None:
        """Encode a written replica and refresh it from the codes; see [Note: written codes]."""
        bucket, home = replica.bucket, copy.home
        wrong = next((s for s in bucket.segments if not is_finite(replica.views[s.position])), None)
        if wrong is not None:
            self.refetch(replica, copy, UNDO)
            raise StateError(
                f"what was written to the weights of unit {copy.unit!r} is undone: parameter"
                f" {wrong.spec.name!r} has NaN or infinity, which frozen={bucket.codec.name!r}"
                " cannot hold",
                advice="write finite numbers, or name its module in keep_exact=",
            )
        align, end = bucket.codec.block, bucket.segments[-1].end
        whole = -(-end // align) * align
        with home.changes.meeting(f"the weights of {copy.unit!r}"):
            for start in range(0, whole, ENCODED_AT_ONCE):
                stop = min(start + ENCODED_AT_ONCE, whole)
                home.recode(start, self._values(replica, start, stop))
        copy.note_digest()
        refresh(home)
        replica.move(CLEAN, "recode")
        self.refetch(replica, copy)

    def _values(self, replica: Replica, start: int, end: int) -> torch.Tensor:
        """Return elements of a replica, copied to HOST."""
        part = replica.flat[start:end]
        values = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        target, source = values.view(torch.uint8), part.view(torch.uint8)
        after = (self._device.mark(),)
        self._sync(self._move(Lane.D2H, target, source, replica, after, "flush"), replica)
        return values

    def _move(
        self,
        lane: Lane,
        target: torch.Tensor,
        source: torch.Tensor,
        replica: Replica,
        after: tuple[Ticket, ...],
        why: str,
    ) -> Ticket:
        return self._link.move(
            lane, target, source, kind=Kind.PARAM, after=after, bucket=replica.bucket.id, why=why
        )

    def _sync(self, ticket: Ticket, replica: Replica) -> None:
        self._link.sync(ticket, kind=Kind.PARAM, bucket=replica.bucket.id)


class SharedBelow(LocalBelow):
    """Fetches this rank's share into its place, then gathers the others' inside the frames.

    All ranks fetch the same buckets in the same order, so they have as many frames at any time:
    with each fetch they tell each other how many they want (``asked``).
    """

    def __init__(self, comm: Comm, asked: AskedFrames, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._comm = comm
        self._asked = asked

    def _join(self, replica: Replica, after: Iterable[Ticket]) -> None:
        bucket, n_bytes = replica.bucket, replica.bucket.home_bytes
        whole, what = replica.wire[: bucket.n_shares * n_bytes], f"bucket {bucket.id} to HBM"
        after = after if replica.ready is None else (replica.ready,)
        self._asked.hear(self._comm.agree(self._asked.row(), f"{what}: {whole.numel()} bytes"))
        replica.ready = self._comm.gather(whole, what, after)
        self._link.count(
            Lane.GATHER,
            (bucket.n_shares - 1) * n_bytes,
            kind=Kind.PARAM,
            bucket=bucket.id,
            why="fetch",
        )

    def _arrive(self, ticket: Ticket, replica: Replica) -> None:
        with standing_for(self._comm, self._link.log):
            self._comm.wait(ticket)
        super()._arrive(ticket, replica)
