"""Homes of which a rank keeps one share (floor 1, mechanism).

A home keeps the addresses of its whole bucket, so that indices, segments and requests mean the same
on every rank; it has memory where this rank's share is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hetero.crc import crc32
from hetero.memory.changes import Changes, GatheredChanges, SharedChanges, Sharing, counter_of
from hetero.memory.extent import Extents, PinUse, overlap
from hetero.memory.hbmhome import OnDevice
from hetero.memory.home import Fill, Home, Pinned
from hetero.memory.layout import row
from hetero.types import Kind

if TYPE_CHECKING:
    from hetero.device import Device, Slab
    from hetero.device.comm import Comm, Node
    from hetero.memory.codec import Codec
    from hetero.memory.layout import Bucket, Segment
    from hetero.memory.nopool import NoPool
    from hetero.memory.pool import Pool


class ShareHome(Home):
    """A home on HOST of which other ranks keep the rest. State dicts get copies, as of one on disk.

    A whole tensor is put together from all ranks: to read one is collective. One that is written is
    the same on all ranks, and each keeps its part.
    """

    __slots__ = ("_comm", "_n_shares", "_saved", "_share_numel", "_unlocks", "changes", "kept")
    is_share = True

    def __init__(
        self,
        slab: Slab,
        bucket: Bucket,
        dtype: torch.dtype,
        codec: Codec,
        comm: Comm,
        sharing: Sharing,
        numel: int | None = None,
    ) -> None:
        super().__init__(slab, bucket, dtype, codec, numel)
        self._comm = comm
        self.changes: Changes = GatheredChanges(comm, sharing)
        self._n_shares, self._share_numel = bucket.n_shares, bucket.share_numel
        self.kept = bucket.share(comm.rank)
        self._saved = bucket.saved(comm.rank)
        self._unlocks: list[Callable[[], None]] = []

    def lock_own(self, device: Device) -> None:
        """Page-lock the share, from which a device copies."""
        self._note(device.lock(self._flat[self.kept_items].view(torch.uint8), self._slab))

    def _note(self, unlock: Callable[[], None] | None) -> None:
        if unlock is not None:
            self._unlocks.append(unlock)

    def close(self) -> None:
        self._unlock()
        super().close()

    def leave(self, successor: Home) -> None:
        self._unlock()
        super().leave(successor)

    def _unlock(self) -> None:
        for unlock in self._unlocks:
            unlock()
        self._unlocks.clear()

    def take_over(self, other: Home) -> None:
        self.part(self.kept_items).copy_(other.part(self.kept_items))
        self.rewritten()

    @property
    def shows(self) -> bool:
        return False

    def runs(self, start: int, end: int, use: PinUse) -> Iterator[slice]:
        run = overlap(slice(start, end), self.kept_items)
        if run.start < run.stop:
            yield run

    @property
    def kept_items(self) -> slice:
        """The share, in items."""
        return self.items(self.kept.start, self.kept.stop)

    def own(self, items: slice) -> slice:
        return overlap(items, self.kept_items)

    def to_save(self, items: slice) -> slice:
        return overlap(items, self.items(self._saved.start, self._saved.stop))

    def load_own(self, items: slice) -> torch.Tensor:
        return self._flat[items]

    def crc(self) -> int | None:
        return crc32(memoryview(self.load_own(self.kept_items).view(torch.uint8).numpy()))

    def read(self, segment: Segment) -> torch.Tensor:
        value = self.empty(segment)
        mine = overlap(slice(segment.offset, segment.end), self.kept)
        if mine.start < mine.stop:
            where = segment.inside(mine)
            self.codec.decode(self.load_own(self.items(mine.start, mine.stop)), row(value)[where])
        return self.complete(segment, value)

    def complete(self, segment: Segment, value: torch.Tensor) -> torch.Tensor:
        size, end = value.element_size(), segment.spec.numel
        borders = range(0, (self._n_shares + 1) * self._share_numel, self._share_numel)
        cuts = [min(max(at - segment.offset, 0), end) * size for at in borders]
        self._comm.complete(row(value).view(torch.uint8), cuts, f"a read of {segment.spec.name!r}")
        return value

    def value(self, segment: Segment) -> torch.Tensor:
        return self.read(segment)

    def blank(self, segment: Segment) -> torch.Tensor:
        return self.empty(segment)

    def write_run(self, segment: Segment, start: int, values: torch.Tensor) -> None:
        first = segment.offset + start
        mine = overlap(slice(first, first + values.numel()), self.kept)
        part = values[mine.start - first : mine.stop - first]
        with self.changes.meeting(segment.spec.name):
            super().write_run(segment, mine.start - segment.offset, part)

    def recode(self, start: int, values: torch.Tensor) -> None:
        mine = overlap(slice(start, start + values.numel()), self.kept)
        if mine.start < mine.stop:
            super().recode(mine.start, values[mine.start - start : mine.stop - start])

    def store(self, items: slice, fill: Fill) -> None:
        stage = torch.empty(items.stop - items.start, dtype=self.item_dtype, device="cpu")
        fill(stage)
        self._put(items.start, stage)


class DeviceShareHome(OnDevice, ShareHome):
    """A share on the device, which has no memory for what other ranks keep."""

    __slots__ = ("_device", "_first", "_written")

    def __init__(
        self,
        device: Device,
        slab: Slab,
        bucket: Bucket,
        dtype: torch.dtype,
        codec: Codec,
        comm: Comm,
        sharing: Sharing,
    ) -> None:
        super().__init__(slab, bucket, dtype, codec, comm, sharing, bucket.share_numel)
        self._first = self.kept_items.start
        self._begin(device)

    def part(self, run: slice) -> torch.Tensor:
        return self._flat[run.start - self._first : run.stop - self._first]

    def load_own(self, items: slice) -> torch.Tensor:
        return self.load(items)


class DiskShareHome(Pinned, ShareHome):
    """A share on disk, which no other rank reads there: a whole tensor is put together by all."""

    __slots__ = ("_extents", "_pool", "extent_numel")

    def __init__(self, *home: Any, pool: Pool | NoPool, extents: Extents) -> None:
        super().__init__(*home)
        self._pool = pool
        self._extents = extents
        self.extent_numel = pool.extent_numel


class NodeHome(ShareHome):
    """A home whose other shares this rank reads where other processes of its machine keep them."""

    __slots__ = ("_bucket", "_lock", "_name", "_node", "_theirs")
    is_shared = True

    def __init__(
        self,
        kind: Kind,
        name: str,
        bucket: Bucket,
        dtype: torch.dtype,
        codec: Codec,
        comm: Comm,
        sharing: Sharing,
        node: Node,
        device: Device,
    ) -> None:
        n_bytes = codec.n_bytes(bucket.numel, dtype)
        super().__init__(node.slab(name, bucket.id, n_bytes), bucket, dtype, codec, comm, sharing)
        self._name = name
        self._node = node
        self._bucket = bucket.id
        self.changes = SharedChanges(comm, sharing, node, counter_of(bucket.id, kind))
        own = comm.rank % bucket.n_shares
        self._theirs: dict[int, torch.Tensor] = {own: self._flat}  # by share
        self._lock = device.lock if kind is Kind.PARAM else None  # of what copies read
        self._lock_share(own)

    def discard(self) -> None:
        """Keep its memory: a slower rank may still read it."""

    # -- what others keep ------------------------------------------------------------------------

    def parts(self, start: int, end: int, use: PinUse) -> Iterator[tuple[slice, torch.Tensor]]:
        self.changes.wait()
        return self.everywhere(start, end)

    def everywhere(self, start: int, end: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield items [start, end) with the memory of the ranks that keep them. To write there, a
        rank has to be the only one that uses them."""
        for share, items in self._shares():
            run = overlap(slice(start, end), self.items(share.start, share.stop))
            if run.start < run.stop:
                yield run, items[run]

    def _shares(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the elements of each rank's share, and the items of its home."""
        n_bytes = self._flat.nbytes
        for share in range(self._n_shares):
            if share not in self._theirs:
                memory = self._node.memory(self._name, self._bucket, share, n_bytes)
                self._theirs[share] = memory[:n_bytes].view(self.item_dtype)
                self._lock_share(share)
            at = share * self._share_numel
            yield slice(at, at + self._share_numel), self._theirs[share]

    def _lock_share(self, share: int) -> None:
        """Page-lock a share, where a device copies from it."""
        at = share * self._share_numel
        items = self._theirs[share][self.items(at, at + self._share_numel)]
        if self._lock is not None:
            self._note(self._lock(items.view(torch.uint8)))

    def read(self, segment: Segment) -> torch.Tensor:
        value = self.empty(segment)
        flat = row(value)
        self.changes.wait()
        for share, items in self._shares():
            run = overlap(slice(segment.offset, segment.end), share)
            if run.start < run.stop:
                where = segment.inside(run)
                self.codec.decode(items[self.items(run.start, run.stop)], flat[where])
        return value

    def complete(self, segment: Segment, value: torch.Tensor) -> torch.Tensor:
        return value  # `parts` gave all of it

    def load(self, items: slice) -> torch.Tensor:
        whole = torch.empty(items.stop - items.start, dtype=self.item_dtype, device="cpu")
        for run, part in self.parts(items.start, items.stop, PinUse.READ):
            whole[run.start - items.start : run.stop - items.start].copy_(part)
        return whole
