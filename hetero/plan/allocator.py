"""What torch's caching allocator reserves for a sequence of allocations (floor 1, policy; E13).

The replay of a trace in its order, by the rules of torch 2.13 (c10/core/AllocatorConfig.h and
CUDACachingAllocator): sizes are multiples of 512 bytes; up to 1 MiB they come from segments of 2
MiB, below 10 MiB from segments of 20 MiB, and larger ones from segments of their own, in multiples
of 2 MiB. The smallest free block that is large enough is taken and what is left of it is split off;
neighbours that are free are one block again. One stream; nothing is given back to the device.

Expandable segments: one range of addresses for small and one for large blocks, which grow at their
end by 2 and 20 MiB.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero.errors import StateError

MIB = 2**20
GRANULE = 512
SMALL_BYTES = MIB
"""The largest request that comes from the small pool."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
OWN_SEGMENT_ROUND = 2 * MIB


class Event(NamedTuple):
    """An allocation of ``n_bytes``, or, where they are 0, the end of one."""

    key: Hashable
    n_bytes: int = 0


class Reserved(NamedTuple):
    """What a replay came to."""

    peak_bytes: int
    """The most bytes reserved: what the device is asked for."""
    active_peak_bytes: int
    """The most bytes in blocks that were in use."""
    largest_free_bytes: int
    """The largest block that is free in the end."""


@dataclass(slots=True)
class _Block:
    n_bytes: int
    free: bool = True


@dataclass(slots=True)
class _Pool:
    """Segments of blocks, in the order of their addresses."""

    small: bool
    expandable: bool
    segments: list[list[_Block]] = field(default_factory=list)
    reserved_bytes: int = 0

    def take(self, n_bytes: int) -> _Block:
        """Return a block in use, from the smallest free one or a new segment."""
        fitting = [
            (block.n_bytes, i, j)
            for i, segment in enumerate(self.segments)
            for j, block in enumerate(segment)
            if block.free and block.n_bytes >= n_bytes
        ]
        _, i, j = min(fitting) if fitting else self._grow(n_bytes)
        segment = self.segments[i]
        block = segment[j]
        left = block.n_bytes - n_bytes
        if left >= GRANULE if self.small or self.expandable else left > SMALL_BYTES:
            segment.insert(j + 1, _Block(left))
            block.n_bytes = n_bytes
        block.free = False
        return block

    def _grow(self, n_bytes: int) -> tuple[int, int, int]:
        """Reserve more of the device, and return where there is a free block now."""
        if self.expandable and self.segments:
            segment = self.segments[0]
            if not segment[-1].free:
                segment.append(_Block(0))
            tail = segment[-1]
        else:
            tail = _Block(0)
            self.segments.append([tail])
        more = self._segment_bytes(n_bytes - tail.n_bytes)
        tail.n_bytes += more
        self.reserved_bytes += more
        return tail.n_bytes, len(self.segments) - 1, len(self.segments[-1]) - 1

    def _segment_bytes(self, n_bytes: int) -> int:
        unit = SMALL_SEGMENT if self.small else LARGE_SEGMENT
        if not self.small and not self.expandable and n_bytes >= OWN_SEGMENT_FROM:
            unit = OWN_SEGMENT_ROUND
        return round_up(n_bytes, unit)

    def release(self, freed: _Block) -> None:
        """Make a block free, and one with its free neighbours."""
        freed.free = True
        segment = next(s for s in self.segments if any(block is freed for block in s))
        merged: list[_Block] = []
        for block in segment:
            if merged and merged[-1].free and block.free:
                merged[-1].n_bytes += block.n_bytes
            else:
                merged.append(block)
        segment[:] = merged

    @property
    def largest_free_bytes(self) -> int:
        blocks = (block for segment in self.segments for block in segment)
        return max((block.n_bytes for block in blocks if block.free), default=0)


def replay(events: Iterable[Event], *, expandable: bool = False) -> Reserved:
    """Return what the allocator reserves for allocations and their ends, in this order.

    Raises StateError where a key is allocated twice, or ends without having begun.
    """
    small, large = _Pool(True, expandable), _Pool(False, expandable)
    held: dict[Hashable, tuple[_Pool, _Block]] = {}
    peak = active = active_peak = 0
    for key, n_bytes in events:
        if (n_bytes > 0) == (key in held):
            raise StateError(f"{key!r} is {'allocated twice' if n_bytes else 'freed unallocated'}")
        if n_bytes:
            rounded = round_up(n_bytes, GRANULE)
            pool = small if rounded <= SMALL_BYTES else large
            held[key] = pool, pool.take(rounded)
            active += held[key][1].n_bytes
        else:
            pool, block = held.pop(key)
            active -= block.n_bytes
            pool.release(block)
        peak = max(peak, small.reserved_bytes + large.reserved_bytes)
        active_peak = max(active_peak, active)
    largest_free = max(small.largest_free_bytes, large.largest_free_bytes)
    return Reserved(peak, active_peak, largest_free)


def round_up(n_bytes: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-n_bytes // multiple) * multiple
