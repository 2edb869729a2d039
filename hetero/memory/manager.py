"""The chunk manager: pins, fetches, flushes and evicts the parameters' copies (floor 1, mechanism).

A bucket has a home (homecopy.py) and, while it is resident, a replica (replica.py) in frames of the
arena (arena.py); `LocalBelow` moves bytes between the two. The manager keeps them consistent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from hetero.config import paranoid
from hetero.device import Device
from hetero.device.comm import ALONE_COMM, Comm
from hetero.errors import BudgetError, StorageError
from hetero.memory.arena import Arena
from hetero.memory.asked import AskedFrames
from hetero.memory.athome import AtHome, AtHomeBelow, CopySpace
from hetero.memory.below import LocalBelow, SharedBelow, Way
from hetero.memory.chunk import CopyTable
from hetero.memory.codec import Workspace
from hetero.memory.frame import FramePlace
from hetero.memory.home import Home
from hetero.memory.homecopy import HomeCopy, HomeEvents, Work
from hetero.memory.homestore import HomeStore
from hetero.memory.homewrites import HomeWrites
from hetero.memory.layout import Bucket, Layout
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.replica import Replica
from hetero.memory.unsettled import Unsettled
from hetero.types import CopyState, Kind, Tier

PARAM = Kind.PARAM.value
Positions = Mapping[int, Collection[int]]
"""Of parameters, by their bucket."""
ANY: Positions = {}


class ChunkManager:
    """Residency of all buckets' PARAM copies between their homes and HBM frames."""

    def __init__(
        self,
        layout: Layout,
        *,
        device: Device,
        ledger: Ledger,
        link: Link,
        store: HomeStore,
        events: HomeEvents,
        limit: int,
        ceiling: int,
        next_use: Callable[[int], float],
        more: Callable[[], int] = lambda: 0,
        growing: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
        workspace: Workspace | None = None,
        comm: Comm = ALONE_COMM,
    ) -> None:
        self.layout = layout
        self.log = link.log
        self.counts: Counter[str] = Counter()
        self.table = CopyTable(len(layout.buckets), what="bucket")
        self.arena = Arena(
            layout,
            device=device,
            ledger=ledger,
            log=self.log,
            table=self.table,
            limit=limit,
            ceiling=ceiling,
            next_use=next_use,
        )
        self.replicas = self.arena.replicas
        self._device = device
        self._events = events
        self._more = more
        self._paranoid = paranoid() and device.has_bytes
        self.copies = [
            HomeCopy(
                bucket,
                store.get(Kind.PARAM, PARAM, bucket),
                unit=layout.unit_names[bucket.unit],
                table=self.table,
                pool=store.pool,
                checked=self._paranoid,
            )
            for bucket in layout.buckets
        ]
        self._unsettled = Unsettled(layout)
        self._is_gathered = store.is_gathered
        self.asked = AskedFrames()
        """Of ranks that gather."""
        make = partial(SharedBelow, comm, self.asked) if self._is_gathered else LocalBelow
        self._below = make(device, link, events=events, workspace=workspace, counts=self.counts)
        self._at_home = AtHomeBelow(
            *(self.copies, self.arena, device, events, self.counts),
            space=CopySpace(store, device, growing),
        )
        self._home_writes = HomeWrites(
            *(self.copies, self.replicas, self._below, events),
            mark=device.mark,
            flush=lambda replica, copy: self._way(replica).flush(replica, copy),
            finish_update=self.finish_update,
            refresh=self.refresh,
        )

    # -- pins ------------------------------------------------------------------------------------

    def pin(
        self,
        ids: Sequence[int],
        why: str,
        spare: Callable[[], int] = lambda: 0,
        *,
        in_frames: bool = False,
    ) -> None:
        """Make the buckets resident and hold them; a miss is fetched on demand.

        ``in_frames``: in frames, even where compute could read them at home.
        ``spare`` returns the number of extra frames allowed now, and ``more`` of the constructor
        those for which something else gives way (see [Note: replicas apart]).
        Raises BudgetError, with nothing pinned, if they do not fit next to those that are held.
        """
        self._device.in_order()
        self.settle(ended=False)
        try:
            held = self._hold(ids, why, in_frames=in_frames)
        except BudgetError:
            # Held replicas may split the free frames: evict all the others and try again.
            self.evict_all()
            self.arena.grow(sum(self.layout.buckets[b].granules for b in ids))
            held = self._hold(ids, why, lambda: spare() or self._more(), in_frames=in_frames)
        self.arena.touch(held)
        for replica in held:
            if replica.ready is not None:
                self._below.wait_fetch(replica)
            if self._paranoid:
                self._device.check_read(replica.bytes)

    def _hold(
        self,
        ids: Sequence[int],
        why: str,
        spare: Callable[[], int] = lambda: 0,
        *,
        in_frames: bool,
    ) -> list[Replica]:
        """Pin the buckets, fetching the missing ones; pins nothing if one of them fails."""
        held: list[Replica] = []
        try:
            for bucket_id in ids:
                copy = self.copies[bucket_id]
                if copy.update is not None and bucket_id in self.replicas:
                    self.finish_update(bucket_id)
                if copy.is_shown:
                    self._home_writes.adopt(bucket_id)
                    self._home_writes.fetch_unseen(bucket_id)
                replica = self._there(bucket_id, in_frames=in_frames)
                if replica is not None and replica.exposed and not replica.bucket.codec.exact:
                    self.flush_and_wait(bucket_id)  # see [Note: written codes]
                if replica is None:
                    self.counts["miss"] += 1
                    bucket = self.layout.buckets[bucket_id]
                    replica = self._fetch(bucket, self.arena.place(bucket, spare), why)
                else:
                    self.counts["hit"] += 1
                replica.pins += 1
                held.append(replica)
        except BaseException:
            for replica in held:
                replica.pins -= 1
            raise
        return held

    def _there(self, bucket_id: int, *, in_frames: bool) -> Replica | None:
        """Return what holds a bucket's weights on the device: a replica, or its home."""
        replica = self.replicas.get(bucket_id)
        if not isinstance(replica, AtHome):
            if replica is not None or in_frames or not self._at_home.serves(bucket_id):
                return replica
            self.finish_update(bucket_id)
            return self._at_home.stand(bucket_id)
        if replica.may_leave and (in_frames or not self._at_home.serves(bucket_id)):
            self.evict(bucket_id)
            return None
        if in_frames:  # an access goes on, and what the user's code writes now may be undone
            self.expose(bucket_id)
        return replica

    def expose(self, bucket_id: int, positions: Iterable[int] | None = None) -> None:
        """The user's code may write a replica from now on without a trace, in the memory of the
        parameters at these positions; None: of any."""
        replica = self.replicas[bucket_id]
        replica.show(positions)
        self._way(replica).expose(replica)
        self._unsettled.add(bucket_id)

    def _way(self, replica: Replica) -> Way:
        """Return what keeps a replica and its home the same."""
        return self._at_home if isinstance(replica, AtHome) else self._below

    def watch(self, ids: Iterable[int], only: Positions = ANY) -> None:
        """Expose unbound, pinned replicas with views: a view may go before the last pin does, and
        its writes would leave no trace."""
        for bucket_id in ids:
            replica = self.replicas.get(bucket_id)
            if replica is not None and replica.pins and replica.leased:
                self.expose(bucket_id, only.get(bucket_id))

    def unpin(self, ids: Iterable[int], only: Positions = ANY) -> None:
        """Drop one pin per bucket; at zero, mark when the device is done with the frames. The
        caller has unbound the parameters from the replica before (see [Note: leases]).

        ``only``: the parameters, by bucket, whose memory the access may have shown.
        """
        self._device.in_order()
        for bucket_id in ids:
            replica = self.replicas[bucket_id]
            replica.pins -= 1
            if replica.pins == 0:
                replica.idle = self._device.mark()
                if replica.leased:
                    self.expose(bucket_id, only.get(bucket_id))
                if self.copies[bucket_id].exposed is not None:
                    self.flush_and_wait(bucket_id)  # the user may read or write the home next

    # -- movements -------------------------------------------------------------------------------

    def prefetch(
        self, bucket_id: int, start: int, leave: Sequence[int] = (), why: str = "plan"
    ) -> bool:
        """Fetch a bucket into the frames at ``start``; False if a replica there must stay. Buckets
        in ``leave`` are evicted as well, wherever they stand, unless they are held."""
        if self._at_home.serves(bucket_id):
            return True
        for other in leave:
            if other in self.replicas and self.replicas[other].may_leave:
                self.evict(other)
        bucket = self.layout.buckets[bucket_id]
        owners = None if bucket_id in self.replicas else self.arena.owners(bucket, start)
        if owners is None:
            return False
        self._fetch(bucket, FramePlace(start, owners), why)
        return True

    def _fetch(self, bucket: Bucket, place: FramePlace, why: str) -> Replica:
        # 1. wait for the home, and evict the present owners of the frames
        self.finish_update(bucket.id)
        for owner in place.evict:
            self.evict(owner)
        # 2. debit the frames when the transfer is queued, not when it lands
        replica, readers = self.arena.take(bucket, place.start, why)
        # 3. queue the copy after the frames' last readers
        try:
            self._below.fetch(replica, self.copies[bucket.id], readers, why)
        except BaseException:
            self.arena.give_back(replica, "fail")
            raise
        self.counts["fetch"] += 1
        return replica

    def evict(self, bucket_id: int, why: str = "evict") -> None:
        """Drop an unpinned replica, flushing it first if it was written or exposed."""
        self._home_writes.adopt(bucket_id)
        if self.copies[bucket_id].update is not None and bucket_id in self.replicas:
            self.finish_update(bucket_id)  # its bytes could not be read back, and may be now
        replica = self.replicas.get(bucket_id)
        if replica is not None:
            self._below.wait_fetch(replica)
            self._way(replica).flush(replica, self.copies[bucket_id])
            self._drop(replica, why)

    def evict_all(self, which: Callable[[Replica], bool] = lambda r: True) -> int:
        """Evict all of ``which`` that are not held; returns the bytes still resident."""
        for bucket_id, replica in list(self.replicas.items()):
            if replica.may_leave and which(replica):
                self.evict(bucket_id)
        return sum(replica.n_bytes for replica in self.replicas.values())

    def _drop(self, replica: Replica, why: str) -> None:
        replica.move(CopyState.ABSENT, why)
        if isinstance(replica, AtHome):
            self._at_home.leave(replica)
            return
        self.counts[why] += 1
        self.arena.give_back(replica, why)
        poison = self._paranoid or self._device.name == "cpu:sim"
        self.arena.vacate(replica, poison=poison)

    def write(self, bucket_id: int, start: int, end: int) -> None:
        """Note that elements [start, end) of a resident bucket were written on HBM."""
        replica = self.replicas.get(bucket_id)
        if replica is None:
            self.table.transition(bucket_id, Tier.HBM, CopyState.DIRTY, "write")  # which raises
            return
        replica.write(start, end)
        self._way(replica).written(replica)
        self._unsettled.add(bucket_id)

    def settle(self, *, ended: bool = True) -> None:
        """Bring home what ranks wrote alike to weights, where an access has ``ended`` or another
        one begins; see [Note: settled writes]."""
        for bucket_id in self._unsettled.due(self.replicas, ended=ended):
            self.flush_and_wait(bucket_id)

    def flush_and_wait(self, bucket_id: int) -> None:
        """Bring the home up to date and wait until no copy reads it; the replica stays."""
        self.finish_update(bucket_id)
        self._home_writes.adopt_copies(bucket_id)
        self._below.wait_reader(self.copies[bucket_id])
        replica = self.replicas.get(bucket_id)
        if replica is not None:
            self._below.wait_fetch(replica)
            if not replica.dirty:
                self._home_writes.adopt(bucket_id)
            if bucket_id in self.replicas:
                self._way(replica).flush(replica, self.copies[bucket_id])
            replica.settle()
        self._home_writes.adopt(bucket_id)

    def discard_writes(self, bucket_id: int) -> None:
        """Undo the writes to an unpinned replica since its last flush."""
        replica = self.replicas[bucket_id]
        if replica.leased:
            self._way(replica).undo(replica, self.copies[bucket_id])
        else:
            self._drop(replica, "discard")

    # -- updates ---------------------------------------------------------------------------------

    def may_hand_over(self, bucket_id: int) -> bool:
        """Whether an update would go unseen: home and replica not exposed, held or written."""
        copy, replica = self.copies[bucket_id], self.replicas.get(bucket_id)
        if copy.update is not None or copy.is_shown or copy.home.views.held:
            return False
        return replica is None or (replica.may_leave and not replica.is_news)

    def let_write(self, bucket_id: int) -> None:
        """Wait until no copy reads a home: its update may begin."""
        self._below.wait_reader(self.copies[bucket_id])
        if self.copies[bucket_id].is_shown:  # the program's copies of page-locked RAM do not wait
            self._device.sync(self._device.mark())

    def hand_over(self, bucket_id: int, work: Work, *, early: bool = False) -> None:
        """Let ``work`` rewrite a home; the caller has flushed it before.

        Discard a replica that is not held. A held one, and a home that a state dict shows, must
        show the new bytes: wait for the update. An ``early`` update (see `may_hand_over`) belongs
        to a step not made yet: until `seal`, any need of the home raises StateError.
        """
        self.finish_update(bucket_id)  # the last one, if nothing has needed the bucket since
        copy, replica = self.copies[bucket_id], self.replicas.get(bucket_id)
        copy.begin_update(work)
        copy.home.changes.begin()
        copy.hide()
        if copy.is_shown or (replica is not None and not replica.may_leave):
            self.finish_update(bucket_id)
        elif replica is not None:
            self._below.wait_fetch(replica)
            self._drop(replica, "discard")
        copy.is_early = early

    def seal(self) -> None:
        """The step of early updates is made: they become updates like any other."""
        for copy in self.copies:
            copy.is_early = False

    def abandon(self) -> None:
        """Stop waiting for failed updates; their homes stay as the work left them."""
        self.seal()
        for copy in self.copies:
            if copy.update is not None:
                copy.end_update("fail")

    def finish_update(self, bucket_id: int) -> None:
        """Wait for a home's update, if one is under way (see [Note: update tickets])."""
        copy = self.copies[bucket_id]
        work = copy.update
        if work is None:
            return
        copy.finish_update(self.log)
        self._events.updated(copy.bucket)
        if bucket_id in self.replicas or copy.is_shown:
            try:
                self.refresh(bucket_id)
            except StorageError:  # the next access of the replica tries again
                copy.begin_update(work)
                raise

    # -- writes to homes -------------------------------------------------------------------------

    def is_busy(self, bucket_id: int) -> bool:
        """Whether a fetch would wait for an update or the disk; begins to read ahead.

        If ranks gather it waits: all of them fetch in one order, whatever is slow on one.
        """
        return not self._is_gathered and self.copies[bucket_id].is_busy(
            resident=bucket_id in self.replicas
        )

    def home(self, bucket_id: int) -> Home:
        """Return a bucket's PARAM home after its update; call `flush_and_wait` before reading."""
        self.finish_update(bucket_id)
        return self.copies[bucket_id].home

    def rehome(self, bucket_id: int, home: Home) -> None:
        """The bytes of a home have moved to another; a replica in frames stays."""
        replica = self.replicas.get(bucket_id)
        if isinstance(replica, AtHome):
            self._drop(replica, "discard")
        self._at_home.forget(bucket_id)
        self.copies[bucket_id].rehome(home)

    def bound_at_home(self) -> list[int]:
        """Return the buckets that compute, or the user's code, uses at home now."""
        return [bucket_id for bucket_id in self.replicas if self.is_bound_at_home(bucket_id)]

    def is_bound_at_home(self, bucket_id: int) -> bool:
        """Whether a bucket is one of `bound_at_home`."""
        replica = self.replicas.get(bucket_id)
        return isinstance(replica, AtHome) and not replica.may_leave

    def refresh(self, bucket_id: int) -> None:
        """The home was written: discard the replica, or refresh it if it is held."""
        self.finish_update(bucket_id)
        copy, replica = self.copies[bucket_id], self.replicas.get(bucket_id)
        copy.rewritten()
        if replica is None:
            return
        self._below.wait_fetch(replica)
        if replica.may_leave:
            self._drop(replica, "discard")
        else:
            self._way(replica).refetch(replica, copy)

    def adopt_home_writes(self, *, held: bool = True) -> None:
        """Take the writes to homes through state dicts. Without ``held``, take only those to copies
        no longer held, and drop these copies."""
        self._home_writes.adopt_all(held=held)

    # -- size ------------------------------------------------------------------------------------

    def resize(self, limit: int) -> bool:
        """Change the number of frames, those of held replicas apart included; False, with nothing
        changed, while replicas in the arena are held, or if the device has no memory for more."""
        replicas = self.replicas.values()
        apart = sum(r.granules for r in replicas if r.is_apart and not r.may_leave)
        if self.arena.held_inside or limit < apart:
            return False
        self.evict_all()
        return self.arena.resize(limit - apart)

    def shrink(self, limit: int) -> bool:
        """Give up frames from the end, down to ``limit`` with those apart; False if a replica in
        the way is held. Replicas below stay; those apart that are not held go."""
        self.evict_all(lambda replica: replica.is_apart)
        # those apart that went leave no frames: a smaller arena was made for them
        limit = min(limit - self.arena.n_apart, self.arena.frames.limit)
        above = self.arena.beyond(limit)
        if limit < 0 or not all(replica.may_leave for replica in above):
            return False
        for replica in above:
            self.evict(replica.bucket.id)
        self.arena.shrink(limit)
        return True

    def close(self) -> None:
        """Finish every copy; the homes then hold the current values."""
        for bucket_id in list(self.replicas):
            self.flush_and_wait(bucket_id)
        self._device.close()
