"""Homes of which a rank keeps one share (floor 1, mechanism).

A home keeps the addresses of its whole bucket, so that indices, segments and requests mean the same
on every rank; it has memory where this rank's share is. Whole tensors are put together from all
ranks: such reads are collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hetero.crc import crc32
from hetero.memory.home import Home
from hetero.memory.layout import row

if TYPE_CHECKING:
    from hetero.device import Slab
    from hetero.device.comm import Comm, Node
    from hetero.memory.codec import Codec
    from hetero.memory.extent import PinUse
    from hetero.memory.layout import Bucket, Segment


class ShareHome(Home):
    """A home on HOST of which other ranks keep the rest. State dicts get copies, as of one on disk;
    a whole tensor that is written is the same on all ranks, and each keeps its part."""

    __slots__ = ("_comm", "_n_shares", "_share_numel", "kept")

    def __init__(
        self, slab: Slab, bucket: Bucket, dtype: torch.dtype, codec: Codec, comm: Comm
    ) -> None:
        super().__init__(slab, bucket, dtype, codec)
        self._comm = comm
        self._share_numel = bucket.share_numel
        self.kept = bucket.share(comm.rank)

    @property
    def shows(self) -> bool:
        return False

    def runs(self, start: int, end: int, use: PinUse) -> Iterator[slice]:
        kept = self.items(self.kept.start, self.kept.stop)
        run = overlap(slice(start, end), kept)
        if run.start < run.stop:
            yield run

    def crc(self) -> int | None:
        kept = self._flat[self.items(self.kept.start, self.kept.stop)]
        return crc32(memoryview(kept.view(torch.uint8).numpy()))

    def read(self, segment: Segment) -> torch.Tensor:
        value = self.empty(segment)
        mine = overlap(slice(segment.offset, segment.end), self.kept)
        if mine.start < mine.stop:
            where = segment.inside(mine)
            self.codec.decode(self._flat[self.items(mine.start, mine.stop)], row(value)[where])
        return self.complete(segment, value)

    def complete(self, segment: Segment, value: torch.Tensor) -> torch.Tensor:
        size, end = value.element_size(), segment.spec.numel
        borders = range(0, (self._comm.size + 1) * self._share_numel, self._share_numel)
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
        super().write_run(segment, mine.start - segment.offset, part)

    def recode(self, start: int, values: torch.Tensor) -> None:
        mine = overlap(slice(start, start + values.numel()), self.kept)
        if mine.start < mine.stop:
            super().recode(mine.start, values[mine.start - start : mine.stop - start])


class NodeHome(ShareHome):
    """A PARAM home whose other shares this rank reads where other processes keep them.

    Every rank makes the same changes to it. Each counts those that it has begun, and its own share
    says how many are done there: so a reader waits for the ranks that are behind. A change begins
    when nobody reads: an optimizer's after the roll call of its step, a user's after a meeting.
    """

    __slots__ = ("_bucket", "_n_begun", "_node", "_others", "is_open")
    is_shared = True

    def __init__(
        self, bucket: Bucket, dtype: torch.dtype, codec: Codec, comm: Comm, node: Node
    ) -> None:
        super().__init__(node.slab(bucket.id), bucket, dtype, codec, comm)
        self._node = node
        self._bucket = bucket.id
        self._n_begun = 0
        self.is_open = False
        """Whether others may read it: `prepare` is over."""
        memories = [node.memory(bucket.id, rank) for rank in range(comm.size)]
        n_bytes = codec.n_bytes(bucket.numel, dtype)
        self._others = [memory[:n_bytes].view(codec.dtype(dtype)) for memory in memories]

    @property
    def is_current(self) -> bool:
        return self._node.is_current(self._bucket, self._n_begun)

    def wait_for_others(self) -> None:
        self._node.wait(self._bucket, self._n_begun)

    def begin_change(self) -> None:
        self._n_begun += 1

    def end_change(self) -> None:
        self._node.changed(self._bucket)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        if not self.is_open:
            yield
            return
        self._comm.agree(b"", f"a write of {what}")
        self.begin_change()
        yield
        self.end_change()

    def parts(self, start: int, end: int, use: PinUse) -> Iterator[tuple[slice, torch.Tensor]]:
        self.wait_for_others()
        for share, items in self._shares():
            run = overlap(slice(start, end), self.items(share.start, share.stop))
            if run.start < run.stop:
                yield run, items[run]

    def _shares(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the elements of each rank's share, and the items of its home."""
        for rank, items in enumerate(self._others):
            yield slice(rank * self._share_numel, (rank + 1) * self._share_numel), items

    def complete(self, segment: Segment, value: torch.Tensor) -> torch.Tensor:
        if value.dtype is not self.dtype:  # masters: their other half is not of this home
            return super().complete(segment, value)
        self.wait_for_others()
        flat = row(value)
        for share, items in self._shares():
            run = overlap(slice(segment.offset, segment.end), share)
            if run.start < run.stop and share != self.kept:
                where = segment.inside(run)
                self.codec.decode(items[self.items(run.start, run.stop)], flat[where])
        return value

    def write_run(self, segment: Segment, start: int, values: torch.Tensor) -> None:
        with self.changing(segment.spec.name):
            super().write_run(segment, start, values)


def overlap(first: slice, second: slice) -> slice:
    """Return what two runs have in common; an empty one lies inside the first."""
    start = min(max(first.start, second.start), first.stop)
    return slice(start, max(start, min(first.stop, second.stop)))
