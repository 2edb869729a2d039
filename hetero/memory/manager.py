"""The chunk manager: pins, fetches, flushes and evicts; nothing else changes a copy (floor 1).

[Note: leases]  A view of a weight can outlive its pin (``p.detach()`` kept by a logger, a unit that
returns ``latents.expand(...)``). Every replica has a storage of its own; its frames are reused only
when the storage's use count is back at its baseline. Until then they stay charged.

[Note: replicas apart]  While nothing computes, many views at once (``parameters_to_vector``) may
take more frames than the arena has: activations' room is idle. What the arena has no place for then
gets memory of its own, counted in ``limit`` like frames of the arena, and given back before
something computes.

[Note: shown bytes]  Writes through an alias that autograd does not count (``p.data.clamp_()``)
leave no trace. If a view of a replica outlives its access, the replica is *shown*: it is always
flushed, before it is evicted and before its home is read.

[Note: written codes]  A home that is coded (codec.py) rounds what is written to it. A replica that
was written, or shown, is coded when it goes home and when it is pinned next, and refreshed then, so
eviction never changes a computed value.

[Note: update tickets]  An optimizer's step hands homes over to work that goes on while the model
computes. Whatever needs the bytes of such a home, a fetch or a state dict, claims it first: it
waits for that work alone, and raises what the work raised.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from hetero.config import paranoid
from hetero.crc import crc32
from hetero.device import Device, Slab, Ticket, use_count
from hetero.errors import (
    BudgetError,
    ConfigError,
    OutOfMemory,
    StateError,
    StorageError,
    TransferError,
    too_early,
)
from hetero.events import What
from hetero.internals import storage_uses
from hetero.memory.chunk import CopyTable
from hetero.memory.codec import ENCODED_AT_ONCE, Workspace, is_finite
from hetero.memory.frame import FrameMap, Place
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.pool import Request, Span, Use
from hetero.memory.slab import Home, HomeStore
from hetero.types import CopyState, Kind, Lane, Tier, format_bytes

PARAM = Kind.PARAM.value
APART = -1  # where a replica starts that has memory of its own
FEW = 32  # replicas among which the one that is to leave is looked for
SHELLS = 4  # a bucket, on average, whose views are kept while nothing is in them
Done = Callable[[], None]


class Work(Protocol):
    """Something that rewrites a home (see [Note: update tickets])."""

    @property
    def done(self) -> bool:
        """Whether waiting would return, or raise, at once."""

    def wait(self) -> None:
        """Return when it is done; raises what it raised."""


def _nothing() -> int:
    return 0


def _unwatched(bucket: Bucket, start: int, end: int) -> Done:
    return lambda: None


class Replica:
    """The contiguous HBM run of one bucket's PARAM chunks, with a prebuilt view per parameter.

    ``incoming`` are the bytes that fetches fill (see [Note: decoded in place] in codec.py).
    """

    __slots__ = (
        *("bucket", "start", "bytes", "incoming", "flat", "views", "cdata", "baseline"),
        *("pins", "stamp", "ready", "idle", "shown"),
    )

    def __init__(self, bucket: Bucket, start: int, piece: torch.Tensor) -> None:
        self.bucket = bucket
        self.start = start
        self.bytes = piece
        self.incoming = piece[piece.numel() - bucket.home_bytes :]
        self.flat = piece.view(bucket.dtype)
        self.views = [
            torch.as_strided(self.flat, s.spec.shape, s.spec.stride, s.offset)
            for s in bucket.segments
        ]
        self.cdata = piece.untyped_storage()._cdata
        self.pins = 0
        self.stamp = 0
        self.ready: Ticket | None = None
        self.idle: Ticket | None = None
        self.shown = False
        self.baseline = use_count(piece)

    @property
    def is_apart(self) -> bool:
        """Whether it has memory of its own, and no frames of the arena."""
        return self.start == APART

    @property
    def leased(self) -> bool:
        """Whether the user's code still holds a view; only meaningful while unbound."""
        # A fetch under way holds the frames too, and nobody has seen them yet.
        return self.ready is None and storage_uses(self.cdata) > self.baseline

    def aliases(self, n_bound: int) -> bool:
        """Whether the user's code holds a view while ``n_bound`` parameters are bound here."""
        return storage_uses(self.cdata) > self.baseline + n_bound


