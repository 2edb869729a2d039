"""Homes: every parameter's authoritative bytes (floor 1, mechanism).

On HOST a home is one slab per kind and bucket, exactly sized and page-locked on CUDA. Every segment
has its own storage, so that saving a state dict writes a tensor's bytes without its neighbours'. A
home on disk has the same views, valid only while pinned (see [Note: addresses stay] in
pagecache.py). A coded home (codec.py) counts in items of the codec, and has no views of values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from hetero.crc import crc32
from hetero.device import Device, Slab, Ticket, release_slab
from hetero.forks import refused
from hetero.memory.changes import UNSEEN, Changes
from hetero.memory.codec import ENCODED_AT_ONCE, Codec, NotFinite, refusal
from hetero.memory.extent import Extent, Extents, PinSpan, PinUse, Request
from hetero.memory.layout import Bucket, Segment, row
from hetero.memory.nopool import NoPool
from hetero.memory.pool import Pool
from hetero.memory.views import Copy, SegmentViews, shaped, valueless
from hetero.types import Lane

Fill = Callable[[torch.Tensor], None]


class Home:
    """One kind of one bucket; its class says where it lies. With ``numel``, it has memory for so
    many of the bucket's elements alone.

    `part` and `view` are its own memory, valid while the elements are pinned; `read` and `write`
    pin by themselves. If ``codec`` is not exact, parts are its items, and views have the right
    shape and dtype but show a single NaN.
    """

    __slots__ = (*("_items", "_slab", "_successor", "codec", "copies", "dtype", "views"),)
    on_device = False
    """Whether compute reads and writes it where it is, while the model pages."""
    stays = True
    """Whether all of it is always in memory, page-locked if a device copies from it."""
    lane = Lane.H2D
    """The lane on which its bytes go to frames."""
    way_home = Lane.D2H
    """The lane on which bytes of frames come here."""
    extent_numel = sys.maxsize
    """Items that enter and leave memory together."""
    kept = slice(0, sys.maxsize)
    """Elements that this rank keeps."""
    changes: Changes = UNSEEN
    """Those that several ranks make."""
    is_share = False
    """Whether other ranks keep the rest."""
    is_shared = False
    """Whether they may read this."""

    def __init__(
        self,
        slab: Slab,
        bucket: Bucket,
        dtype: torch.dtype,
        codec: Codec,
        numel: int | None = None,
    ) -> None:
        self._slab = slab
        self.codec = codec
        self.dtype = dtype
        self._successor: Home | None = None
        self.copies: dict[Segment, Copy] = {}  # see [Note: copies that are shown] in shown.py
        n_bytes = codec.n_bytes(numel or bucket.numel, dtype)
        self._items = slab.carve(0, n_bytes).view(codec.dtype(dtype))
        self.views = SegmentViews(
            shaped(
                slab, s.offset * dtype.itemsize, s.spec.shape, s.spec.stride, s.spec.numel, dtype
            )
            if codec.exact and numel is None
            else valueless(s.spec.shape, dtype, self.shown_on)
            for s in bucket.segments
        )

    # -- properties ------------------------------------------------------------------------------

    @property
    def now(self) -> Home:
        """This home, or the one that its bytes have moved to."""
        home = self
        while home._successor is not None:
            home = home._successor
        if home is not self:
            self._successor = home  # a handle that is kept need not go through all moves again
        return home

    @property
    def item_dtype(self) -> torch.dtype:
        """The dtype of parts."""
        return self._items.dtype

    @property
    def device(self) -> torch.device:
        return self._items.device

    @property
    def shown_on(self) -> torch.device:
        """The device of the tensors that state dicts get."""
        return self.device

    @property
    def shows(self) -> bool:
        """Whether views always show the values: in memory, and not coded."""
        return self.stays and self.codec.exact

    @property
    def is_readable(self) -> bool:
        """Whether compute may read its weights where they are, while the model pages."""
        return False

    def items(self, start: int, end: int) -> slice:
        """Return elements [start, end) of the bucket in items; ``start`` begins a block."""
        return slice(self.codec.items(start), self.codec.items(end))

    @property
    def written_at(self) -> tuple[Ticket, ...]:
        """The tickets that a copy of its bytes waits for."""
        return ()

    def rewritten(self) -> None:
        """Compute has written its bytes."""

    # -- its memory ------------------------------------------------------------------------------

    @property
    def _flat(self) -> torch.Tensor:
        """All of its items; ForkedProcessError where a child has none of their memory."""
        self._check_here()
        return self._items

    def _check_here(self) -> None:
        if self._slab.is_absent:
            raise refused("homes in page-locked or shared RAM, which its parent keeps")

    def part(self, run: slice) -> torch.Tensor:
        """Return a run of its items, 1-D."""
        return self._flat[run]

    def whole(self) -> torch.Tensor:
        """Return all of its bytes, as a tensor with a storage of its own."""
        return self._slab.carve(0, self._flat.nbytes)

    def view(self, segment: Segment) -> torch.Tensor:
        """Return a segment's own tensor, the same object each time."""
        self._check_here()
        return self.views.segments[segment.position]

    def empty(self, segment: Segment, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return new memory for a segment's value, in the segment's strides."""
        spec = segment.spec
        return torch.empty_strided(
            spec.shape, spec.stride, dtype=dtype or self.dtype, device=self.device
        )

    def needs(self, start: int, end: int, use: PinUse) -> Iterable[tuple[Extent, PinUse]]:
        """Return the extents that items [start, end) touch, and the use of each."""
        return ()

    def runs(self, start: int, end: int, use: PinUse) -> Iterator[slice]:
        """Yield items [start, end) in runs that are pinned until the next is asked for."""
        yield slice(start, end)

    def parts(self, start: int, end: int, use: PinUse) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield items [start, end) that can be read here, with their memory, run by run."""
        return ((run, self.part(run)) for run in self.runs(start, end, use))

    def everywhere(self, start: int, end: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield items [start, end) with their memory, which is pinned already."""
        yield slice(start, end), self.part(slice(start, end))

    def lock(self, device: Device) -> None:
        """Page-lock it until `unlock`, if that may be: copies need no stages then. All of it: CUDA
        refuses to copy memory of which a part is page-locked, and users copy its tensors."""
        if self._slab.unlock is None:
            self._slab.unlock = device.lock(self._flat.view(torch.uint8), self._slab)

    def unlock(self) -> None:
        """Undo page-locking, after every copy."""
        release_slab(self._slab)

    def leave(self, successor: Home) -> None:
        """Give up its memory: its bytes have moved."""
        self.discard()
        self._successor = successor
        successor.copies.update(self.copies)
        self._items = torch.empty(0, dtype=self.item_dtype, device=self.shown_on)
        self.views.clear()
        self._slab = Slab(0, self._items)

    def take_over(self, other: Home) -> None:
        """Take the bytes of another home of the bucket, which nothing writes meanwhile."""
        for run, part in other.parts(0, self._flat.numel(), PinUse.READ):
            self._flat[run].copy_(part)
        self.rewritten()

    def crc(self) -> int | None:
        """Return a digest of all of it; None if its slots have digests."""
        return crc32(memoryview(self._flat.view(torch.uint8).numpy()))

    def discard(self) -> None:
        """Drop the content; its memory goes with its last tensor."""
        release_slab(self._slab)

    def close(self) -> None:
        release_slab(self._slab)

    # -- values ----------------------------------------------------------------------------------

    def load(self, items: slice) -> torch.Tensor:
        """Return items: its own memory if it stays, else a copy."""
        return self._flat[items]

    def own(self, items: slice) -> slice:
        """Return those of the items that this rank keeps; an empty run if there are none."""
        return items

    def to_save(self, items: slice) -> slice:
        """Return those of the items that this rank saves; an empty run if there are none."""
        return items

    def load_own(self, items: slice) -> torch.Tensor:
        """As `load`, of items that this rank keeps, whatever the others are at."""
        return self.load(items)

    def store(self, items: slice, fill: Fill) -> None:
        """Let ``fill`` write items, all in memory at once."""
        fill(self._flat[items])

    def read(self, segment: Segment) -> torch.Tensor:
        """Return a new tensor with a segment's value, in the home's dtype and strides."""
        value = self.empty(segment)
        self.codec.decode(self.load(self.items(segment.offset, segment.end)), row(value))
        return value

    def complete(self, segment: Segment, value: torch.Tensor) -> torch.Tensor:
        """Fill in what other ranks keep of a segment's value, which is dense and of any dtype."""
        return value

    def value(self, segment: Segment) -> torch.Tensor:
        """Return a segment's value: its own tensor if the home shows values, else a copy."""
        return self.view(segment) if self.shows else self.read(segment)

    def blank(self, segment: Segment) -> torch.Tensor:
        """Return a tensor in which the caller makes a segment's value, to `write` it then."""
        return self.view(segment) if self.shows else self.empty(segment)

    def write(self, segment: Segment, value: torch.Tensor) -> None:
        """Copy ``value`` (the segment's shape; any dtype and strides) into a segment."""
        if self.shows:
            self.view(segment).copy_(value)
            return
        if value.stride() != segment.spec.stride:
            same = torch.empty_strided(
                segment.spec.shape, segment.spec.stride, dtype=value.dtype, device="cpu"
            )
            value = same.copy_(value)
        self.write_run(segment, 0, row(value))

    def write_run(self, segment: Segment, start: int, values: torch.Tensor) -> None:
        """Write 1-D ``values`` (any dtype) to elements of a segment, from ``start`` on.

        ``start`` begins a block. Raises ConfigError, naming the parameter, for values that a codec
        cannot hold; the pieces before them are written then.
        """
        at = segment.offset + start
        for piece in values.detach().split(ENCODED_AT_ONCE):
            try:
                items = self.codec.encode(piece, self.dtype)
            except NotFinite:
                raise refusal(segment.spec.name, self.codec) from None
            self._put(self.codec.items(at), items)
            at += piece.numel()
        if segment in self.copies:
            self.copies[segment].show(self.read(segment))

    def _put(self, start: int, items: torch.Tensor) -> None:
        for run in self.runs(start, start + items.numel(), PinUse.FRESH):
            self.part(run).copy_(items[run.start - start : run.stop - start])

    def recode(self, start: int, values: torch.Tensor) -> None:
        """Take ``values``, 1-D and in the home's dtype, for whole blocks of a coded home.

        A block that already decodes to these very bits keeps its codes, so that reading changes
        nothing. Raises NotFinite, and nothing has changed then.
        """
        where = self.items(start, start + values.numel())
        known, before = self.load_own(where), torch.empty_like(values)
        self.codec.decode(known, before)
        width = self.codec.block * values.element_size()
        bits, those = (v.view(torch.uint8).view(-1, width) for v in (values, before))
        same = (bits == those).all(1)
        items = self.codec.encode(values, self.dtype).view(len(same), -1)
        items[same] = known.view(len(same), -1)[same]
        self._put(where.start, items.view(-1))


class HostHome(Home):
    """A home in memory: on HOST, or on the device of a model that stays there."""

    __slots__ = ()


class MovableHome(HostHome):
    """A home in RAM of a model with homes on disk. It is shown as those are, and as those on a
    device: by copies, so that it may move whatever the user's code holds."""

    __slots__ = ()

    @property
    def shows(self) -> bool:
        return False


class Pinned(Home):
    """Of homes on disk: memory holds extents that are, or were, pinned."""

    __slots__ = ()
    stays = False
    _extents: Extents
    _pool: Pool | NoPool

    def leave(self, successor: Home) -> None:
        """Drop the content, and keep the addresses and the place on disk, for `come_back`."""
        self.discard()
        self._successor = successor
        successor.copies.update(self.copies)
        self.copies.clear()

    def come_back(self) -> None:
        """Be the home again, without content."""
        self._successor = None

    def take_over(self, other: Home) -> None:
        for run in self.runs(0, self._flat.numel(), PinUse.FRESH):
            self._flat[run].copy_(other.part(run))

    def ahead(self) -> None:
        """Have all of it read, to be pinned in order."""
        runs = cut(0, self._flat.numel(), self.extent_numel)
        self._pool.ahead(Request([PinSpan(self, run.start, run.stop)]) for run in runs)

    def needs(self, start: int, end: int, use: PinUse) -> Iterable[tuple[Extent, PinUse]]:
        return self._extents.needs(start, end, use)

    def runs(self, start: int, end: int, use: PinUse) -> Iterator[slice]:
        own = self.own(slice(start, end))
        for run in cut(own.start, own.stop, self.extent_numel):
            with self._pool.pin(Request([PinSpan(self, run.start, run.stop, use)])):
                yield run

    def crc(self) -> int | None:
        return None  # its slots have digests

    def discard(self) -> None:
        self._pool.discard(self._extents)

    def load(self, items: slice) -> torch.Tensor:
        copy = torch.empty(items.stop - items.start, dtype=self.item_dtype, device="cpu")
        for run in self.runs(items.start, items.stop, PinUse.READ):
            copy[run.start - items.start : run.stop - items.start].copy_(self._flat[run])
        return copy

    def load_own(self, items: slice) -> torch.Tensor:
        return self.load(items)

    def store(self, items: slice, fill: Fill) -> None:
        stage = torch.empty(items.stop - items.start, dtype=self.item_dtype, device="cpu")
        fill(stage)
        self._put(items.start, stage)


class DiskHome(Pinned):
    """A home on disk."""

    __slots__ = ("_extents", "_pool", "extent_numel")

    def __init__(
        self,
        pool: Pool | NoPool,
        extents: Extents,
        slab: Slab,
        bucket: Bucket,
        dtype: torch.dtype,
        codec: Codec,
    ) -> None:
        super().__init__(slab, bucket, dtype, codec)
        self._pool = pool
        self._extents = extents
        self.extent_numel = pool.extent_numel


def memory_of(home: Home, segment: Segment) -> torch.Tensor | None:
    """Return the bytes of a segment's value, to read into; None if coded or not in RAM."""
    if not home.shows or home.device.type != "cpu":
        return None
    return home.part(slice(segment.offset, segment.end)).view(torch.uint8)


def cut(start: int, end: int, size: int) -> Iterator[slice]:
    """Cut [start, end) at multiples of ``size``."""
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield slice(start, stop)
        start = stop
