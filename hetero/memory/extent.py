"""Extents: the units in which homes on disk are read and written (floor 1, mechanism).

An *extent* is a fixed number of elements of a bucket's index space, the same for every kind, so an
update pins the same run of all kinds.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple, Protocol

from hetero.memory.nvme import DiskSlot


class PinUse(IntEnum):
    """The purpose of a pinned span."""

    READ = 0
    WRITE = 1
    FRESH = 2
    """Every element will be written: the old content is not read."""


class Extent:
    """One run of a home: its memory, its slot, its pins."""

    __slots__ = (
        *("blank", "error", "id", "mapping", "n_bytes", "page", "pins", "slot", "stored"),
        *("turn", "used_at", "view"),
    )

    def __init__(
        self, id: int, mapping: mmap.mmap | None, page: int, n_bytes: int, slot: DiskSlot
    ) -> None:
        self.id = id
        self.mapping = mapping
        self.page = page  # first byte in its mapping
        self.n_bytes = n_bytes
        self.view = memoryview(b"" if mapping is None else mapping)[page : page + n_bytes]
        self.slot = slot
        self.stored = False  # whether the slot has the content; if not, it reads as zeros
        self.blank = False  # whether a FRESH pin has not finished writing it
        self.pins = 0
        self.used_at = 0
        self.turn = 0  # of its last use, among those in memory
        self.error: BaseException | None = None


class Extents:
    """The extents of one home, in order: of ``size`` items each, but for the ends of those ``kept``
    here."""

    __slots__ = ("_first", "_kept", "_size", "all")

    def __init__(self, extents: list[Extent], size: int, kept: slice) -> None:
        self.all = extents
        self._size = size
        self._kept = kept
        self._first = kept.start // size

    def needs(self, start: int, end: int, use: PinUse) -> Iterator[tuple[Extent, PinUse]]:
        """Yield the extents that elements [start, end) touch, and the use of each."""
        if end <= start:
            return
        for at in range(start // self._size, (end - 1) // self._size + 1):
            first = max(at * self._size, self._kept.start)
            last = min((at + 1) * self._size, self._kept.stop)
            part = use is PinUse.FRESH and not (start <= first and last <= end)
            yield self.all[at - self._first], PinUse.WRITE if part else use


class HasExtents(Protocol):
    """Elements that may lie in extents."""

    def needs(self, start: int, end: int, use: PinUse) -> Iterable[tuple[Extent, PinUse]]:
        """Return the extents that elements [start, end) touch, and the use of each."""


class PinSpan(NamedTuple):
    """Elements [start, end) of a home."""

    home: HasExtents
    start: int
    end: int
    use: PinUse = PinUse.READ


class Request:
    """Spans that are pinned together, and may be announced first."""

    __slots__ = ("asked_at", "n_bytes", "needs")

    def __init__(self, spans: Iterable[PinSpan]) -> None:
        self.needs: dict[Extent, PinUse] = {}
        self.asked_at = 0
        for span in spans:
            for extent, use in span.home.needs(span.start, span.end, span.use):
                self.needs[extent] = use if self.needs.get(extent, use) is use else PinUse.WRITE
        self.n_bytes = sum(extent.n_bytes for extent in self.needs)

    def again(self) -> Request:
        """Return the same work's next request; extents it only reads differ each time."""
        request = Request(())
        changed = (extent for extent, use in self.needs.items() if use is not PinUse.READ)
        request.needs = dict.fromkeys(changed, PinUse.WRITE)
        request.n_bytes = sum(extent.n_bytes for extent in request.needs)
        return request


def overlap(first: slice, second: slice) -> slice:
    """Return what two runs have in common; an empty one lies inside the first."""
    start = min(max(first.start, second.start), first.stop)
    return slice(start, max(start, min(first.stop, second.stop)))
