"""The store of all homes, under their tiers' budgets (floor 1, mechanism)."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from hetero.device import Device
from hetero.device.comm import ALONE_COMM, Comm
from hetero.errors import DivergenceError
from hetero.io import align_up
from hetero.memory import shown
from hetero.memory.changes import Sharing
from hetero.memory.codec import EXACT, Codec
from hetero.memory.extent import PinSpan, PinUse, Request, overlap
from hetero.memory.hbmhome import DeviceHome
from hetero.memory.home import DiskHome, Home, HostHome, MovableHome, Pinned, cut
from hetero.memory.layout import Bucket
from hetero.memory.ledger import Ledger
from hetero.memory.nopool import NoPool
from hetero.memory.places import HomePlaces
from hetero.memory.pool import Pool
from hetero.memory.share import DeviceShareHome, DiskShareHome, NodeHome, ShareHome
from hetero.types import Kind, Tier, noop

TRAVEL = (Kind.PARAM.value, Kind.GRAD.value)
"""Homes that copies use. States are updated where they lie, and sums of gradients are added up by
threads: to page-lock them would only take time."""

Key = tuple[str, int]
"""The name of a home, and its bucket."""
Charge = tuple[Tier, Kind, int]
"""Bytes of a tier that a home takes."""


class Move(NamedTuple):
    """A home that has been copied: see `HomeStore.copy`."""

    key: Key
    old: Home
    new: Home
    charged: Charge | None
    """For the old one."""


class HomeStore:
    """Makes homes under their tier's budget and keeps them: ``homes[kind name, bucket id]``.

    ``places`` says on which tier each is made.
    """

    __slots__ = (
        *("_charged", "_comm", "_device", "_kinds", "_ledger", "_names", "_node", "_parked"),
        "_sharing",
        *("before_use", "hbm_bytes", "homes", "places", "pool"),
    )

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        *,
        places: HomePlaces | None = None,
        pool: Pool | None = None,
        comm: Comm = ALONE_COMM,
    ) -> None:
        self._comm = comm
        self._node = comm.node
        self._sharing = Sharing()
        self._device = device
        self._ledger = ledger
        self._charged: dict[Key, Charge] = {}
        self._parked: dict[Key, Pinned] = {}  # homes on disk without content
        self._names: list[str] = []  # ascending
        self._kinds: dict[str, Kind] = {}
        self.places = places or HomePlaces()
        self.hbm_bytes: Counter[int] = Counter()
        """HBM that homes take, by bucket."""
        self.pool: Pool | NoPool = pool or NoPool()
        self.homes: dict[Key, Home] = {}
        self.before_use: Callable[[], None] = noop  # called before the user reads or writes a state

    @property
    def comm(self) -> Comm:
        """What joins the ranks that share the homes."""
        return self._comm

    def reserve(self, kind: Kind, n_bytes: int, what: str) -> None:
        """Charge HOST memory that lives as long as the homes."""
        self._ledger.charge(Tier.HOST, kind, n_bytes, what)

    @property
    def tier(self) -> Tier:
        """The tier of a new home that has no other place."""
        return Tier.HBM if self.places.stays else Tier.HOST

    def get(self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype | None = None) -> Home:
        """Return the home of ``name`` (a parameter kind or a state's key), made if missing."""
        key = name, bucket.id
        if key not in self.homes:
            self.homes[key] = self._find(kind, name, bucket, dtype or bucket.dtype)
            if name not in self._kinds:
                self._kinds[name] = kind
                insort(self._names, name)
        return self.homes[key]

    def _find(self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype) -> Home:
        """Return a home without content on the tier that `places` now says."""
        there = self.places.tier(kind, bucket.id) is Tier.NVME
        parked = self._parked.pop((name, bucket.id), None) if there else None
        if parked is None:
            return self._make(kind, name, bucket, dtype)
        parked.come_back()
        return parked

    def _make(self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype) -> Home:
        codec = bucket.codec if kind is Kind.PARAM else EXACT
        n_bytes, what = codec.n_bytes(bucket.numel, dtype), f"{name} of bucket {bucket.id}"
        tier = self.places.tier(kind, bucket.id)
        if tier is Tier.NVME:
            return self._on_disk(kind, bucket, dtype, codec, what)
        kept_bytes = codec.n_bytes(bucket.share_numel, dtype)
        self._ledger.charge(tier, kind, kept_bytes, what)
        self._charged[name, bucket.id] = (tier, kind, kept_bytes)
        if tier is Tier.HBM:
            self.hbm_bytes[bucket.id] += kept_bytes
            return self._on_device(bucket, dtype, codec, kept_bytes)
        if self._node is not None:
            return NodeHome(
                *(kind, name, bucket, dtype, codec, self._comm, self._sharing),
                node=self._node,
                device=self._device,
            )
        if self._comm.size > 1:
            slab = self._device.paged_slab(n_bytes)
            share = ShareHome(slab, bucket, dtype, codec, self._comm, self._sharing)
            if kind is Kind.PARAM:
                share.lock_own(self._device)
            return share
        lies = MovableHome if self.places.on_disk else HostHome
        return lies(self._device.slab(n_bytes, travels=name in TRAVEL), bucket, dtype, codec)

    def _on_device(self, bucket: Bucket, dtype: torch.dtype, codec: Codec, n_bytes: int) -> Home:
        made = self._device.arena(n_bytes), bucket, dtype, codec
        if self._comm.size > 1:
            return DeviceShareHome(self._device, *made, self._comm, self._sharing)
        return HostHome(*made) if self.places.stays else DeviceHome(self._device, *made)

    def _on_disk(
        self, kind: Kind, bucket: Bucket, dtype: torch.dtype, codec: Codec, what: str
    ) -> Home:
        n_bytes, itemsize = codec.n_bytes(bucket.numel, dtype), codec.dtype(dtype).itemsize
        slab = self._device.paged_slab(align_up(n_bytes))
        if self._comm.size == 1:
            extents = self.pool.adopt(kind, slab, n_bytes, itemsize, what)
            return DiskHome(self.pool, extents, slab, bucket, dtype, codec)
        share = bucket.share(self._comm.rank)
        kept = slice(codec.items(share.start), codec.items(share.stop))
        extents = self.pool.adopt(kind, slab, n_bytes, itemsize, what, kept)
        made = slab, bucket, dtype, codec, self._comm, self._sharing
        return DiskShareHome(*made, pool=self.pool, extents=extents)

    def is_on_device(self, bucket_id: int) -> bool:
        """Whether a bucket's homes are where a device computes that is no processor."""
        return self._device.is_cuda and self.places.tier(Kind.PARAM, bucket_id) is Tier.HBM

    def of_bucket(self, bucket_id: int) -> Iterator[tuple[str, Home]]:
        """Yield the homes of one bucket with their names."""
        for name in self._names:
            home = self.homes.get((name, bucket_id))
            if home is not None:
                yield name, home

    def bytes_of(self, bucket: Bucket) -> int:
        """Return the bytes that this rank keeps of a bucket's homes."""
        return sum(kept_bytes(home, bucket) for _, home in self.of_bucket(bucket.id))

    def misplaced(self, bucket: Bucket) -> dict[str, Tier]:
        """Return the names of a bucket's homes that are not on the tier that `places` says, with
        that tier."""
        found = {}
        for name, _ in self.of_bucket(bucket.id):
            charged = self._charged.get((name, bucket.id))
            wanted = self.places.tier(self._kinds[name], bucket.id)
            if wanted is not (Tier.NVME if charged is None else charged[0]):
                found[name] = wanted
        return found

    def copy(self, name: str, bucket: Bucket) -> Move:
        """Copy a home to the tier that `places` now says. The old one stays in use until `switch`,
        which cannot fail, or `forget`; nothing may write it meanwhile."""
        key = name, bucket.id
        old, charged = self.homes[key], self._charged.pop(key, None)
        new: Home | None = None
        try:
            new = self._find(self._kinds[name], name, bucket, old.dtype)
            if isinstance(old, Pinned):
                old.ahead()
            new.take_over(old)
        except BaseException:
            self._restore(key, new, charged)
            raise
        return Move(key, old, new, charged)

    def switch(self, move: Move) -> None:
        """Let the copy be the home. Nothing may use the old one, and no views of it may be alive
        but those that the caller replaces. It keeps its memory until the caller calls `Home.leave`,
        and its place on disk for good."""
        if isinstance(move.old, Pinned):
            self._parked[move.key] = move.old
        if move.charged is not None:
            self._credit(move.key[1], *move.charged)
        self.homes[move.key] = move.new

    def forget(self, move: Move) -> None:
        """Give up a copy: the old home goes on."""
        self._restore(move.key, move.new, move.charged)

    def _restore(self, key: Key, new: Home | None, charged: Charge | None) -> None:
        """Give back a home that is not used, with its charge; None if it could not be made, though
        it may have been charged."""
        made = self._charged.pop(key, None)
        if made is not None:
            self._credit(key[1], *made)
        if isinstance(new, Pinned):
            new.discard()
            self._parked[key] = new
        if charged is not None:
            self._charged[key] = charged

    def held(self, request: Request) -> AbstractContextManager[None]:
        """Hold a request's extents in memory for the length of a block (see `Pool.pin`)."""
        return self.pool.pin(request) if request.needs else _NOTHING

    def runs(self, start: int, end: int, *uses: tuple[Home, PinUse]) -> Iterator[slice]:
        """Yield what is kept of [start, end), in items, in runs that are pinned in all homes until
        the next one."""
        kept = overlap(slice(start, end), uses[0][0].kept)
        for run in cut(kept.start, kept.stop, min(home.extent_numel for home, _ in uses)):
            with self.held(Request(PinSpan(home, run.start, run.stop, use) for home, use in uses)):
                yield run

    def take_all(self, *, held: bool = True) -> None:
        """Write home the writes to copies of all kinds but PARAM (see `Home.written`)."""
        for (name, _), home in self.homes.items():
            if home.copies and name != Kind.PARAM.value:
                for segment in shown.written(home, held=held):
                    shown.take(home, segment)

    def drop(self, name: str, bucket_id: int) -> None:
        """Drop one home. One on disk keeps its addresses, for the next `get`."""
        home = self.homes.pop((name, bucket_id), None)
        if home is None:
            return
        home.discard()
        charged = self._charged.pop((name, bucket_id), None)
        if charged is not None:
            self._credit(bucket_id, *charged)
        if isinstance(home, Pinned):
            self._parked[name, bucket_id] = home

    def charge_copy(self, bucket_id: int, n_bytes: int) -> None:
        """Charge HBM for a copy of weights whose home is there, as if the home took it."""
        what = f"a copy of bucket {bucket_id}, whose weights may be written unseen,"
        self._ledger.charge(Tier.HBM, Kind.PARAM, n_bytes, what)
        self.hbm_bytes[bucket_id] += n_bytes

    def credit_copy(self, bucket_id: int, n_bytes: int) -> None:
        """Give back what `charge_copy` took."""
        self._credit(bucket_id, Tier.HBM, Kind.PARAM, n_bytes)

    def _credit(self, bucket_id: int, tier: Tier, kind: Kind, n_bytes: int) -> None:
        self._ledger.credit(tier, kind, n_bytes)
        if tier is Tier.HBM:
            self.hbm_bytes[bucket_id] -= n_bytes

    def open_shares(self, failed: BaseException | None = None) -> None:
        """Let other ranks read this one's shares, which have their first values; or tell them that
        this one ``failed``, and raises DivergenceError there. Collective."""
        text = "" if failed is None else f"{type(failed).__name__}: {failed}"
        rows = self._comm.agree(text.encode(), "the end of prepare")
        for number, row in enumerate(rows):
            if row and failed is None:
                name = self._comm.members.name(number)
                raise DivergenceError(
                    f"{name} could not prepare its shares: {row.decode(errors='replace')}",
                    advice="see the error of that rank",
                )
        self._sharing.is_open = True

    @contextmanager
    def writing_shares(self, what: str) -> Iterator[None]:
        """Let every rank write its shares inside a block, and read no other one's. Collective at
        its beginning; when it ends, other ranks may still write theirs."""
        self._comm.agree(b"", what)
        self._sharing.is_open = False
        try:
            yield
        finally:
            self._sharing.is_open = True

    @property
    def is_gathered(self) -> bool:
        """Whether fetches are put together by collectives."""
        return self._comm.size > 1 and self._node is None

    def close(self) -> None:
        self._comm.close()
        for home in self.homes.values():
            home.close()
        self.homes.clear()
        self._parked.clear()
        self.pool.close()


def kept_bytes(home: Home, bucket: Bucket) -> int:
    """Return the bytes of a bucket's home that this rank keeps."""
    return home.codec.n_bytes(bucket.share_numel, home.dtype)


_NOTHING: AbstractContextManager[None] = nullcontext()
