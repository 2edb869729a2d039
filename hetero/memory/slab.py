"""Homes: where every parameter's authoritative bytes live (floor 1, mechanism).

On HOST a home is one slab per kind and bucket, exactly sized and page-locked on CUDA. Every segment
of a slab is its own storage, so that saving a state dict writes a tensor's bytes and not its
neighbours'. A home on NVME has the same views, which mean something while they are pinned (see
[Note: addresses stay] in pool.py); `HomeStore.held` and `runs` cost nothing for one on HOST. A home
of parameters that are coded (codec.py) counts in items of the codec, and has no views of values.

[Note: copies that are shown]  A home on disk, or in code, cannot be aliased. A view of one of its
segments is a view of a private copy, which stands for the segment while a view is alive: what was
written to it goes home before anything reads or writes the home, and what the home is given the
copy is given too. Bits are compared, by their digest: numpy and ``.data`` move no version.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b

import torch

from hetero.device import ALONE, Device, Slab, release_slab, use_count
from hetero.errors import ConfigError
from hetero.io import align_up
from hetero.memory.codec import ENCODED_AT_ONCE, EXACT, Codec, NotFinite, is_finite
from hetero.memory.layout import Bucket, Segment
from hetero.memory.ledger import Ledger
from hetero.memory.pool import Extents, Pool, Request, Span, Use
from hetero.types import Kind, Tier


class Copy:
    """What stands for a segment of a home that cannot be aliased; dense, on HOST."""

    __slots__ = ("_digest", "value")

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self._digest = self._now()

    @property
    def held(self) -> bool:
        """Whether an alias of it is alive."""
        return use_count(self.value) > ALONE

    @property
    def written(self) -> bool:
        """Whether it is not what was shown last."""
        return self._now() != self._digest

    def show(self, value: torch.Tensor) -> None:
        """Become another value."""
        self.value.copy_(value)
        self._digest = self._now()

    def _now(self) -> bytes:
        flat = torch.as_strided(self.value, (self.value.numel(),), (1,)).view(torch.uint8)
        return blake2b(memoryview(flat.numpy()), digest_size=16).digest()


class Home:
    """One kind of one bucket: flat, by bytes, and by segment.

    ``extents`` are those of a home on NVME, None on HOST. Where ``codec`` is not exact, ``flat`` is
    of its items, and segments are of the right shape and dtype but one NaN.
    """

    __slots__ = (
        *("_baseline", "_slab", "bytes", "codec", "copies", "dtype", "extents", "flat"),
        "segments",
    )

    def __init__(
        self,
        slab: Slab,
        bucket: Bucket,
        dtype: torch.dtype,
        extents: Extents | None = None,
        codec: Codec = EXACT,
    ) -> None:
        self._slab = slab
        self.extents = extents
        self.codec = codec
        self.dtype = dtype
        self.copies: dict[Segment, Copy] = {}  # see [Note: copies that are shown]
        self.bytes = slab.carve(0, codec.n_bytes(bucket.numel, dtype))
        self.flat = self.bytes.view(codec.dtype(dtype))
        self.segments = [
            shaped(
                slab, s.offset * dtype.itemsize, s.spec.shape, s.spec.stride, s.spec.numel, dtype
            )
            if codec.exact
            else self.bytes.new_full((), float("nan"), dtype=dtype).expand(s.spec.shape)
            for s in bucket.segments
        ]
        self._baseline = sum(use_count(segment) for segment in self.segments)

    @property
    def shows(self) -> bool:
        """Whether segments always show the values: they are in memory, and as they are."""
        return self.extents is None and self.codec.exact

    def items(self, start: int, end: int) -> slice:
        """Return elements [start, end) of the bucket, where ``start`` begins a block, in items."""
        return slice(self.codec.items(start), self.codec.items(end))

    @property
    def held(self) -> bool:
        """Whether the user's code refers to a segment."""
        return sum(use_count(segment) for segment in self.segments) > self._baseline

    @property
    def objects_held(self) -> bool:
        """Whether a segment's very object is referred to by more than one dict of ours."""
        return any(sys.getrefcount(segment) > _OURS for segment in self.segments)

    def close(self) -> None:
        release_slab(self._slab)


def _references() -> int:
    """Return the references to a segment that a state dict has and nobody else (it differs
    between releases of Python)."""
    segments = [object()]
    state = {"key": segments[0]}
    counts = [sys.getrefcount(segment) for segment in segments]
    return counts[0] if state else 0


_OURS = _references()


