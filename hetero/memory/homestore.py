"""The store of all homes, under their tiers' budgets (floor 1, mechanism)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from hetero.device import Device
from hetero.io import align_up
from hetero.memory.codec import EXACT
from hetero.memory.extent import PinSpan, PinUse, Request
from hetero.memory.home import DiskHome, Home, HostHome, cut
from hetero.memory.layout import Bucket
from hetero.memory.ledger import Ledger
from hetero.memory.pool import NoPool, Pool
from hetero.types import Kind, Tier, noop


class HomeStore:
    """Makes homes under their tier's budget and keeps them: ``homes[kind name, bucket id]``.

    With ``resident`` the homes are on the device; otherwise on disk if ``on_disk(kind, bucket)``,
    else on HOST.
    """

    __slots__ = (
        *("_charged", "_device", "_ledger", "_names", "_on_disk", "_parked", "_resident"),
        *("before_use", "homes", "pool"),
    )

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        *,
        resident: bool = False,
        pool: Pool | None = None,
        on_disk: Callable[[Kind, int], bool] = lambda kind, bucket: False,
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._resident = resident
        self._on_disk = on_disk
        self._charged: dict[tuple[str, int], tuple[Kind, int]] = {}
        self._parked: dict[tuple[str, int], Home] = {}  # homes on disk without content
        self._names: list[str] = []  # ascending
        self.pool: Pool | NoPool = pool or NoPool()
        self.homes: dict[tuple[str, int], Home] = {}
        self.before_use: Callable[[], None] = noop  # called before the user reads or writes a state

    @property
    def tier(self) -> Tier:
        """The tier of homes that are not on disk."""
        return Tier.HBM if self._resident else Tier.HOST

    def get(self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype | None = None) -> Home:
        """Return the home of ``name`` (a parameter kind or a state's key), made if missing."""
        key = name, bucket.id
        if key not in self.homes:
            parked = self._parked.pop(key, None)
            self.homes[key] = parked or self._make(kind, name, bucket, dtype or bucket.dtype)
            if name not in self._names:
                insort(self._names, name)
        return self.homes[key]

    def _make(self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype) -> Home:
        codec = bucket.codec if kind is Kind.PARAM else EXACT
        n_bytes, what = codec.n_bytes(bucket.numel, dtype), f"{name} of bucket {bucket.id}"
        if self._on_disk(kind, bucket.id):
            slab = self._device.paged_slab(align_up(n_bytes))
            extents = self.pool.adopt(kind, slab, n_bytes, codec.dtype(dtype).itemsize, what)
            return DiskHome(self.pool, extents, slab, bucket, dtype, codec)
        self._ledger.charge(self.tier, kind, n_bytes, what)
        self._charged[name, bucket.id] = (kind, n_bytes)
        slab = (self._device.arena if self._resident else self._device.slab)(n_bytes)
        return HostHome(slab, bucket, dtype, codec)

    def of_bucket(self, bucket_id: int) -> Iterator[tuple[str, Home]]:
        """Yield the homes of one bucket with their names."""
        for name in self._names:
            home = self.homes.get((name, bucket_id))
            if home is not None:
                yield name, home

    def held(self, request: Request) -> AbstractContextManager[None]:
        """Hold a request's extents in memory for the length of a block (see `Pool.pin`)."""
        return self.pool.pin(request) if request.needs else _NOTHING

    def runs(self, start: int, end: int, *uses: tuple[Home, PinUse]) -> Iterator[slice]:
        """Yield [start, end), in items, in runs that are pinned in all homes until the next one."""
        for run in cut(start, end, min(home.extent_numel for home, _ in uses)):
            with self.held(Request(PinSpan(home, run.start, run.stop, use) for home, use in uses)):
                yield run

    def take_all(self, *, held: bool = True) -> None:
        """Write home the writes to copies of all kinds but PARAM (see `Home.written`)."""
        for (name, _), home in self.homes.items():
            if home.copies and name != Kind.PARAM.value:
                for segment in home.written(held=held):
                    home.take(segment)

    def drop(self, name: str, bucket_id: int) -> None:
        """Drop one home. One on disk keeps its addresses, for the next `get`."""
        home = self.homes.pop((name, bucket_id), None)
        if home is None:
            return
        home.discard()
        charged = self._charged.pop((name, bucket_id), None)
        if charged is None:
            self._parked[name, bucket_id] = home
        else:
            self._ledger.credit(self.tier, *charged)

    def close(self) -> None:
        for home in self.homes.values():
            home.close()
        self.homes.clear()
        self._parked.clear()
        self.pool.close()


_NOTHING: AbstractContextManager[None] = nullcontext()
