"""Parcels: flushed activations, in chunks on HOST, beyond its budget on NVME (floor 1, mechanism).

The storages of a parcel lie one after the other in an index space of bytes, cut into chunks of one
size, so that free ones serve any parcel. That size follows from the first parcel, and then from the
mean of a step's: a copy a chunk costs a launch, and each parcel leaves some of its last chunk
unused. Landed bytes never change, and may be fetched repeatedly.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hetero.config import describe_limit
from hetero.device import Device, Slab, Ticket, release_slab
from hetero.errors import OutOfMemory
from hetero.io import ALIGN, align_up
from hetero.memory.extent import Extents, PinSpan, PinUse, Request
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.nopool import NoPool
from hetero.memory.pool import Pool
from hetero.memory.transfers import Landing, Transfers
from hetero.types import Kind, Lane, Tier, format_bytes

ALIGN_BYTES = 64  # where a storage begins in its parcel
CHUNKS = 16  # that a parcel is cut into on average: all leave 1/16 of them unused at most
UNLIKE = 2  # times what it should be: another size is worth new memory
SIZES = 4  # that are tried: inputs may be long and short in turn
MOST_BYTES = 16 * 2**20  # of a chunk: past the knee of every link measured
WHAT = "activations"
ELEMENT_BYTES = 4  # of an extent's elements
BUDGETS = {Tier.HOST: "host", Tier.NVME: "nvme_bytes"}
SPARE_BYTES = 256 * 2**20  # of RAM that stay free without a budget


class ParcelChunk:
    """A run of a parcel's bytes; ``idle`` fires when its last reader or writer is done. ``beyond``
    is the tier without room for it, if it is in memory only to be counted."""

    __slots__ = ("beyond", "bytes", "idle", "slab")
    stays = True
    """Whether it is always in memory."""

    def __init__(
        self,
        slab: Slab,
        n_bytes: int,
        beyond: Tier | None = None,
    ) -> None:
        self.beyond = beyond
        self.slab = slab
        self.bytes = slab.carve(0, n_bytes)
        self.idle: tuple[Ticket, ...] = ()

    def request(self, use: PinUse) -> Request:
        """Return the request that pins it; empty on HOST."""
        return Request(())

    def discard(self, pool: Pool | NoPool) -> None:
        """Drop its content on disk."""


class DiskChunk(ParcelChunk):
    """A chunk on disk, in memory while it is pinned."""

    __slots__ = ("_extents",)
    stays = False

    def __init__(self, slab: Slab, n_bytes: int, extents: Extents) -> None:
        super().__init__(slab, n_bytes)
        self._extents = extents

    def request(self, use: PinUse) -> Request:
        return Request([PinSpan(self._extents, 0, self.bytes.numel() // ELEMENT_BYTES, use)])

    def discard(self, pool: Pool | NoPool) -> None:
        pool.discard(self._extents)


class ParcelPiece(NamedTuple):
    """Bytes [start, start + n) of the parcel's storage ``source``, at ``offset`` of its chunk."""

    source: int
    start: int
    chunk: int
    offset: int
    n_bytes: int


@dataclass(slots=True)
class Parcel:
    """Storages of these sizes, and the chunks they lie in."""

    sizes_bytes: tuple[int, ...]
    chunks: list[ParcelChunk] = field(default_factory=list)


@dataclass(slots=True)
class Flushed:
    """Parcels since none was in use."""

    n_parcels: int = 0
    n_bytes: int = 0


