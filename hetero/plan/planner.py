"""Prefetch and next-use eviction under the budget, from a trace (floor 1, policy; no torch).

Belady's rule with look-ahead: fetches go out in the order of next use, as early as frames permit,
and may only displace buckets that are needed later than their own. Addresses are laid out with the
runtime's frame map (handed in as ``space``).

[Note: standing inside a step]  A step that visits units again and again (micro-batches) is a cycle:
the bucket that was used last is needed last. A fetch at the earliest moment can displace only that
one, so every bucket would cross the link in every round. A fetch at the last moment, when its
access is next, displaces what Belady would: a part of the buckets stands, and the rest streams
through two frames. Hence a fetch goes out early only if its frames are free, or if they hold what
the last moment would displace as well, because it is needed after all that is used until then.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from hetero.plan.schedule import Op, Schedule, Shape
from hetero.plan.standing import may_stand, standing, window
from hetero.plan.trace import Trace

SETTLE = 8  # steps tried until residency at the border repeats

NOBODY = -1  # owner of frames that stay unused

FARTHEST = 512  # accesses to look ahead

URGENT = (FARTHEST, 4, 2, 1)  # a fetch is urgent so many accesses before the one that needs it

WORTH = 1 / 8  # more may be fetched for the sake of earlier fetches: copies and compute vary


class PlannedPlace(Protocol):
    """The address of a run, and the owners to evict for it."""

    @property
    def start(self) -> int: ...

    @property
    def evict(self) -> tuple[int, ...]: ...


class Space(Protocol):
    """The frame map, as far as planning needs it."""

    def take(self, owner: int, start: int, length: int) -> None: ...

    def drop(self, owner: int) -> None: ...

    def place(
        self, length: int, leaving: Iterable[tuple[object, int]], *, high: bool = False
    ) -> PlannedPlace | None: ...


def next_use(places: Sequence[int], after: int) -> float:
    """Return the first position beyond ``after`` in ascending ``places``, or infinity."""
    at = bisect_right(places, after)
    return places[at] if at < len(places) else math.inf


class Lap(NamedTuple):
    """A simulated step: its ops, the buckets that end away from where they began, the number of its
    fetches, its misses, and the frames filled: by all fetches, and by misses."""

    ops: tuple[tuple[Op, ...], ...]
    moved: tuple[int, ...]
    cost: int
    misses: int = 0
    granules: int = 0
    missed: int = 0

    @property
    def weight(self) -> int:
        """Frames filled; those of a miss twice, since compute waits for them."""
        return self.granules + self.missed


class LatestUse:
    """The latest next use of all accesses in a window, which moves ahead."""

    def __init__(self, trace: Trace, uses: Mapping[int, Sequence[int]]) -> None:
        self._next = [
            max((next_use(uses[bucket], at) for bucket in access.buckets), default=0.0)
            for at, access in enumerate(trace.accesses)
        ]
        self._window = (0, 0)
        self._falling: deque[int] = deque()  # accesses after which none has a later next use

    def among(self, first: int, end: int) -> float:
        """Return the latest next use of the accesses from ``first`` to before ``end``; 0 without
        any."""
        if first < self._window[0] or end < self._window[1]:
            self._window = (first, first)
            self._falling.clear()
        for at in range(max(first, self._window[1]), end):
            while self._falling and self._next[self._falling[-1]] <= self._next[at]:
                self._falling.pop()
            self._falling.append(at)
        while self._falling and self._falling[0] < first:
            self._falling.popleft()
        self._window = (first, max(first, end))
        return self._next[self._falling[0]] if self._falling else 0.0


class Planner:
    """Simulates steps over a frame map until the border repeats, and keeps the cheapest.

    Streamed buckets are placed at alternate ends, so that a pinned one leaves the other side whole
    for the next. Buckets that no update rewrites survive the border; the border's ops give the
    address of each, so that the plan can be entered from any state. If no update rewrites anything,
    look-ahead goes on beyond the border, and some buckets may stand for good
    (`hetero.plan.standing`), above the others: frames that are given up are theirs.
    """

    def __init__(
        self,
        trace: Trace,
        shapes: Mapping[int, Shape],
        space: Space,
        limit: int,
        depth: int | None = None,
    ) -> None:
        self.trace = trace
        self.shapes = shapes
        self.space = space
        self.limit = limit
        self.depth = FARTHEST if depth is None else depth
        self.uses = trace.uses()
        self.resident: dict[int, int] = {}
        self._next: dict[int, float] = {}  # next use of every resident, streamed bucket
        self._order: list[tuple[float, int]] = []  # (next use, bucket) of these, ascending
        self._near = 0.0  # all accesses up to this one have their buckets
        self._high = False
        self._cyclic = may_stand(trace, shapes)
        self._standing: tuple[int, ...] = ()
        self._urgent = FARTHEST
        self._latest = LatestUse(trace, self.uses)

    def build(self) -> Schedule:
        best = self._standing_lap() if self._cyclic else self._timely_lap()
        return Schedule(self.trace, leaving(best.ops, best.moved), self.limit)

    def _timely_lap(self) -> Lap:
        """Return the step whose fetches are urgent earliest, of those that fetch little more than
        the least: see [Note: standing inside a step]."""
        laps: list[Lap] = []
        for self._urgent in URGENT:
            laps.append(self._settled(()))
        most = (1 + WORTH) * min(lap.weight for lap in laps)
        return next(lap for lap in laps if lap.weight <= most)

    def _standing_lap(self) -> Lap:
        """Return the cheapest step with a set of standing buckets."""
        laps: list[Lap] = []
        for stand in standing(self.trace, self.shapes, self.limit):
            # also try one bucket fewer: with an even number of fetches the two ends alternate back
            # to their start
            for some in (stand, *(stand[:i] + stand[i + 1 :] for i in (0, len(stand) - 1)), ()):
                laps.append(self._settled(some))
                if not laps[-1].misses and not laps[-1].moved:
                    break
        return min(laps, key=lambda lap: (lap.misses, lap.granules))

    def _settled(self, stand: tuple[int, ...]) -> Lap:
        """Return the step that repeats, with these buckets standing.

        They stand above the window of the rest, which alternates between its two ends; so their
        first addresses are the same for any number of frames.
        """
        self._update(everything=True)
        self._standing = stand
        at = window(self.trace, self.shapes, {*stand}) if stand else self.limit
        for bucket in stand:
            self.space.take(bucket, at, self.shapes[bucket].granules)
            self.resident[bucket] = at
            at += self.shapes[bucket].granules
        if at < self.limit:
            self.space.take(NOBODY, at, self.limit - at)
        best = self._lap()
        for _ in range(SETTLE):
            if not best.moved:
                break
            best = min(best, self._lap(), key=lambda lap: lap.cost)
        if at < self.limit:
            self.space.drop(NOBODY)
        return best

    def _lap(self) -> Lap:
        """Simulate a step from the present residency, and its cost with a return to the start."""
        survivors = dict(self.resident)
        ops = self._step(survivors)
        self._update()
        moved = tuple(sorted(b for b, at in self.resident.items() if survivors.get(b) != at))
        again = sum(1 for b, at in survivors.items() if self.resident.get(b) != at)
        fetched = [op for row in ops for op in row][len(survivors) :]
        return Lap(
            ops,
            moved,
            sum(len(row) for row in ops) - len(survivors) + again,
            sum(op.demand for op in fetched),
            sum(self.shapes[b].granules for b in (*(op.bucket for op in fetched), *moved)),
            sum(self.shapes[op.bucket].granules for op in fetched if op.demand),
        )

    def _step(self, survivors: Mapping[int, int]) -> tuple[tuple[Op, ...], ...]:
        self._high, self._near = False, 0.0
        self._rank(survivors, -1)
        border = tuple(Op(bucket, start) for bucket, start in sorted(survivors.items()))
        ops = [border + self._look_ahead(-1, ())]
        for point, access in enumerate(self.trace.accesses):
            self._rank(access.buckets, point)
            demand = self._demand(point, access.buckets)
            ops.append(demand + self._look_ahead(point, access.buckets))
        return tuple(ops)

    def _update(self, *, everything: bool = False) -> None:
        for bucket in sorted(self.resident):
            if everything or self.shapes[bucket].rewritten:
                self._drop(bucket)

    def _take(self, bucket: int, start: int, point: int) -> None:
        self.space.take(bucket, start, self.shapes[bucket].granules)
        self.resident[bucket] = start
        use = self._next[bucket] = self._next_use(bucket, point)
        insort(self._order, (use, bucket))

    def _drop(self, bucket: int) -> None:
        self.space.drop(bucket)
        del self.resident[bucket]
        use = self._next.pop(bucket, None)
        if use is not None:
            del self._order[bisect_left(self._order, (use, bucket))]
            self._near = min(self._near, use)

    def _rank(self, buckets: Iterable[int], point: int) -> None:
        """Recompute the next uses of buckets after a point."""
        for bucket in buckets:
            use = self._next.get(bucket)
            if use is not None:
                del self._order[bisect_left(self._order, (use, bucket))]
                use = self._next[bucket] = self._next_use(bucket, point)
                insort(self._order, (use, bucket))

    def _demand(self, point: int, needed: Sequence[int]) -> tuple[Op, ...]:
        """Fetch the buckets that look-ahead could not; if frames are too scattered, empty them."""
        missing = [b for b in dict.fromkeys(needed) if b not in self.resident]
        if not missing:
            return ()
        gone = tuple(sorted(self.resident))
        ops = [self._fetch(bucket, point, needed, deadline=-1) for bucket in missing]
        if None not in ops:
            return tuple(op._replace(demand=True) for op in ops if op)
        self._update(everything=True)
        again = [self._fetch(b, point, needed, deadline=-1) for b in dict.fromkeys(needed)]
        placed = [op._replace(demand=True) for op in again if op]
        return (placed[0]._replace(evict=gone), *placed[1:]) if placed else ()

    def _look_ahead(self, point: int, pinned: Sequence[int]) -> tuple[Op, ...]:
        ops: list[Op] = []
        n = len(self.trace.accesses)
        last = point + 1 + min(self.depth, n) if self._cyclic else min(n, point + 1 + self.depth)
        for ahead in range(max(point + 1, int(self._near)), last):
            self._near = ahead
            for bucket in self.trace.accesses[ahead % n].buckets:
                if bucket in self.resident:
                    continue
                op = self._fetch(bucket, point, pinned, deadline=ahead)
                if op is None:
                    return tuple(ops)
                ops.append(op)
        self._near = max(self._near, last)
        return tuple(ops)

    def _fetch(self, bucket: int, point: int, pinned: Sequence[int], *, deadline: int) -> Op | None:
        granules = self.shapes[bucket].granules
        place = self.space.place(granules, self._leaving(point, pinned, deadline), high=self._high)
        if place is None:
            return None
        for owner in place.evict:
            self._drop(owner)
        self._take(bucket, place.start, point)
        self._high = not self._high
        return Op(bucket, place.start, place.evict)

    def _leaving(
        self, point: int, pinned: Sequence[int], deadline: int
    ) -> Iterator[tuple[object, int]]:
        """Yield buckets needed later than a deadline, last first; before it is urgent, only those
        that will be needed last when it is."""
        latest = self._latest.among(max(point, 0), deadline - self._urgent)
        for use, bucket in reversed(self._order):
            if use <= deadline or use < latest:
                return
            if bucket not in pinned:
                yield use, bucket

    def _next_use(self, bucket: int, point: int) -> float:
        """Return the next position; of the next step too, for buckets that survive the update."""
        places = self.uses.get(bucket, ())
        use = next_use(places, point)
        if math.isinf(use) and places and not self.shapes[bucket].rewritten:
            return len(self.trace.accesses) + places[0]
        return use


def leaving(ops: tuple[tuple[Op, ...], ...], gone: tuple[int, ...]) -> tuple[tuple[Op, ...], ...]:
    """Let the first op of a step also evict the last step's ``gone`` buckets, its own included."""
    for point, row in enumerate(ops):
        if row:
            first = row[0]._replace(evict=tuple(dict.fromkeys((*row[0].evict, *gone))))
            return (*ops[:point], (first, *row[1:]), *ops[point + 1 :])
    return ops
