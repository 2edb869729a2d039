"""Frames and runs: the address space of the HBM arena (floor 1, mechanism; pure Python).

An address counts frames of the 1-byte class (*granules*, ``chunk_numel`` bytes each); a chunk of
itemsize ``s`` fills ``s`` granules. A replica is one contiguous run, so parameters are plain views.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hetero.errors import StateError

Leaving = Iterable[tuple[object, int]]
"""(worth, owner) of the evictable runs, in the order of eviction."""


class FrameRun(NamedTuple):
    """Frames [start, start + length) held by one owner (a bucket id)."""

    start: int
    length: int
    owner: int

    @property
    def end(self) -> int:
        return self.start + self.length


class FramePlace(NamedTuple):
    """The address for a new run, and the owners to evict for it."""

    start: int
    evict: tuple[int, ...]


class FrameMap:
    """Maps owners to runs, and finds room for new ones."""

    __slots__ = ("_gaps", "_runs", "_starts", "_where", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._starts: list[int] = []
        self._runs: dict[int, FrameRun] = {}
        self._where: dict[int, int] = {}
        self._gaps: dict[int, list[int]] = {}  # length -> where free frames before a run begin

    @property
    def runs(self) -> list[FrameRun]:
        """Runs in address order."""
        return [self._runs[start] for start in self._starts]

    @property
    def used(self) -> int:
        return sum(run.length for run in self._runs.values())

    @property
    def end(self) -> int:
        """The first address after every run."""
        return self._end_before(len(self._starts))

    def take(self, owner: int, start: int, length: int) -> None:
        """Give [start, start + length) to ``owner``; an overlap is a StateError."""
        hit = self.overlapping(start, length)
        if hit or start < 0 or owner in self._where:
            raise StateError(f"frames {start}+{length} for bucket {owner} overlap {hit}")
        at = bisect_left(self._starts, start)
        before = self._end_before(at)
        if at < len(self._starts):
            after = self._starts[at]
            self._shut(before, after)
            self._open(start + length, after)
        self._open(before, start)
        self._runs[start] = FrameRun(start, length, owner)
        self._where[owner] = start
        self._starts.insert(at, start)

    def drop(self, owner: int) -> None:
        start = self._where.pop(owner)
        end = self._runs.pop(start).end
        at = bisect_left(self._starts, start)
        del self._starts[at]
        before = self._end_before(at)
        self._shut(before, start)
        if at < len(self._starts):
            after = self._starts[at]
            self._shut(end, after)
            self._open(before, after)

    def _end_before(self, at: int) -> int:
        """Return the end of the run before position ``at``, 0 without one."""
        return self._runs[self._starts[at - 1]].end if at else 0

    def _open(self, start: int, end: int) -> None:
        if start < end:
            insort(self._gaps.setdefault(end - start, []), start)

    def _shut(self, start: int, end: int) -> None:
        if start < end:
            starts = self._gaps[end - start]
            del starts[bisect_left(starts, start)]
            if not starts:
                del self._gaps[end - start]

    def overlapping(self, start: int, length: int) -> list[FrameRun]:
        """Return the runs that share frames with [start, start + length)."""
        at = bisect_left(self._starts, start)
        if at and self._runs[self._starts[at - 1]].end > start:
            at -= 1
        found = []
        while at < len(self._starts) and self._starts[at] < start + length:
            found.append(self._runs[self._starts[at]])
            at += 1
        return found

    def place(self, length: int, leaving: Leaving, *, high: bool = False) -> FramePlace | None:
        """Find a run of ``length`` frames whose present owners are worth least.

        Free frames come first, lowest address first (``high``: highest first). Otherwise, take
        owners from ``leaving`` until a window fits, and of the windows whose last owner has the
        same worth choose the one that evicts fewest frames.
        """
        start = self._free(length, high=high)
        if start is not None:
            return FramePlace(start, ())
        best: tuple[int, int] | None = None
        chosen = last = None
        may: set[int] = set()
        for worth, owner in leaving:
            if chosen is not None and worth != last:
                break
            last, run = worth, self._runs[self._where[owner]]
            may.add(run.start)
            for start, runs in self._windows(run, length, may, high=high):
                score = (-sum(r.length for r in runs), start if high else -start)
                if best is None or score > best:
                    best, chosen = score, FramePlace(start, tuple(r.owner for r in runs))
        return chosen

    def _free(self, length: int, *, high: bool) -> int | None:
        """Return the lowest, or the highest, start of ``length`` free frames."""
        fit = [(n, starts) for n, starts in self._gaps.items() if n >= length]
        if self.limit - self.end >= length and (high or not fit):
            return self.limit - length if high else self.end
        if high:
            return max((starts[-1] + n - length for n, starts in fit), default=None)
        return min((starts[0] for _, starts in fit), default=None)

    def _windows(
        self, run: FrameRun, length: int, may: set[int], *, high: bool
    ) -> Iterator[tuple[int, list[FrameRun]]]:
        """Yield (start, runs) of windows over ``run`` and other runs that start in ``may``."""
        first, last = self._stretch(run, length, may)
        low, top = self._end_before(first), self._start_behind(last) - length
        if run.length >= length:  # this run alone makes room
            yield (top if high else low), [run]
            return
        among = [self._runs[start] for start in self._starts[first : last + 1]]
        ends = {at for r in among for at in (r.start, r.end, r.start - length)}
        for start in {low, top, *ends}:
            if low <= start <= top and run.start - length < start < run.end:
                yield start, [r for r in among if r.start < start + length and start < r.end]

    def _stretch(self, run: FrameRun, length: int, may: set[int]) -> tuple[int, int]:
        """Return the positions of the first and last run that may leave together with ``run``,
        within the reach of a window that overlaps it."""
        starts = self._starts
        first = last = bisect_left(starts, run.start)
        if run.length >= length:
            return first, last
        while first and starts[first - 1] in may and self._end_before(first) > run.start - length:
            first -= 1
        while (behind := self._start_behind(last)) in may and behind < run.end + length:
            last += 1
        return first, last

    def _start_behind(self, at: int) -> int:
        """Return the start of the run after position ``at``, the limit without one."""
        return self._starts[at + 1] if at + 1 < len(self._starts) else self.limit