def shaped(
    slab: Slab,
    offset_bytes: int,
    shape: Sequence[int],
    stride: Sequence[int],
    numel: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return part of a slab as a tensor of the given geometry, with a storage of its own."""
    piece = slab.carve(offset_bytes, numel * dtype.itemsize).view(dtype)
    return torch.as_strided(piece, tuple(shape), tuple(stride))


class HomeStore:
    """Makes homes under their tier's budget and keeps them: ``homes[kind name, bucket id]``.

    With ``resident`` the homes are on the device, otherwise on HOST, or on NVME where ``on_disk``
    says so of a kind and a bucket.
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
        self._parked: dict[tuple[str, int], Home] = {}  # homes on NVME without content
        self._names: list[str] = []  # ascending
        self.pool = pool
        self.homes: dict[tuple[str, int], Home] = {}
        self.before_use: Callable[[], None] = _nothing  # the user's code reads or writes a state

    @property
    def tier(self) -> Tier:
        """Where the homes are that are not on disk."""
        return Tier.HBM if self._resident else Tier.HOST

    def get(self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype | None = None) -> Home:
        """Return the home of ``name`` (a parameter kind or a state's key), made when missing."""
        home = self.homes.get((name, bucket.id))
        if home is None:
            dtype = dtype or bucket.dtype
            codec = bucket.codec if kind is Kind.PARAM else EXACT
            spilled = self.pool is not None and self._on_disk(kind, bucket.id)
            make = self._on_nvme if spilled else self._in_memory
            home = self.homes[name, bucket.id] = make(kind, name, bucket, dtype, codec)
            if name not in self._names:
                insort(self._names, name)
        return home

    def _in_memory(
        self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype, codec: Codec
    ) -> Home:
        n_bytes = codec.n_bytes(bucket.numel, dtype)
        self._ledger.charge(self.tier, kind, n_bytes, f"{name} of bucket {bucket.id}")
        self._charged[name, bucket.id] = (kind, n_bytes)
        make = self._device.arena if self._resident else self._device.slab
        return Home(make(n_bytes), bucket, dtype, codec=codec)

    def _on_nvme(
        self, kind: Kind, name: str, bucket: Bucket, dtype: torch.dtype, codec: Codec
    ) -> Home:
        parked = self._parked.pop((name, bucket.id), None)
        if parked is not None or self.pool is None:
            return parked or self._in_memory(kind, name, bucket, dtype, codec)
        n_bytes = codec.n_bytes(bucket.numel, dtype)
        slab = self._device.paged_slab(align_up(n_bytes))
        what = f"{name} of bucket {bucket.id}"
        extents = self.pool.adopt(kind, slab, n_bytes, codec.dtype(dtype).itemsize, what)
        return Home(slab, bucket, dtype, extents, codec)

    def of_bucket(self, bucket_id: int) -> Iterator[tuple[str, Home]]:
        """Yield the homes of one bucket with their names."""
        for name in self._names:
            home = self.homes.get((name, bucket_id))
            if home is not None:
                yield name, home

    def request(self, *spans: Span) -> Request | None:
        """Return what has to be pinned of spans; None where all of it is on HOST."""
        if self.pool is None or all(span.home.extents is None for span in spans):
            return None
        return Request(spans)

    def held(self, request: Request | None) -> AbstractContextManager[None]:
        """Hold what a request names in memory for the length of a block (see `Pool.pin`)."""
        if request is None or self.pool is None:
            return _NOTHING
        return self.pool.pin(request)

    def runs(self, start: int, end: int, *uses: tuple[Home, Use]) -> Iterator[slice]:
        """Yield [start, end), in items of the homes, in runs that are pinned in all of them until
        the next is asked for."""
        if self.pool is None or all(home.extents is None for home, _ in uses):
            yield slice(start, end)
            return
        size = self.pool.extent_numel
        while start < end:
            stop = min(end, (start // size + 1) * size)
            with self.pool.pin(Request(Span(home, start, stop, use) for home, use in uses)):
                yield slice(start, stop)
            start = stop

    def read(self, home: Home, segment: Segment) -> torch.Tensor:
        """Return a tensor of its own with a segment's value, in the home's dtype and strides."""
        spec, place = segment.spec, home.flat.device
        value = torch.empty_strided(spec.shape, spec.stride, dtype=home.dtype, device=place)
        flat = torch.as_strided(value, (value.numel(),), (1,))
        home.codec.decode(self._items(home, home.items(segment.offset, segment.end)), flat)
        return value

    def _items(self, home: Home, where: slice) -> torch.Tensor:
        """Return items of a home: themselves where they are in memory, else a copy."""
        if home.extents is None:
            return home.flat[where]
        copy = torch.empty(where.stop - where.start, dtype=home.flat.dtype)
        for run in self.runs(where.start, where.stop, (home, Use.READ)):
            copy[run.start - where.start : run.stop - where.start].copy_(home.flat[run])
        return copy

    def alias(self, home: Home, segment: Segment) -> torch.Tensor:
        """Return an alias of a segment's copy, made where there is none yet."""
        if segment not in home.copies:
            with torch.inference_mode(False):  # it outlives the user's mode
                home.copies[segment] = Copy(self.read(home, segment))
        return home.copies[segment].value.detach()

    def written(self, home: Home, *, held: bool = True) -> list[Segment]:
        """Return the segments whose copies were written; other copies that are not held go.

        Without ``held`` the copies that somebody holds are not looked at.
        """
        for segment, copy in list(home.copies.items()):
            if not (copy.held or copy.written):
                del home.copies[segment]
        return [s for s, copy in home.copies.items() if (held or not copy.held) and copy.written]

    def take(self, home: Home, segment: Segment) -> None:
        """Write home what was written to a segment's copy, which then shows what became of it.

        Raises ConfigError, with the write undone, for values that a codec cannot hold.
        """
        value = home.copies[segment].value
        if home.codec.exact:
            self.write(home, segment, value)
            return
        finite = is_finite(value)
        if finite:
            whole = torch.zeros(
                -(-value.numel() // home.codec.block) * home.codec.block, dtype=value.dtype
            )
            whole[: value.numel()] = torch.as_strided(value, (value.numel(),), (1,))
            self.recode(home, segment.offset, whole)
        home.copies[segment].show(self.read(home, segment))
        if not finite:
            raise refusal(segment, home.codec)

    def refresh(self, home: Home) -> None:
        """A home was written: let its copies show that, except those that were written too."""
        for segment, copy in home.copies.items():
            if not copy.written:
                copy.show(self.read(home, segment))

    def take_all(self, *, held: bool = True) -> None:
        """Write home what was written to copies of anything but parameters (see `written`)."""
        for (name, _), home in self.homes.items():
            if home.copies and name != Kind.PARAM.value:
                for segment in self.written(home, held=held):
                    self.take(home, segment)

    def write(self, home: Home, segment: Segment, value: torch.Tensor) -> None:
        """Copy ``value`` (the segment's shape; any dtype and strides) into a segment."""
        if home.shows:
            home.segments[segment.position].copy_(value)
            return
        if value.stride() != segment.spec.stride:
            same = torch.empty_strided(segment.spec.shape, segment.spec.stride, dtype=value.dtype)
            value = same.copy_(value)
        self.write_run(home, segment, 0, torch.as_strided(value, (value.numel(),), (1,)))

    def write_run(self, home: Home, segment: Segment, start: int, values: torch.Tensor) -> None:
        """Write 1-D ``values`` (any dtype) to elements of a segment, from ``start`` on.

        ``start`` begins a block. Raises ConfigError, naming the parameter, for values that a codec
        cannot hold; what came before them is written then.
        """
        at = segment.offset + start
        for piece in values.detach().split(ENCODED_AT_ONCE):
            try:
                items = home.codec.encode(piece, home.dtype)
            except NotFinite:
                raise refusal(segment, home.codec) from None
            self._put(home, home.codec.items(at), items)
            at += piece.numel()
        if segment in home.copies:
            home.copies[segment].show(self.read(home, segment))

    def _put(self, home: Home, start: int, items: torch.Tensor) -> None:
        for run in self.runs(start, start + items.numel(), (home, Use.FRESH)):
            home.flat[run].copy_(items[run.start - start : run.stop - start])

    def recode(self, home: Home, start: int, values: torch.Tensor) -> None:
        """Take ``values``, 1-D and in the home's dtype, for whole blocks of a coded home.

        A block that stands for these very bits stays as it is: what was only looked at has the
        codes that it had. Raises NotFinite, and nothing has changed then.
        """
        where = home.items(start, start + values.numel())
        known, before = self._items(home, where), torch.empty_like(values)
        home.codec.decode(known, before)
        width = home.codec.block * values.element_size()
        bits, those = (v.view(torch.uint8).view(-1, width) for v in (values, before))
        same = (bits == those).all(1)
        items = home.codec.encode(values, home.dtype).view(len(same), -1)
        items[same] = known.view(len(same), -1)[same]
        self._put(home, where.start, items.view(-1))

    def drop(self, name: str, bucket_id: int) -> None:
        """Let one home go; its memory goes when its last tensor does."""
        home = self.homes.pop((name, bucket_id), None)
        if home is None:
            return
        if home.extents is not None and self.pool is not None:
            self.pool.discard(home.extents)
            self._parked[name, bucket_id] = home
            return
        home.close()
        self._ledger.credit(self.tier, *self._charged.pop((name, bucket_id)))

    def close(self) -> None:
        """Let all homes go."""
        for home in self.homes.values():
            home.close()
        self.homes.clear()
        self._parked.clear()
        if self.pool is not None:
            self.pool.close()


def refusal(segment: Segment, codec: Codec) -> ConfigError:
    """Return the error for a parameter that a codec cannot hold."""
    return ConfigError(
        f"parameter {segment.spec.name!r} has weights that are NaN or infinite, which"
        f" frozen={codec.name!r} cannot hold",
        advice="repair the weights, or name its module in keep_exact=",
    )


def _nothing() -> None: ...


_NOTHING: AbstractContextManager[None] = nullcontext()