class ChunkManager:
    """Residency of all buckets' PARAM copies between HOST homes and HBM frames."""

    def __init__(
        self,
        layout: Layout,
        *,
        device: Device,
        ledger: Ledger,
        link: Link,
        store: HomeStore,
        limit: int,
        ceiling: int,
        next_use: Callable[[int], float],
        workspace: Workspace | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.ledger = ledger
        self.link = link
        self.log = link.log
        self.frames = FrameMap(limit)
        self.table = CopyTable(layout.n_chunks)
        self.replicas: dict[int, Replica] = {}  # those last that were used last
        self.counts: Counter[str] = Counter()
        self.next_use = next_use
        self.by_storage: dict[int, Replica] = {}
        self._apart: set[int] = set()  # buckets whose replicas stand apart
        self._store = store
        self._workspace = workspace
        self.ceiling = ceiling  # frames there are; `frames.limit` of them are in use
        self._arena: Slab = device.arena(ceiling * layout.chunk_numel)
        self._shells: dict[tuple[int, int], Replica] = {}
        self._landing: dict[int, Ticket] = {}  # flushes into a home that are still under way
        self._vacated: list[tuple[int, int, Ticket]] = []  # freed frames that may still be read
        self._digests: dict[int, int] = {}
        self._shown_homes: dict[int, tuple[int, ...]] = {}
        self._updates: dict[int, Work] = {}
        self._landed: dict[int, list[Done]] = {}  # what comes after a flush
        self._asked: dict[int, list[Request]] = {}  # homes that are being read from disk
        self._early: set[int] = set()  # buckets whose update belongs to a step not made yet
        self.overwriting: Callable[[Bucket, int, int], Done] = _unwatched
        self.claimed: Callable[[Bucket], None] = lambda bucket: None
        self.writing: Callable[[int], None] = lambda bucket: None  # what a user wrote comes home
        self.home_written: Callable[[Segment], None] = lambda segment: None  # through a state dict
        self._paranoid = paranoid() and device.has_bytes
        self._clock = 0

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, ids: Sequence[int], why: str, spare: Callable[[], int] = _nothing) -> None:
        """Make the buckets resident and hold them; a miss is fetched on demand.

        ``spare`` returns how many frames there may be besides now (see [Note: replicas apart]).
        Raises BudgetError, with nothing pinned, when they do not fit beside what is held.
        """
        try:
            held = self._hold(ids, why)
        except BudgetError:
            # What is held may stand in the middle of the free frames: start over from empty ones.
            self._make_room(sum(self.layout.buckets[b].granules for b in ids))
            held = self._hold(ids, why, spare)
        self._clock += 1
        for replica in held:
            replica.stamp = self._clock
            self.replicas[replica.bucket.id] = self.replicas.pop(replica.bucket.id)
            if replica.ready is not None:
                self._arrive(replica)
            if self._paranoid:
                self.device.check_read(replica.bytes)

    def watch(self, ids: Iterable[int]) -> None:
        """Note views of unbound replicas that are pinned still: what is written through one that
        goes before the last pin does leaves no trace."""
        for bucket_id in ids:
            replica = self.replicas.get(bucket_id)
            if replica is not None and replica.pins and replica.leased:
                replica.shown = True

    def unpin(self, ids: Iterable[int]) -> None:
        """Let go of one pin per bucket; at zero, note when the device is done with the frames.

        The caller has taken the parameters off the replica before (see [Note: leases]).
        """
        for bucket_id in ids:
            replica = self.replicas[bucket_id]
            replica.pins -= 1
            if replica.pins == 0:
                replica.idle = self.device.mark()
                if replica.leased:
                    replica.shown = True
                if bucket_id in self._shown_homes:
                    self.settle(bucket_id)  # the user may read or write the home next

    # -- movements -------------------------------------------------------------------------------

    def prefetch(
        self, bucket_id: int, start: int, leave: Sequence[int] = (), why: str = "plan"
    ) -> bool:
        """Fetch a bucket into the frames at ``start``; False when something there must stay.

        The buckets in ``leave`` go as well, wherever they stand, where they may.
        """
        for other in leave:
            if other in self.replicas and self._may_leave(self.replicas[other]):
                self.evict(other)
        bucket = self.layout.buckets[bucket_id]
        if bucket_id in self.replicas or start + bucket.granules > self.frames.limit:
            return False
        runs = self.frames.overlapping(start, bucket.granules)
        if not all(self._may_leave(self.replicas[run.owner]) for run in runs):
            return False
        free = self.ledger.free(Tier.HBM)
        leaving = sum(run.length for run in runs) * self.layout.chunk_numel
        if free is not None and free + leaving < bucket.n_bytes:
            return False
        self._fetch(bucket, Place(start, tuple(run.owner for run in runs)), why)
        return True

    def evict(self, bucket_id: int, why: str = "evict") -> None:
        """Drop an unpinned replica, flushing it first if it was written or shown."""
        self._follow_home(bucket_id)
        if bucket_id not in self.replicas:
            return
        replica = self.replicas[bucket_id]
        if replica.ready is not None:
            self._arrive(replica)
        flushed = self._flush(replica)
        if flushed is not None:
            self._land(bucket_id)
        self._drop(replica, why)

    def write(self, bucket_id: int, start: int, end: int) -> None:
        """Note that elements [start, end) of a resident bucket were written on HBM."""
        bucket = self.layout.buckets[bucket_id]
        for chunk in bucket.chunks_of(start, end):
            self.table.transition(chunk, Tier.HBM, CopyState.DIRTY, "write")
        if not bucket.codec.exact:
            self.replicas[bucket_id].shown = True  # see [Note: written codes]

    def settle(self, bucket_id: int) -> None:
        """Bring the home up to date and wait until it is; the replica stays."""
        self._claim(bucket_id)
        self._take_copies(bucket_id)
        replica = self.replicas.get(bucket_id)
        if replica is not None:
            if replica.ready is not None:
                self._arrive(replica)
            if not self._dirty(replica):
                self._follow_home(bucket_id)
            if bucket_id in self.replicas:
                self._flush(replica)
        self._land(bucket_id)
        if replica is not None:
            replica.shown = replica.leased
        self._follow_home(bucket_id)

    def may_hand_over(self, bucket_id: int) -> bool:
        """Whether neither a home nor its replica is shown, held or written, and no bytes are on
        their way home: an update would not be seen."""
        home, replica = self._store.homes[PARAM, bucket_id], self.replicas.get(bucket_id)
        if bucket_id in self._updates or bucket_id in self._landing or home.held or home.copies:
            return False
        if bucket_id in self._shown_homes or replica is None:
            return bucket_id not in self._shown_homes
        return not (replica.pins or replica.leased or replica.shown or self._dirty(replica))

    def hand_over_early(self, bucket_id: int, work: Work) -> None:
        """Leave a home to the work of a step that is not made yet, where `may_hand_over`: until
        `seal`, whatever needs the home raises StateError."""
        self.hand_over(bucket_id, work)
        self._early.add(bucket_id)

    def seal(self) -> None:
        """The step of early updates is made: who needs their homes waits, as for any update."""
        self._early.clear()

    def hand_over(self, bucket_id: int, work: Work) -> None:
        """Leave a home to ``work``, which rewrites it; the caller has settled it before.

        A replica that is not held is dead. One that is held, and a home that a state dict shows,
        must show the new bytes: they are waited for.
        """
        self._claim(bucket_id)  # a bucket that was not needed since its last update
        for chunk in self.layout.buckets[bucket_id].chunks:
            self.table.transition(chunk, Tier.HOST, CopyState.FILLING, "update")
        self._updates[bucket_id] = work
        replica = self.replicas.get(bucket_id)
        home = self._store.homes[PARAM, bucket_id]
        seen = replica is not None and (replica.pins or replica.leased)
        if bucket_id in self._shown_homes and not home.held:
            del self._shown_homes[bucket_id]  # no state dict refers to it any more
        if seen or bucket_id in self._shown_homes or home.copies:
            self._claim(bucket_id)
        elif replica is not None:
            if replica.ready is not None:
                self._arrive(replica)
            self._drop(replica, "discard")

    def busy(self, bucket_id: int) -> bool:
        """Whether a fetch would have to wait, for an update or for the disk, which is asked."""
        work = self._updates.get(bucket_id)
        if work is not None and (bucket_id in self._early or not work.done):
            return True
        home, pool = self._store.homes[PARAM, bucket_id], self._store.pool
        if pool is None or home.extents is None or bucket_id in self.replicas:
            return False
        asked = self._asked.get(bucket_id)
        if asked is None:
            size, numel = pool.extent_numel, home.flat.numel()
            spans = (Span(home, at, min(at + size, numel)) for at in range(0, numel, size))
            asked = self._asked[bucket_id] = [Request([span]) for span in spans]
            pool.ahead(asked)
        return not all(pool.ready(request) for request in asked)

    def update_of(self, bucket_id: int) -> Any:
        """Return the work that rewrites a home now; None where there is none."""
        return self._updates.get(bucket_id)

    def abandon(self) -> None:
        """Stop waiting for updates that failed; their homes are what the work left there."""
        self.seal()
        for bucket_id in list(self._updates):
            del self._updates[bucket_id]
            for chunk in self.layout.buckets[bucket_id].chunks:
                self.table.transition(chunk, Tier.HOST, CopyState.CLEAN, "fail")
            self._digest(bucket_id)

    def _claim(self, bucket_id: int) -> None:
        """Wait for the update of a home, where one is under way (see [Note: update tickets])."""
        work = self._updates.get(bucket_id)
        if work is None:
            return
        if bucket_id in self._early:
            name = self.layout.unit_names[self.layout.buckets[bucket_id].unit]
            raise too_early(f"the weights of unit {name!r} are needed")
        if work.done:
            work.wait()  # raises what it raised
        else:
            with self.log.during(What.WAIT, bucket=bucket_id, why="update"):
                work.wait()
        del self._updates[bucket_id]
        bucket = self.layout.buckets[bucket_id]
        for chunk in bucket.chunks:
            self.table.transition(chunk, Tier.HOST, CopyState.CLEAN, "ready")
        self._digest(bucket_id)
        self.claimed(bucket)
        shown = bucket_id in self._shown_homes or self._store.homes[PARAM, bucket_id].copies
        if bucket_id in self.replicas or shown:
            try:
                self.renew(bucket_id)
            except StorageError:  # who looks at the replica next tries again
                self._updates[bucket_id] = work
                for chunk in bucket.chunks:
                    self.table.transition(chunk, Tier.HOST, CopyState.FILLING, "update")
                raise

    def follow_homes(self, *, held: bool = True) -> None:
        """Take what was written to homes through state dicts.

        Without ``held`` only copies that are not held any more are looked at, and let go of.
        """
        for bucket_id in list(self._shown_homes) if held else ():
            if bucket_id not in self._updates:
                self._follow_home(bucket_id)
        for bucket in self.layout.buckets:
            if self._store.homes[PARAM, bucket.id].copies:
                self._take_copies(bucket.id, held=held)

    def renew(self, bucket_id: int) -> None:
        """The home was written: discard the replica, or refresh it where the user looks at it."""
        self._digest(bucket_id)
        self._store.refresh(self.home(bucket_id))
        if self.home(bucket_id).held:
            if bucket_id in self._shown_homes:
                self._shown_homes[bucket_id] = self._home_version(bucket_id)
        else:
            self._shown_homes.pop(bucket_id, None)  # no state dict refers to it any more
        replica = self.replicas.get(bucket_id)
        if replica is None:
            return
        if replica.ready is not None:
            self._arrive(replica)
        if replica.pins or replica.leased:
            self._fill(replica, (self.device.mark(),), "refresh")
            self._arrive(replica)
        else:
            self._drop(replica, "discard")

    def give_up(self, bucket_id: int) -> None:
        """Undo what was written to an unpinned replica since it was last settled."""
        replica = self.replicas[bucket_id]
        if not replica.leased:
            self._drop(replica, "discard")
            return
        for chunk in replica.bucket.chunks:
            self.table.transition(chunk, Tier.HBM, CopyState.ABSENT, "discard")
        self._fill(replica, (self.device.mark(),), "refresh")
        self._arrive(replica)

    def show_home(self, bucket_id: int) -> None:
        """The caller hands out the home's tensors: from now on their versions are followed."""
        self._shown_homes[bucket_id] = self._home_version(bucket_id)

    def home(self, bucket_id: int) -> Home:
        """Return a bucket's PARAM home, once its update is done; `settle` it before reading."""
        if bucket_id in self._updates:
            self._claim(bucket_id)
        return self._store.homes[PARAM, bucket_id]

    def read_home(self, bucket_id: int, segment: Segment) -> torch.Tensor:
        """Return a copy of a parameter's value at home."""
        return self._store.read(self.home(bucket_id), segment)

    def alias_home(self, bucket_id: int, segment: Segment) -> torch.Tensor:
        """Return an alias of the copy that stands for a parameter whose home shows no value."""
        return self._store.alias(self.home(bucket_id), segment)

    def shed(self) -> None:
        """Give back the replicas apart that are not held."""
        for bucket_id in list(self._apart):
            if self._may_leave(self.replicas[bucket_id]):
                self.evict(bucket_id)

    def resize(self, limit: int) -> bool:
        """Change the number of frames; False, and nothing changed, while replicas are held."""
        if self.held:
            return False
        for bucket_id in list(self.replicas):
            self.evict(bucket_id)
        n_bytes = limit * self.layout.chunk_numel
        if n_bytes != self._arena.n_bytes:  # what frames give up is activations' from here on
            self._shells.clear()
            self.by_storage.clear()
            self._arena = self.device.arena(0)  # let the old one go before the new one is made
            self._arena = self.device.arena(n_bytes)
        self.frames = FrameMap(limit)
        self.ceiling = limit
        return True

    def lower(self, limit: int) -> bool:
        """Give up frames from the end, to have ``limit`` with those apart; False where one that is
        to go is held.

        Replicas below stay; where HBM is RAM, its pages go back to the system.
        """
        self.shed()
        limit -= self._granules_apart
        above = [r for r in self.replicas.values() if r.start + r.bucket.granules > limit]
        above = [replica for replica in above if not replica.is_apart]
        if limit < 0 or any(replica.pins or replica.leased for replica in above):
            return False
        for replica in above:
            self.evict(replica.bucket.id)
        self.frames.limit = self.ceiling = limit
        if self.device.same_ram:  # every copy is done: nothing reads there any more
            self._arena.give_back(limit * self.layout.chunk_numel)
        return True

    def vacate(self) -> int:
        """Evict all that is not held; returns the bytes of what is held."""
        for bucket_id, replica in list(self.replicas.items()):
            if self._may_leave(replica):
                self.evict(bucket_id)
        return sum(replica.bucket.n_bytes for replica in self.replicas.values())

    def clear_the_way(self, places: Mapping[int, int]) -> None:
        """Evict unpinned buckets that are at another address than planned: {bucket: frame}."""
        for bucket_id, replica in list(self.replicas.items()):
            elsewhere = places.get(bucket_id, replica.start) != replica.start
            if elsewhere and self._may_leave(replica):
                self.evict(bucket_id)

    @property
    def limit(self) -> int:
        """How many frames there are, those of replicas apart among them."""
        return self.frames.limit + self._granules_apart

    @property
    def _granules_apart(self) -> int:
        return sum(self.layout.buckets[b].granules for b in self._apart)

    @property
    def held(self) -> bool:
        """Whether any replica is pinned or leased."""
        return any(r.pins or r.leased for r in self.replicas.values())

    @property
    def arena_bytes(self) -> int:
        """Bytes of device memory that the frames lie in."""
        return self._arena.n_bytes

    def close(self) -> None:
        """Finish every copy; the homes then hold the current values."""
        for bucket_id in list(self.replicas):
            self.settle(bucket_id)
        self.device.close()

    # -- inside ----------------------------------------------------------------------------------

    def _hold(
        self, ids: Sequence[int], why: str, spare: Callable[[], int] = _nothing
    ) -> list[Replica]:
        """Pin the buckets, fetching what is missing; pins nothing when one of them fails."""
        held: list[Replica] = []
        try:
            for bucket_id in ids:
                if bucket_id in self._updates and bucket_id in self.replicas:
                    self._claim(bucket_id)
                self._follow_home(bucket_id)
                self._look_again(bucket_id)
                replica = self.replicas.get(bucket_id)
                if replica is not None and replica.shown and not replica.bucket.codec.exact:
                    self.settle(bucket_id)  # see [Note: written codes]
                if replica is None:
                    self.counts["miss"] += 1
                    replica = self._fetch_anywhere(self.layout.buckets[bucket_id], why, spare)
                else:
                    self.counts["hit"] += 1
                replica.pins += 1
                held.append(replica)
        except BaseException:
            for replica in held:
                replica.pins -= 1
            raise
        return held

    def _make_room(self, granules: int) -> None:
        """Evict whatever may leave, and take as many more frames as the ceiling allows."""
        for bucket_id, replica in list(self.replicas.items()):
            if not replica.pins and not replica.leased:
                self.evict(bucket_id)
        most = self.ceiling - self._granules_apart
        self.frames.limit = max(self.frames.limit, min(most, self.frames.end + granules))

    def _may_leave(self, replica: Replica) -> bool:
        return not (replica.pins or replica.leased)

    def _leaving(self) -> Iterator[tuple[object, int]]:
        """Yield who may leave, of a few those first whose next use is furthest away.

        The few are who was used longest ago, and first of all who was used last as well, whom a
        loop over all weights needs last: to ask all of them would make a miss dearer the more there
        are.
        """
        last = list(itertools.islice(reversed(self.replicas), FEW // 2))
        older = itertools.filterfalse(frozenset(last).__contains__, self.replicas)
        few = [*last, *itertools.islice(older, FEW // 2)]
        while few:
            yield from self._furthest(few)
            few = list(itertools.islice(older, FEW))

    def _furthest(self, few: Sequence[int]) -> Iterator[tuple[object, int]]:
        """Yield those of a few that may leave, by next use; of equals the one used longest ago."""
        found = [
            ((self.next_use(bucket_id), -replica.stamp), bucket_id)
            for bucket_id in few
            if not ((replica := self.replicas[bucket_id]).pins or bucket_id in self._apart)
        ]
        for worth, bucket_id in sorted(found, reverse=True):
            if self._may_leave(self.replicas[bucket_id]):
                yield worth, bucket_id

    def _fetch_anywhere(self, bucket: Bucket, why: str, spare: Callable[[], int]) -> Replica:
        place = self.frames.place(bucket.granules, self._leaving())
        if place is None:
            n_spare = spare()
            if n_spare < bucket.granules:
                raise self._no_room(bucket, n_spare)
            place = Place(APART, ())
        return self._fetch(bucket, place, why)

    def _fetch(self, bucket: Bucket, place: Place, why: str) -> Replica:
        # 1. wait for the home, and let the present owners of the frames go
        self._claim(bucket.id)
        for owner in place.evict:
            self.evict(owner)
        # 2. debit the frames when the transfer is queued, not when it lands
        self.ledger.charge(Tier.HBM, Kind.PARAM, bucket.n_bytes, f"bucket {bucket.id}")
        if place.start == APART:
            self._apart.add(bucket.id)
        else:
            self.frames.take(bucket.id, place.start, bucket.granules)
        self._note(What.ALLOC, bucket, why)
        # 3. queue the copy after the frames' last readers and after a flush into our home
        replica = self._shell(bucket, place.start)
        self.replicas[bucket.id] = replica
        after = self._readers(place.start, place.start + bucket.granules)
        if bucket.id in self._landing:
            after.append(self._landing[bucket.id])
        try:
            self._fill(replica, after, why)
        except BaseException:
            self._forget(replica)
            raise
        self.counts["fetch"] += 1
        return replica

    def _fill(self, replica: Replica, after: Iterable[Ticket], why: str) -> None:
        bucket, home = replica.bucket, self.home(replica.bucket.id)
        if self._paranoid:
            self._check_digest(bucket.id)
        for chunk in bucket.chunks:
            self.table.transition(chunk, Tier.HBM, CopyState.FILLING, "fetch")
        after = tuple(after)
        self._asked.pop(bucket.id, None)
        try:
            self._fill_runs(replica, home, after, why)
        except BaseException:
            for chunk in bucket.chunks:  # what was there before, or nothing, for the next caller
                self.table.transition(chunk, Tier.HBM, CopyState.CLEAN, "fail")
            raise

    def _fill_runs(self, replica: Replica, home: Home, after: tuple[Ticket, ...], why: str) -> None:
        bucket, size = replica.bucket, home.flat.element_size()
        whole = home.items(0, bucket.segments[-1].end)
        for run in self._store.runs(whole.start, whole.stop, (home, Use.READ)):
            piece = slice(run.start * size, run.stop * size)
            replica.ready = self.link.move(
                Lane.H2D,
                replica.incoming[piece],
                home.bytes[piece],
                kind=Kind.PARAM,
                after=after,
                bucket=bucket.id,
                why=why,
            )
            if home.extents is not None:  # its memory is not page-locked, and is given back
                self._sync(replica.ready, bucket.id)

    def _arrive(self, replica: Replica) -> None:
        """Make compute wait for the fetch; from here on the copy may be read."""
        if replica.ready is not None:
            self.link.wait(replica.ready, kind=Kind.PARAM, bucket=replica.bucket.id)
            replica.ready = None
        bucket, codec = replica.bucket, replica.bucket.codec
        if not codec.exact:  # see [Note: decoded in place]
            end = bucket.segments[-1].end
            arrived = replica.incoming[: codec.n_bytes(end, bucket.dtype)]
            codec.decode(arrived, replica.flat, self._workspace)
            self.device.touched(codec.touched_bytes(end, bucket.dtype))
            replica.idle = self.device.mark()
        for chunk in bucket.chunks:
            self.table.transition(chunk, Tier.HBM, CopyState.CLEAN, "ready")

    def _flush(self, replica: Replica) -> Ticket | None:
        """Queue the way home of every dirty chunk, and of all chunks of what was shown."""
        bucket = replica.bucket
        if replica.shown:
            self.write(bucket.id, 0, bucket.segments[-1].end)
        dirty = self._dirty(replica)
        if not dirty:
            return None
        self.writing(bucket.id)
        if not bucket.codec.exact:
            self._recode(replica, dirty)
            return None
        done, home = self.device.mark(), self.home(bucket.id)
        self._land(bucket.id)
        for first, end in _runs(dirty):
            start = (first - bucket.first_chunk) * bucket.chunk_numel
            stop = (end - bucket.first_chunk) * bucket.chunk_numel
            for run in self._store.runs(start, stop, (home, Use.WRITE)):
                landed = self.overwriting(bucket, run.start, run.stop)
                ticket = self._send(replica, home, run, done)
                if home.extents is not None:  # a disk may fail: the replica stays dirty till then
                    self._sync(ticket, bucket.id)
                    landed()
                else:
                    self._landed.setdefault(bucket.id, []).append(landed)
            for chunk in range(first, end):
                self.table.transition(chunk, Tier.HBM, CopyState.FLUSHING, "flush")
                self.table.transition(chunk, Tier.HOST, CopyState.FILLING, "fetch")
            self._landing[bucket.id] = ticket
        self.counts["flush"] += 1
        return self._landing[bucket.id]

    def _recode(self, replica: Replica, dirty: Sequence[int]) -> None:
        """Code what was written, and show what the codes stand for; see [Note: written codes]."""
        bucket, home = replica.bucket, self.home(replica.bucket.id)
        wrong = next((s for s in bucket.segments if not is_finite(replica.views[s.position])), None)
        if wrong is None:
            align, end = bucket.codec.block, bucket.segments[-1].end
            whole = -(-end // align) * align
            for start in range(0, whole, ENCODED_AT_ONCE):
                values = self._brought(replica, start, min(start + ENCODED_AT_ONCE, whole))
                self._store.recode(home, start, values)
            self._digest(bucket.id)
            self._store.refresh(home)
        for chunk in dirty:
            self.table.transition(chunk, Tier.HBM, CopyState.FLUSHING, "flush")
            self.table.transition(chunk, Tier.HBM, CopyState.CLEAN, "ready")
        self._fill(replica, (self.device.mark(),), "refresh")
        self._arrive(replica)
        self.counts["flush"] += 1
        if wrong is not None:
            raise StateError(
                f"what was written to the weights of unit {self.layout.unit_names[bucket.unit]!r}"
                f" is undone: parameter {wrong.spec.name!r} has NaN or infinity, which"
                f" frozen={bucket.codec.name!r} cannot hold",
                advice="write finite numbers, or name its module in keep_exact=",
            )

    def _brought(self, replica: Replica, start: int, end: int) -> torch.Tensor:
        """Return elements of a replica as values on HOST."""
        part = replica.flat[start:end]
        values = torch.empty(part.shape, dtype=part.dtype)
        ticket = self.link.move(
            Lane.D2H,
            values.view(torch.uint8),
            part.view(torch.uint8),
            kind=Kind.PARAM,
            after=(self.device.mark(),),
            bucket=replica.bucket.id,
            why="flush",
        )
        self._sync(ticket, replica.bucket.id)
        return values

    def _send(self, replica: Replica, home: Home, run: slice, after: Ticket) -> Ticket:
        """Queue the way home of some elements."""
        size = replica.bucket.dtype.itemsize
        piece = slice(run.start * size, run.stop * size)
        return self.link.move(
            Lane.D2H,
            home.bytes[piece],
            replica.bytes[piece],
            kind=Kind.PARAM,
            after=(after,),
            bucket=replica.bucket.id,
            why="flush",
        )

    def _sync(self, ticket: Ticket, bucket_id: int) -> None:
        self.link.sync(ticket, kind=Kind.PARAM, bucket=bucket_id)

    def _dirty(self, replica: Replica) -> list[int]:
        state = self.table.state
        return [c for c in replica.bucket.chunks if state(c, Tier.HBM) is CopyState.DIRTY]

    def _land(self, bucket_id: int) -> None:
        """Wait for a flush into the home, if one is under way."""
        ticket = self._landing.pop(bucket_id, None)
        if ticket is None:
            return
        self._sync(ticket, bucket_id)
        for chunk in self.layout.buckets[bucket_id].chunks:
            if self.table.state(chunk, Tier.HOST) is CopyState.FILLING:
                self.table.transition(chunk, Tier.HOST, CopyState.CLEAN, "ready")
            if self.table.state(chunk, Tier.HBM) is CopyState.FLUSHING:
                self.table.transition(chunk, Tier.HBM, CopyState.CLEAN, "ready")
        self._digest(bucket_id)
        self._store.refresh(self._store.homes[PARAM, bucket_id])
        for done in self._landed.pop(bucket_id, ()):
            done()

    def _drop(self, replica: Replica, why: str) -> None:
        bucket = replica.bucket
        for chunk in bucket.chunks:
            self.table.transition(chunk, Tier.HBM, CopyState.ABSENT, why)
        self.counts[why] += 1
        self._note(What.FREE, bucket, why)
        replica.shown = False
        self._free(replica)
        if self._paranoid or self.device.name == "cpu:sim":
            self.device.poison(replica.bytes)
            replica.idle = self.device.mark()
        if replica.idle is not None:
            if not replica.is_apart:
                self._vacated.append((replica.start, replica.start + bucket.granules, replica.idle))
            replica.idle = None

    def _free(self, replica: Replica) -> None:
        """Take a replica off the books."""
        bucket = replica.bucket
        del self.replicas[bucket.id]
        if replica.is_apart:
            self._apart.remove(bucket.id)
            del self.by_storage[replica.cdata]
        else:
            self.frames.drop(bucket.id)
        self.ledger.credit(Tier.HBM, Kind.PARAM, bucket.n_bytes)

    def _forget(self, replica: Replica) -> None:
        """Take back the frames of a fetch that could not be queued."""
        bucket = replica.bucket
        self._note(What.FREE, bucket, "fail")
        for chunk in bucket.chunks:
            if self.table.state(chunk, Tier.HBM) is not CopyState.ABSENT:
                self.table.transition(chunk, Tier.HBM, CopyState.ABSENT, "discard")
        self._free(replica)

    def _note(self, what: What, bucket: Bucket, why: str) -> None:
        self.log.now(
            what,
            tier=Tier.HBM,
            bucket=bucket.id,
            n_bytes=bucket.n_bytes,
            category=Kind.PARAM,
            why=why,
        )

    def restate(self) -> None:
        """Log what is resident, for a log that begins here."""
        for replica in self.replicas.values():
            self._note(What.ALLOC, replica.bucket, "before")

    def _readers(self, start: int, end: int) -> list[Ticket]:
        """Return the tickets of the last readers of frames [start, end) that are still at it.

        [Note: idle before write]  A frame is rewritten only after its `idle` ticket: the compute
        stream may still read what the host has long let go.
        """
        self._vacated = [row for row in self._vacated if not self.device.query(row[2])]
        return [ticket for s, e, ticket in self._vacated if s < end and start < e]

    def _shell(self, bucket: Bucket, start: int) -> Replica:
        """Return the replica of a bucket at an address, with its views built once; one that is
        apart is built each time."""
        key = bucket.id, start
        shell = self._shells.pop(key, None)
        if shell is None:
            n_bytes = bucket.n_bytes
            with torch.inference_mode(False), torch.no_grad():  # views outlive the user's mode
                if start == APART:
                    piece = self.device.arena(n_bytes).carve(0, n_bytes)
                else:
                    piece = self._arena.carve(start * self.layout.chunk_numel, n_bytes)
                shell = Replica(bucket, start, piece)
            self.by_storage[shell.cdata] = shell
        if start != APART:
            self._shells[key] = shell
            self._forget_shells()
        shell.pins = 0
        return shell

    def _forget_shells(self) -> None:
        """Let go of the views that were used longest ago: there are as many as buckets times
        places."""
        most = SHELLS * len(self.layout.buckets)
        while len(self._shells) > most:
            key = next(iter(self._shells))
            shell = self._shells.pop(key)
            if self.replicas.get(shell.bucket.id) is shell:
                self._shells[key] = shell  # it is resident: it comes to the end, as if used now
            else:
                del self.by_storage[shell.cdata]

    def _no_room(self, bucket: Bucket, n_spare: int) -> OutOfMemory:
        size = self.layout.chunk_numel
        name = self.layout.unit_names[bucket.unit]
        pinned = sum(r.bucket.n_bytes for r in self.replicas.values() if r.pins)
        leased = sum(r.bucket.n_bytes for r in self.replicas.values() if not r.pins and r.leased)
        need, have = bucket.n_bytes, (self.limit + n_spare) * size
        more = max(need + pinned + leased - have, need)
        advice = f"raise hbm= by at least {format_bytes(more)}"
        if leased:
            advice += "; or drop the views of parameters that are kept outside (p.detach(), p.data)"
        return OutOfMemory(
            f"unit {name!r} needs {format_bytes(need)} of frames; of {format_bytes(have)},"
            f" {format_bytes(pinned)} are pinned and {format_bytes(leased)} are held as leases by"
            " views of parameters that are still alive",
            advice=advice,
            moves=self.table.moves(),
            tier="HBM",
            needed_bytes=(self.ledger.budgets.get(Tier.HBM) or have) + more,
        )

    def _home_version(self, bucket_id: int) -> tuple[int, ...]:
        return tuple(segment._version for segment in self.home(bucket_id).segments)

    def _follow_home(self, bucket_id: int) -> None:
        """Drop a replica whose home was written through a tensor of a state dict."""
        self._take_copies(bucket_id)
        seen = self._shown_homes.get(bucket_id)
        if seen is None or seen == self._home_version(bucket_id):
            return
        replica = self.replicas.get(bucket_id)
        if replica is not None and (replica.shown or self._dirty(replica)):
            self._merge(replica, seen)
        now = self._home_version(bucket_id)
        for segment, then, later in zip(
            self.layout.buckets[bucket_id].segments, seen, now, strict=True
        ):
            if then != later:
                self.home_written(segment)
        self.renew(bucket_id)

    def _look_again(self, bucket_id: int) -> None:
        """Fetch a replica anew whose home a state dict shows, or showed since it was fetched.

        What numpy writes, or who writes through ``.data``, moves no version.
        """
        if bucket_id not in self._shown_homes:
            return
        self._digest(bucket_id)
        if not self.home(bucket_id).held:
            del self._shown_homes[bucket_id]  # no state dict refers to it any more: the last time
        replica = self.replicas.get(bucket_id)
        if replica is None:
            return
        if not (replica.pins or replica.leased or replica.shown or self._dirty(replica)):
            if replica.ready is not None:
                self._arrive(replica)
            self._fill(replica, (self.device.mark(),), "refresh")

    def _take_copies(self, bucket_id: int, *, held: bool = True) -> None:
        """Take what was written to copies of a home (see [Note: copies that are shown])."""
        home = self._store.homes[PARAM, bucket_id]
        if not home.copies or bucket_id in self._updates:
            return
        written = self._store.written(home, held=held)
        if not written:
            return
        self.writing(bucket_id)
        replica = self.replicas.get(bucket_id)
        if replica is not None and (replica.shown or self._dirty(replica)):
            if replica.ready is not None:
                self._arrive(replica)
            self._flush(replica)  # the other segments: these are written over it
        self._land(bucket_id)
        try:
            for segment in written:
                self._store.take(home, segment)
                self.home_written(segment)
        except ConfigError as error:
            raise StateError(str(error), advice=error.advice) from None
        finally:
            self.renew(bucket_id)

    def _merge(self, replica: Replica, seen: tuple[int, ...]) -> None:
        """Both copies were written: bring home the segments that were not written there."""
        bucket, home = replica.bucket, self.home(replica.bucket.id)
        self.writing(bucket.id)
        if replica.ready is not None:
            self._arrive(replica)
        for segment, then, now in zip(
            bucket.segments, seen, self._home_version(bucket.id), strict=True
        ):
            if then == now:
                landed = self.overwriting(bucket, segment.offset, segment.end)
                run, done = slice(segment.offset, segment.end), self.device.mark()
                self._sync(self._send(replica, home, run, done), bucket.id)
                landed()
        for chunk in self._dirty(replica):
            self.table.transition(chunk, Tier.HBM, CopyState.FLUSHING, "flush")
            self.table.transition(chunk, Tier.HBM, CopyState.CLEAN, "ready")
        replica.shown = False

    def _digest(self, bucket_id: int) -> None:
        home = self.home(bucket_id)
        if self._paranoid and home.extents is None:  # what lies on disk has digests of its own
            self._digests[bucket_id] = _crc(home)

    def _check_digest(self, bucket_id: int) -> None:
        """Compare a home with its digest; homes that were shown may change unseen."""
        known = self._digests.get(bucket_id)
        if known is None or bucket_id in self._shown_homes or bucket_id in self._landing:
            return
        if _crc(self.home(bucket_id)) != known:
            raise TransferError(
                f"the HOST home of bucket {bucket_id} changed while nobody wrote to it",
                advice="look for code that writes to memory it does not own",
                moves=self.table.moves(),
            )


def _crc(home: Home) -> int:
    return crc32(memoryview(home.bytes.numpy()))


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending chunk ids as [first, end) runs, so that neighbours move in one copy."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1] = (runs[-1][0], chunk + 1)
        else:
            runs.append((chunk, chunk + 1))
    return runs