class ParcelStore:
    """Flushes storages of the device to chunks and fetches them again.

    Args:
        least_bytes: of a chunk, a multiple of 64.
        pool: for chunks that HOST has no room for.
        ram: returns the bytes of RAM that may still be taken.
        reserved: returns the bytes of a tier that others will still take.
        counts_on: whether chunks beyond a budget are counted, for `refusal`, instead of an error.
    """

    def __init__(
        self,
        device: Device,
        link: Link,
        ledger: Ledger,
        *,
        least_bytes: int,
        pool: Pool | NoPool,
        ram: Callable[[], int],
        reserved: Callable[[Tier], int],
        counts_on: bool,
    ) -> None:
        self._device = device
        self.link = link
        """The link of these bytes; it counts them alone."""
        self._ledger = ledger
        self._chunk_bytes = align_up(least_bytes) if pool.spills else least_bytes
        self._least_bytes = self._chunk_bytes
        self._n_sizes = 0
        self._flushed = Flushed()
        self._n_live = 0  # chunks of parcels that are not discarded
        self._pool = pool
        self._ram = ram
        self._reserved = reserved
        self._counts_on = counts_on
        self._beyond: Counter[Tier] = Counter()  # chunks now
        self._most_beyond: Counter[Tier] = Counter()  # since `refusal`
        self._free: list[ParcelChunk] = []  # those on HOST last: they are taken first
        self.transfers: Transfers[object] = Transfers()
        """Copies under way, which keep their sources and pins."""

    def flush(self, sources: Sequence[torch.Tensor], held: object = None) -> Parcel:
        """Queue copies of storages (1-D uint8 on the device, not written any more) down.

        Sources and ``held`` are kept until they have landed; the next flush waits for that, so one
        parcel at a time is in flight. Raises OutOfMemory or StorageError if there is no room;
        nothing has happened then.
        """
        self.transfers.finish()
        parcel = Parcel(tuple(source.numel() for source in sources))
        end = sum(aligned(n) for n in parcel.sizes_bytes)
        self._resize(end)
        try:
            for _ in range(-(-end // self._chunk_bytes)):
                parcel.chunks.append(self._take())
                self._n_live += 1
            after = (self._device.mark(),)
            numbered = dict(enumerate(sources))
            for number, pieces in self._by_chunk(parcel):
                self._move(Lane.D2H, parcel.chunks[number], numbered, pieces, after, held)
        except BaseException:
            self.transfers.finish()
            self.discard(parcel)
            raise
        return parcel

    def fetch(
        self, parcel: Parcel, needed: Iterable[int]
    ) -> tuple[dict[int, torch.Tensor], Ticket | None]:
        """Queue copies of the needed storages of a parcel up; returns them by their number. The
        ticket fires when all have landed; the caller holds them until it has waited for it."""
        place = self._device.torch_device
        targets = {
            number: torch.empty(parcel.sizes_bytes[number], dtype=torch.uint8, device=place)
            for number in needed
        }
        for target in targets.values():
            self._device.memory.hold_for_compute(target)
        # kernels queued before may still read memory that torch reuses here, and in deterministic
        # mode torch fills it
        after = (self._device.mark(),)
        ticket = None
        try:
            for number, pieces in self._by_chunk(parcel):
                wanted = [piece for piece in pieces if piece.source in targets]
                if wanted:
                    chunk = parcel.chunks[number]
                    ticket = self._move(Lane.H2D, chunk, targets, wanted, after, None)
        except BaseException:
            if ticket is not None:  # queued copies still write to the targets
                self._landing(ticket).wait()
            raise
        self.transfers.poll()
        return targets, ticket

    def announce(self, parcel: Parcel) -> None:
        """Read ahead a parcel's chunks on disk: it is fetched soon."""
        self._pool.ahead(chunk.request(PinUse.READ) for chunk in parcel.chunks)

    def discard(self, parcel: Parcel) -> None:
        """Drop a parcel's bytes: it is not fetched any more."""
        for chunk in parcel.chunks:
            if chunk.beyond is not None:
                self._release(chunk)
                self._beyond[chunk.beyond] -= 1
            elif chunk.stays:
                self._free.append(chunk)
            else:
                self.transfers.finish()
                chunk.discard(self._pool)
                self._free.insert(0, chunk)
        self._n_live -= len(parcel.chunks)
        parcel.chunks = []

    def shrink(self) -> None:
        """Give HOST the memory of free chunks back."""
        self.transfers.finish()
        for chunk in self._free:
            if chunk.stays:
                self._release(chunk)
                self._ledger.credit(Tier.HOST, Kind.ACTIVATION, self._chunk_bytes)
        self._free = [chunk for chunk in self._free if not chunk.stays]

    def give_way(self) -> None:
        """Give HOST the memory of free chunks back if homes to come need it."""
        if self._free and self._room(Tier.HOST) < 0:
            self.shrink()

    def room_bytes(self) -> int:
        """Return the bytes that parcels may still take, in whole chunks."""
        tiers = [Tier.HOST, Tier.NVME][: 1 + self._pool.spills]
        n_new = sum(max(0, self._room(tier)) // self._chunk_bytes for tier in tiers)
        return (len(self._free) + n_new) * self._chunk_bytes

    def refusal(self) -> OutOfMemory | None:
        """Return the error for chunks beyond a budget since the last call, if any."""
        found = next((self._short(tier) for tier, n in self._most_beyond.items() if n), None)
        self._most_beyond.clear()
        return found

    def close(self) -> None:
        self.shrink()
        self._free.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _move(
        self,
        lane: Lane,
        chunk: ParcelChunk,
        tensors: Mapping[int, torch.Tensor],
        pieces: Sequence[ParcelPiece],
        after: tuple[Ticket, ...],
        held: object,
    ) -> Ticket:
        """Queue the copies between one chunk and its storages."""
        down = lane is Lane.D2H
        request = chunk.request(PinUse.FRESH if down else PinUse.READ)
        pins = ExitStack()
        if request.needs:
            self.transfers.finish()  # one chunk is pinned at a time: the pool may be that small
            pins.enter_context(self._pool.pin(request))
        with pins:
            for piece in pieces:
                there = chunk.bytes[piece.offset : piece.offset + piece.n_bytes]
                here = tensors[piece.source][piece.start : piece.start + piece.n_bytes]
                target, source = (there, here) if down else (here, there)
                ticket = self.link.move(
                    lane,
                    target,
                    source,
                    kind=Kind.ACTIVATION,
                    after=(*after, *chunk.idle),
                    why=WHAT,
                )
            chunk.idle = (ticket,)
            if down or request.needs:  # a fetch's caller holds the targets
                kept = (tensors, held) if down else None
                self.transfers.queue(self._landing(ticket), kept, then=pins.pop_all().close)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make compute that is queued from now on run after a fetch."""
        self.link.wait(ticket, kind=Kind.ACTIVATION)

    def _landing(self, ticket: Ticket) -> Landing:
        return Landing(self.link, ticket, Kind.ACTIVATION)

    def _resize(self, n_bytes: int) -> None:
        """Choose the size of chunks anew, before a parcel of ``n_bytes``, if none are in use."""
        seen = self._flushed
        if not self._n_live:  # a step begins
            self.give_way()
            mean = seen.n_bytes // seen.n_parcels if seen.n_parcels else n_bytes
            size, now = self._size_for(mean), self._chunk_bytes
            is_like = self._n_sizes > 0 and max(size, now) <= UNLIKE * min(size, now)
            stay = all(chunk.stays for chunk in self._free)  # extents on disk are for good
            if stay and not is_like and self._n_sizes < SIZES:
                self.shrink()
                self._chunk_bytes = size
                self._n_sizes += 1
            seen = self._flushed = Flushed()
        seen.n_parcels += 1
        seen.n_bytes += n_bytes

    def _size_for(self, n_bytes: int) -> int:
        """Return the bytes of a chunk if parcels are like one of ``n_bytes``."""
        align, most = ALIGN_BYTES, MOST_BYTES
        if self._pool.spills:  # which holds several extents, and a chunk whole
            align, most = ALIGN, min(most, ELEMENT_BYTES * self._pool.extent_numel)
        size = min(n_bytes // CHUNKS, most) // align * align
        return max(size, self._least_bytes)

    def _release(self, chunk: ParcelChunk) -> None:
        for ticket in chunk.idle:
            self._landing(ticket).wait()
        release_slab(chunk.slab)

    def _take(self) -> ParcelChunk:
        """Return a chunk: a used one, a new one on HOST, or one on disk."""
        if self._free and self._free[-1].stays:
            return self._free.pop()
        has_room = self._room(Tier.HOST) >= self._chunk_bytes
        if self._free and not has_room:
            return self._free.pop()
        if has_room:
            self._ledger.charge(Tier.HOST, Kind.ACTIVATION, self._chunk_bytes, WHAT)
            return ParcelChunk(self._device.slab(self._chunk_bytes), self._chunk_bytes)
        if not self._pool.spills:
            return self._take_beyond(Tier.HOST)
        if self._room(Tier.NVME) < self._chunk_bytes:
            return self._take_beyond(Tier.NVME)
        slab = self._device.paged_slab(self._chunk_bytes)
        extents = self._pool.adopt(
            Kind.ACTIVATION, slab, self._chunk_bytes, ELEMENT_BYTES, f"{WHAT} on disk"
        )
        return DiskChunk(slab, self._chunk_bytes, extents)

    def _room(self, tier: Tier) -> int:
        """Return the bytes that chunks may still take: of the budget, or else of the machine."""
        free = self._ledger.free(tier)
        if free is None:
            free = self._spare_ram() if tier is Tier.HOST else sys.maxsize
        return free - self._reserved(tier)

    def _spare_ram(self) -> int:
        return self._ram() - SPARE_BYTES

    def _take_beyond(self, tier: Tier) -> ParcelChunk:
        """Return a chunk counted beyond a tier's room, or raise OutOfMemory."""
        self._beyond[tier] += 1
        self._most_beyond[tier] = max(self._most_beyond[tier], self._beyond[tier])
        bounded = self._ledger.budgets.get(tier) is not None
        if self._counts_on and bounded and self._spare_ram() >= self._chunk_bytes:
            slab = self._device.slab(self._chunk_bytes)
            return ParcelChunk(slab, self._chunk_bytes, beyond=tier)
        try:  # no name for the error: its traceback would hold it, and the sources, until gc runs
            raise self._short(tier)
        finally:
            self._beyond[tier] -= 1
            self._most_beyond.clear()

    def _short(self, tier: Tier) -> OutOfMemory:
        """Return the error for chunks beyond a tier's room."""
        used, here = self._ledger.used(tier, Kind.ACTIVATION), self._room(tier)
        beyond = self._most_beyond[tier] * self._chunk_bytes
        budget = self._ledger.budgets.get(tier)
        name = BUDGETS[tier]
        whose = f"{name}={budget} bytes"
        if budget is None:
            whose = describe_limit(self._device.host_limit())
        needed = self._ledger.used(tier) + self._reserved(tier) + beyond
        return OutOfMemory(
            f"{format_bytes(used + beyond)} of activations go to {tier.name}; {whose} has no room"
            f" for them beside homes, {beyond - here} bytes short",
            advice=f"raise {name}= to {needed} bytes or more, use activations='recompute', or lower"
            f" the batch{', or name a directory on a drive with nvme=' * (not self._pool.spills)}",
            tier=tier.name,
            needed_bytes=needed,
        )

    def _by_chunk(self, parcel: Parcel) -> Iterator[tuple[int, list[ParcelPiece]]]:
        """Yield each chunk of a parcel with the pieces of storages in it."""
        found: dict[int, list[ParcelPiece]] = {}
        begin, size = 0, self._chunk_bytes
        for source, n_bytes in enumerate(parcel.sizes_bytes):
            start = 0
            while start < n_bytes:
                number, offset = divmod(begin + start, size)
                length = min(n_bytes - start, size - offset)
                found.setdefault(number, []).append(
                    ParcelPiece(source, start, number, offset, length)
                )
                start += length
            begin += aligned(n_bytes)
        yield from found.items()


def aligned(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to where the next storage may begin."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
