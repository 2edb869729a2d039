"""Memory that extents share: residents, their states, and eviction (floor 1, mechanism).

[Note: addresses stay]  A home on disk has its whole range of addresses for life, and memory only
for resident extents: an extent is read into its place, and its pages are given back when it is
evicted. Views of such a home therefore always exist, and are valid only while they are pinned. (The
technique is vmcache's: Leis et al., SIGMOD 2023.)
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from functools import partial

from hetero.device import POISON
from hetero.io import align_up
from hetero.memory.chunk import CopyTable
from hetero.memory.extent import Extent, PinUse, Request
from hetero.memory.leaving import Leaving
from hetero.types import CopyState, Tier

AHEAD_SHARE = 3  # 1/3 of the pool may hold extents read ahead
ABSENT, FILLING, CLEAN, DIRTY, FLUSHING = CopyState


class Window:
    """Announced requests, and the extents kept in memory for the first of them; ``on_release`` is
    told of each that is kept no more."""

    __slots__ = ("_kept", "_on_release", "kept_bytes", "n_bytes", "requests")

    def __init__(self, n_bytes: int, on_release: Callable[[Extent], None]) -> None:
        self.n_bytes = n_bytes
        self._on_release = on_release
        self.requests: deque[Request] = deque()
        self.kept_bytes = 0
        self._kept: OrderedDict[Extent, int] = OrderedDict()  # since when

    def __contains__(self, extent: object) -> bool:
        return extent in self._kept

    def keep(self, extent: Extent, now: int) -> None:
        """Keep an extent that is in memory, or coming, until it is used."""
        if extent not in self._kept:
            self._kept[extent] = now
            self.kept_bytes += extent.n_bytes

    def let_go(self, extent: Extent) -> None:
        if self._kept.pop(extent, None) is not None:
            self.kept_bytes -= extent.n_bytes
            self._on_release(extent)

    def let_go_before(self, then: int) -> None:
        """Stop keeping extents that no pin has used for too long."""
        while self._kept:
            extent, since = next(iter(self._kept.items()))
            if since >= then:
                return
            self.let_go(extent)

    def let_go_last(self) -> bool:
        """Stop keeping the extent that would be used last; False if none is kept."""
        if not self._kept:
            return False
        self.let_go(next(reversed(self._kept)))
        return True


class PageCache:
    """Memory of ``n_bytes``; ``checked`` poisons extents that leave it."""

    def __init__(self, n_bytes: int, *, checked: bool) -> None:
        self.n_bytes = n_bytes
        self.checked = checked
        self.table = CopyTable(0, home=Tier.NVME, what="extent")
        self.peak = 0
        self.bytes = dict.fromkeys(CopyState, 0)  # of the extents in each state
        self.resident: set[Extent] = set()
        self.clock = 0  # counts pins, and bytes brought in
        self.window = Window(n_bytes // AHEAD_SHARE, self._list)
        self.later = Window(n_bytes // AHEAD_SHARE, self._list)
        self._turn = 0  # of the most recent use
        self._leaving = {s: Leaving(partial(self._is_loose, s)) for s in (CLEAN, DIRTY)}

    def add(self, n_bytes: int) -> int:
        """Add an extent that is only on disk; returns its number."""
        self.bytes[ABSENT] += n_bytes
        return self.table.extend(1)

    @property
    def used(self) -> int:
        """Bytes of the resident extents."""
        return sum(self.bytes.values()) - self.bytes[ABSENT]

    def state(self, extent: Extent) -> CopyState:
        return self.table.state(extent.id, Tier.HOST)

    def is_unread(self, extent: Extent) -> bool:
        """Whether its content is only on disk."""
        return extent.stored and self.state(extent) is ABSENT

    def move(self, extent: Extent, state: CopyState, why: str) -> None:
        """Change an extent's state, or raise StateError."""
        old = self.state(extent)
        self.table.transition(extent.id, Tier.HOST, state, why)
        self.bytes[old] -= extent.n_bytes
        self.bytes[state] += extent.n_bytes
        self._list(extent)

    def touch(self, extent: Extent) -> None:
        """Make an extent that is in memory the most recently used."""
        if extent in self.resident:
            self._turn += 1
            extent.turn = self._turn
            self._list(extent)

    def enter(self, extent: Extent, use: PinUse) -> bool:
        """Give an extent memory; returns whether its content has to be read."""
        self.move(extent, FILLING, "fetch")
        self.resident.add(extent)
        self.touch(extent)
        self.peak = max(self.peak, self.used)
        self.clock += extent.n_bytes
        extent.error = None
        extent.blank = use is PinUse.FRESH
        if extent.stored and not extent.blank:
            return True
        if self.checked and not extent.blank:
            extent.view[:] = bytes(extent.n_bytes)
        self.move(extent, CLEAN, "ready")
        return False

    def leave(self, extent: Extent, why: str) -> None:
        """Take an extent's memory back."""
        self.move(extent, ABSENT, why)
        self.resident.remove(extent)
        self.let_go(extent)
        extent.blank = False
        if self.checked:  # a read without a pin shows NaN
            extent.view[:] = bytes([POISON]) * extent.n_bytes
        elif extent.mapping is not None:
            extent.mapping.madvise(mmap.MADV_DONTNEED, extent.page, extent.n_bytes)

    # -- room ------------------------------------------------------------------------------------

    def missing(self, request: Request) -> int:
        """Return the bytes of a request that are not resident."""
        return sum(e.n_bytes for e in request.needs if self.state(e) is ABSENT)

    def short(self, n_bytes: int) -> int:
        """Return the bytes missing for ``n_bytes`` of room after all writes under way."""
        return n_bytes - (self.n_bytes - self.used) - self.bytes[FLUSHING]

    def loose(self, state: CopyState, keep: Container[Extent], n_bytes: int) -> list[Extent]:
        """Return extents in a state, least recently used first, of ``n_bytes`` in total, or all.
        None of them is pinned, kept, or in ``keep``."""
        return self._leaving[state].first(n_bytes, keep)

    def _is_loose(self, state: CopyState, extent: Extent) -> bool:
        held = extent.pins or self.is_kept(extent)
        return not held and self.state(extent) is state

    def _list(self, extent: Extent) -> None:
        """Let an extent that nothing holds leave, when its turn comes."""
        leaving = self._leaving.get(self.state(extent))
        if leaving is not None and not extent.pins and not self.is_kept(extent):
            leaving.add(extent)

    def evict(self, n_bytes: int, keep: Container[Extent]) -> bool:
        """Evict clean extents until ``n_bytes`` are free; if that cannot be, evict none."""
        short = n_bytes - (self.n_bytes - self.used)
        if short <= 0:
            return True
        leaving = self.loose(CLEAN, keep, short)
        if sum(extent.n_bytes for extent in leaving) < short:
            return False
        for extent in leaving:
            self.leave(extent, "evict")
        return True

    # -- extents kept for announced requests -----------------------------------------------------

    def let_go(self, extent: Extent) -> None:
        """Stop keeping an extent: it is used, or gone."""
        self.window.let_go(extent)
        self.later.let_go(extent)

    def is_kept(self, extent: Extent) -> bool:
        """Whether an extent is kept for an announced request."""
        return extent in self.window or extent in self.later

    def due(self, request: Request) -> list[Extent]:
        """Return the extents of a request that still have to be kept, or read, for it."""
        return [e for e, use in request.needs.items() if self._is_due(e, use, request)]

    def _is_due(self, extent: Extent, use: PinUse, request: Request) -> bool:
        if use is PinUse.FRESH or self.is_kept(extent) or extent.used_at > request.asked_at:
            return False  # pinned since it was announced: that may have been this very use
        return extent.stored or self.state(extent) is not ABSENT


def ask_for_pages(mapping: mmap.mmap, first: int, n_bytes: int, huge_bytes: int) -> None:
    """Ask for huge pages at the beginning of a home, and for small ones after them.

    A huge page within one extent makes transfers of few long runs (measured: twice as fast) and is
    cheap to give back; one across two extents would stay when one of them goes.
    """
    try:
        if huge_bytes:
            mapping.madvise(mmap.MADV_HUGEPAGE, first, huge_bytes)
        if huge_bytes < n_bytes:
            rest = align_up(n_bytes) - huge_bytes
            mapping.madvise(mmap.MADV_NOHUGEPAGE, first + huge_bytes, rest)
    except (OSError, AttributeError):  # a kernel built without them
        pass
