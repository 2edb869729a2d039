"""The arena of HBM: its frames, and the replicas in them (floor 1, mechanism).

[Note: replicas apart]  While nothing computes, activations' room is idle, and many views at once
(``parameters_to_vector``) may take more frames than the arena has. A replica without a place in the
arena then gets memory of its own, counted in ``limit`` and given back before anything computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from hetero.device import Device, Slab, Ticket
from hetero.errors import BudgetError, OutOfMemory
from hetero.events import EventLog, What
from hetero.memory.chunk import CopyTable
from hetero.memory.frame import FrameMap, FramePlace
from hetero.memory.layout import Bucket, Layout
from hetero.memory.ledger import Ledger
from hetero.memory.replica import APART, Replica
from hetero.types import Kind, Tier, format_bytes

FEW = 32  # victims are chosen among so many replicas
SHELLS = 4  # sets of views kept for each bucket, on average


class Arena:
    """Charges frames as they are taken; ``frames`` maps them to buckets."""

    def __init__(
        self,
        layout: Layout,
        *,
        device: Device,
        ledger: Ledger,
        log: EventLog,
        table: CopyTable,
        limit: int,
        ceiling: int,
        next_use: Callable[[int], float],
    ) -> None:
        self.replicas: dict[int, Replica] = {}  # least recently used first
        self.by_storage: dict[int, Replica] = {}
        self.frames = FrameMap(limit)
        self.ceiling = ceiling  # all frames; the first `frames.limit` are in use
        self.slab: Slab = device.arena(ceiling * layout.chunk_numel)
        self._layout = layout
        self._device = device
        self._ledger = ledger
        self._log = log
        self.table = table
        self._next_use = next_use
        self._shells: dict[tuple[int, int], Replica] = {}
        self._vacated: list[tuple[int, int, Ticket]] = []  # freed frames that may still be read
        self._clock = 0
        self.n_apart = 0  # frames that replicas apart stand for

    @property
    def limit(self) -> int:
        """The number of frames, including those of replicas apart."""
        return self.frames.limit + self.n_apart

    @property
    def n_bytes(self) -> int:
        """The bytes of all frames, those of replicas apart included."""
        return self.slab.n_bytes + self.n_apart * self._layout.chunk_numel

    @property
    def held(self) -> bool:
        """Whether any replica is pinned or leased."""
        return not all(replica.may_leave for replica in self.replicas.values())

    @property
    def held_inside(self) -> bool:
        """Whether a replica that is not apart is pinned or leased."""
        return not all(replica.may_leave or replica.is_apart for replica in self.replicas.values())

    # -- places ----------------------------------------------------------------------------------

    def place(self, bucket: Bucket, spare: Callable[[], int]) -> FramePlace:
        """Return a place for a bucket, or APART if ``spare`` frames suffice; else OutOfMemory."""
        place = self.frames.place(bucket.granules, self._leaving())
        if place is None:
            n_spare = spare()
            if n_spare < bucket.granules:
                raise self._no_room(bucket, n_spare)
            place = FramePlace(APART, ())
        return place

    def owners(self, bucket: Bucket, start: int) -> tuple[int, ...] | None:
        """Return the buckets to evict for one to stand at ``start``; None if it cannot."""
        if start + bucket.granules > self.frames.limit:
            return None
        runs = self.frames.overlapping(start, bucket.granules)
        if not all(self.replicas[run.owner].may_leave for run in runs):
            return None
        free = self._ledger.free(Tier.HBM)
        leaving = sum(run.length for run in runs) * self._layout.chunk_numel
        if free is not None and free + leaving < bucket.n_bytes:
            return None
        return tuple(run.owner for run in runs)

    def touch(self, replicas: Iterable[Replica]) -> None:
        """Mark replicas as used now."""
        self._clock += 1
        for replica in replicas:
            replica.stamp = self._clock
            self.replicas[replica.bucket.id] = self.replicas.pop(replica.bucket.id)

    def _leaving(self) -> Iterator[tuple[object, int]]:
        """Yield victims, `FEW` at a time, furthest next use first.

        The first few are the most recently used, which a loop over all weights needs last, and the
        least recently used: asking all replicas would make a miss dearer the more there are.
        """
        last = list(itertools.islice(reversed(self.replicas), FEW // 2))
        older = itertools.filterfalse(frozenset(last).__contains__, self.replicas)
        few = [*last, *itertools.islice(older, FEW // 2)]
        while few:
            yield from self._furthest(few)
            few = list(itertools.islice(older, FEW))

    def _furthest(self, few: Sequence[int]) -> Iterator[tuple[object, int]]:
        """Yield the victims among a few, furthest next use first, then least recently used."""
        found = [
            ((self._next_use(bucket_id), -replica.stamp), bucket_id)
            for bucket_id in few
            if not ((replica := self.replicas[bucket_id]).pins or replica.is_apart)
        ]
        for worth, bucket_id in sorted(found, reverse=True):
            if self.replicas[bucket_id].may_leave:
                yield worth, bucket_id

    # -- taking and giving back ------------------------------------------------------------------

    def take(self, bucket: Bucket, start: int, why: str) -> tuple[Replica, list[Ticket]]:
        """Charge frames at ``start`` (or APART); return a replica and the last readers' tickets."""
        self._ledger.charge(Tier.HBM, Kind.PARAM, bucket.n_bytes, f"bucket {bucket.id}")
        if start == APART:
            self.n_apart += bucket.granules
        else:
            self.frames.take(bucket.id, start, bucket.granules)
        self._note(What.ALLOC, bucket, why)
        replica = self.replicas[bucket.id] = self._shell(bucket, start)
        if start == APART:  # compute may still use the memory that it is made of
            return replica, [self._device.mark()]
        return replica, self._readers(start, start + bucket.granules)

    def stand(self, replica: Replica) -> Replica:
        """Take a replica that needs no frames; returns it."""
        self.by_storage[replica.cdata] = self.replicas[replica.bucket.id] = replica
        return replica

    def leave(self, replica: Replica) -> None:
        """Undo `stand`."""
        replica.exposed = False
        del self.replicas[replica.bucket.id]
        del self.by_storage[replica.cdata]

    def give_back(self, replica: Replica, why: str) -> None:
        """Take a replica off the books."""
        bucket = replica.bucket
        self._note(What.FREE, bucket, why)
        replica.exposed = False
        del self.replicas[bucket.id]
        if replica.is_apart:
            self.n_apart -= bucket.granules
            del self.by_storage[replica.cdata]
        else:
            self.frames.drop(bucket.id)
        self._ledger.credit(Tier.HBM, Kind.PARAM, bucket.n_bytes)

    def vacate(self, replica: Replica, *, poison: bool) -> None:
        """Remember the last reader of the frames of a replica that was given back."""
        if poison:
            self._device.poison(replica.bytes)
            replica.idle = self._device.mark()
        if replica.idle is not None and not replica.is_apart:
            end = replica.start + replica.bucket.granules
            self._vacated.append((replica.start, end, replica.idle))
        replica.idle = None

    def _readers(self, start: int, end: int) -> list[Ticket]:
        """Return the tickets of readers of frames [start, end) that are not done.

        [Note: idle before write]  A frame is rewritten only after its `idle` ticket: the compute
        stream may still read what the host has long released.
        """
        self._vacated = [row for row in self._vacated if not self._device.query(row[2])]
        return [ticket for s, e, ticket in self._vacated if s < end and start < e]

    def _shell(self, bucket: Bucket, start: int) -> Replica:
        """Return the replica of a bucket at an address; its views are kept, except APART."""
        key = bucket.id, start
        shell = self._shells.pop(key, None)
        if shell is None:
            n_bytes = bucket.n_bytes
            with torch.no_grad():  # views of another mode are not written
                slab, at = self.slab, start * self._layout.chunk_numel
                if start == APART:
                    slab, at = self._device.arena(n_bytes), 0
                piece = slab.carve(at, n_bytes)
                wire = slab.carve(at, n_bytes) if bucket.n_shares > 1 else None
                shell = Replica(bucket, start, piece, self.table, wire)
            self.by_storage[shell.cdata] = shell
        if start != APART:
            self._shells[key] = shell
            self._forget_shells()
        shell.pins = 0
        return shell

    def _forget_shells(self) -> None:
        """Drop the least recently used views: there can be as many as buckets times places."""
        most = SHELLS * len(self._layout.buckets)
        while len(self._shells) > most:
            key = next(iter(self._shells))
            shell = self._shells.pop(key)
            if self.replicas.get(shell.bucket.id) is shell:
                self._shells[key] = shell  # resident: move it to the end
            else:
                del self.by_storage[shell.cdata]

    # -- size ------------------------------------------------------------------------------------

    def grow(self, granules: int) -> None:
        """Use ``granules`` more frames at the end, as far as the ceiling allows."""
        most = self.ceiling - self.n_apart
        self.frames.limit = max(self.frames.limit, min(most, self.frames.end + granules))

    def resize(self, limit: int) -> bool:
        """Change the number of frames; all must be free, and replicas apart stay. False, with as
        many as before, if the device has no memory for them; BudgetError, with none until the next
        call, if it has lost that as well."""
        frames, ceiling, before = self.frames.limit, self.ceiling, self.slab.n_bytes
        n_bytes = limit * self._layout.chunk_numel
        if n_bytes != before:  # frames that go become activations' room
            self._shells.clear()
            held = {r.cdata: r for r in self.replicas.values()}
            self.by_storage.clear()  # others look into it
            self.by_storage.update(held)
            try:
                self._make(n_bytes)
            except BudgetError as error:  # fragmented, or taken by another process
                self._log.now(What.DECISION, tier=Tier.HBM, why=str(error))
                self._make(before)
                self.frames, self.ceiling = FrameMap(frames), ceiling
                return False
        self.frames, self.ceiling = FrameMap(limit), limit
        return True

    def _make(self, n_bytes: int) -> None:
        """Take the memory of frames in place of that of the present ones."""
        self.frames, self.ceiling = FrameMap(0), 0
        self.slab = self._device.arena(0)  # free the old one before allocating
        self.slab = self._device.arena(n_bytes)

    def beyond(self, limit: int) -> list[Replica]:
        """Return the replicas that reach beyond frame ``limit``."""
        return [
            replica
            for replica in self.replicas.values()
            if not replica.is_apart and replica.start + replica.bucket.granules > limit
        ]

    def shrink(self, limit: int) -> None:
        """Give up free frames at the end; if HBM is RAM, return their pages to the system."""
        self.frames.limit = self.ceiling = limit
        if self._device.same_ram:  # every copy is done: nothing reads them
            self.slab.give_back(limit * self._layout.chunk_numel)

    # -- events and errors -----------------------------------------------------------------------

    def restate(self) -> None:
        """Log the residents, for a log that begins here."""
        for replica in self.replicas.values():
            if replica.granules:
                self._note(What.ALLOC, replica.bucket, "before")

    def _note(self, what: What, bucket: Bucket, why: str) -> None:
        self._log.now(
            what,
            tier=Tier.HBM,
            bucket=bucket.id,
            n_bytes=bucket.n_bytes,
            category=Kind.PARAM,
            why=why,
        )

    def _no_room(self, bucket: Bucket, n_spare: int) -> OutOfMemory:
        name = self._layout.unit_names[bucket.unit]
        replicas = self.replicas.values()
        pinned = sum(r.n_bytes for r in replicas if r.pins)
        leased = sum(r.n_bytes for r in replicas if not r.pins and r.leased)
        need, have = bucket.n_bytes, (self.limit + n_spare) * self._layout.chunk_numel
        more = max(need + pinned + leased - have, need)
        advice = f"raise hbm= by at least {format_bytes(more)}"
        if leased:
            advice += (
                "; or drop the views of parameters that are kept outside (p.detach(), p.data), and"
                " name fewer in one call of torch.autograd.grad or backward(inputs=)"
            )
        return OutOfMemory(
            f"unit {name!r} needs {format_bytes(need)} of frames; of {format_bytes(have)},"
            f" {format_bytes(pinned)} are pinned and {format_bytes(leased)} are held as leases by"
            " views of parameters that are still alive",
            advice=advice,
            moves=self.table.moves(),
            tier="HBM",
            needed_bytes=(self._ledger.budgets.get(Tier.HBM) or have) + more,
        )

    def budget_for(self, ids: Collection[int]) -> int:
        """Return a budget of HBM under which buckets find frames next to what is held."""
        held = [r.bucket for r in self.replicas.values() if not r.may_leave]
        others = [bucket for bucket in held if bucket.id not in ids]
        wanted = [self._layout.buckets[bucket_id] for bucket_id in ids]
        short = sum(bucket.granules for bucket in (*wanted, *others)) - self.limit
        now = self._ledger.budgets.get(Tier.HBM) or self.limit * self._layout.chunk_numel
        return now + max(0, short) * self._layout.chunk_numel
