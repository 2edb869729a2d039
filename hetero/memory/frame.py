"""Frames and runs: the address space of the HBM arena (floor 1, mechanism; pure Python).

An address is a frame of the 1-byte class (a *granule*, ``chunk_numel`` bytes); a chunk of itemsize
``s`` fills ``s`` of them. A replica is one contiguous run, so that parameters are plain views.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

from hetero.errors import StateError

Worth = Callable[[int], "tuple[float, float] | None"]


class Run(NamedTuple):
    """Frames [start, start + length) held by one owner (a bucket id)."""

    start: int
    length: int
    owner: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Place(NamedTuple):
    """Where a new run can go, and who has to leave for it."""

    start: int
    evict: tuple[int, ...]


class FrameMap:
    """Which owner holds which run; finds room for a new one."""

    __slots__ = ("_runs", "_starts", "_where", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._starts: list[int] = []
        self._runs: dict[int, Run] = {}
        self._where: dict[int, int] = {}

    @property
    def runs(self) -> list[Run]:
        """Runs in address order."""
        return [self._runs[start] for start in self._starts]

    @property
    def used(self) -> int:
        return sum(run.length for run in self._runs.values())

    @property
    def end(self) -> int:
        """The first address behind every run."""
        return self._runs[self._starts[-1]].end if self._starts else 0

    def take(self, owner: int, start: int, length: int) -> None:
        """Give [start, start + length) to ``owner``; an overlap is a StateError."""
        hit = self.overlapping(start, length)
        if hit or start < 0 or owner in self._where:
            raise StateError(f"frames {start}+{length} for bucket {owner} overlap {hit}")
        self._runs[start] = Run(start, length, owner)
        self._where[owner] = start
        insort(self._starts, start)

    def drop(self, owner: int) -> None:
        """Free the run of ``owner``."""
        start = self._where.pop(owner)
        del self._runs[start]
        self._starts.pop(bisect_left(self._starts, start))

    def overlapping(self, start: int, length: int) -> list[Run]:
        """Return the runs that share frames with [start, start + length)."""
        at = bisect_left(self._starts, start)
        if at and self._runs[self._starts[at - 1]].end > start:
            at -= 1
        found = []
        while at < len(self._starts) and self._starts[at] < start + length:
            found.append(self._runs[self._starts[at]])
            at += 1
        return found

    def place(self, length: int, worth: Worth, *, high: bool = False) -> Place | None:
        """Find a run of ``length`` frames whose present owners are worth least.

        ``worth(owner)`` is how far away the owner's next use is (larger: evict rather), or None
        when the owner may not leave. Free frames come first, lowest address first (``high``:
        highest first); then the window whose nearest next use is furthest away, then the one that
        evicts fewest frames.
        """
        starts = {0, self.limit - length}
        for run in self._runs.values():
            starts.update((run.start, run.end, run.start - length))
        best: tuple[tuple[float, float], int, int] | None = None
        chosen: Place | None = None
        for start in sorted(starts, reverse=high):
            if start < 0 or start + length > self.limit:
                continue
            runs = self.overlapping(start, length)
            if not runs:
                return Place(start, ())
            values = [worth(run.owner) for run in runs]
            if any(value is None for value in values):
                continue
            least = min(v for v in values if v is not None)
            score = (least, -sum(r.length for r in runs), start if high else -start)
            if best is None or score > best:
                best, chosen = score, Place(start, tuple(run.owner for run in runs))
        return chosen
