"""Prefetch and next-use eviction under the budget, from a trace (floor 1, policy; no torch).

Belady's rule with look-ahead: fetches go out in the order of next use, as early as frames can be
had, and a fetch may displace only what is needed later than itself. The planner lays out addresses,
not only bytes, with the frame map that the runtime uses (handed in as ``space``).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from hetero.plan.schedule import Op, Schedule, Shape
from hetero.plan.standing import may_stand, standing, window
from hetero.plan.trace import Trace

SETTLE = 8  # steps within which residency at the border has to repeat

NOBODY = -1  # owns frames that are left alone

FARTHEST = 512  # accesses ahead of which a fetch is worth considering


class PlannedPlace(Protocol):
    """Where a run goes and who leaves for it."""

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
    """A simulated step: its ops, the buckets that end where they did not begin, its fetches, and
    what it costs whom: misses, and frames that are filled."""

    ops: tuple[tuple[Op, ...], ...]
    moved: tuple[int, ...]
    cost: int
    misses: int = 0
    granules: int = 0


class Planner:
    """Simulates steps over a frame map until the border repeats, and keeps the cheapest.

    Passing buckets are placed at alternate ends, so that one which is pinned leaves the other side
    whole for the next. Buckets that no update rewrites survive the border; the border's ops name
    where each of them stands, so that the plan can be entered from any state. Where no update
    rewrites anything, look-ahead goes on beyond the border, and a part of the buckets may stand
    for good (`hetero.plan.standing`), above the others: frames that are given up are theirs.
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
        self._next: dict[int, float] = {}  # use of every resident bucket that does not stand
        self._order: list[tuple[float, int]] = []  # (next use, bucket) of these, ascending
        self._near = 0.0  # all accesses between the present one and this have what they need
        self._high = False
        self._cyclic = may_stand(trace, shapes)
        self._standing: tuple[int, ...] = ()

    def build(self) -> Schedule:
        """Return the schedule of the steady step."""
        best = self._standing_lap() if self._cyclic else self._settled(())
        return Schedule(self.trace, leaving(best.ops, best.moved), self.limit)

    def _standing_lap(self) -> Lap:
        """Return the cheapest of the steps in which some buckets stand."""
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

        They stand above what the rest streams through, which has two ends to alternate between; so
        the first of them are where they are for any number of frames.
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
        """Simulate a step from the present residency, and what it takes to repeat it."""
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
        """The next uses of buckets are others from a point on."""
        for bucket in buckets:
            use = self._next.get(bucket)
            if use is not None:
                del self._order[bisect_left(self._order, (use, bucket))]
                use = self._next[bucket] = self._next_use(bucket, point)
                insort(self._order, (use, bucket))

    def _demand(self, point: int, needed: Sequence[int]) -> tuple[Op, ...]:
        """Fetch what look-ahead could not; where it is too scattered, start from empty frames."""
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
        place = self.space.place(granules, self._leaving(pinned, deadline), high=self._high)
        if place is None:
            return None
        for owner in place.evict:
            self._drop(owner)
        self._take(bucket, place.start, point)
        self._high = not self._high
        return Op(bucket, place.start, place.evict)

    def _leaving(self, pinned: Sequence[int], deadline: int) -> Iterator[tuple[object, int]]:
        """Yield what is needed later than a deadline, last first."""
        for use, bucket in reversed(self._order):
            if use <= deadline:
                return
            if bucket not in pinned:
                yield use, bucket

    def _next_use(self, bucket: int, point: int) -> float:
        """Positions of the next step count too, for what survives the update."""
        places = self.uses.get(bucket, ())
        use = next_use(places, point)
        if math.isinf(use) and places and not self.shapes[bucket].rewritten:
            return len(self.trace.accesses) + places[0]
        return use


def leaving(ops: tuple[tuple[Op, ...], ...], gone: tuple[int, ...]) -> tuple[tuple[Op, ...], ...]:
    """Let the first op of a step evict what the last step left behind, its own bucket too."""
    for point, row in enumerate(ops):
        if row:
            first = row[0]._replace(evict=tuple(dict.fromkeys((*row[0].evict, *gone))))
            return (*ops[:point], (first, *row[1:]), *ops[point + 1 :])
    return ops
