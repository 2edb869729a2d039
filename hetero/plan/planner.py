"""Prefetch and next-use eviction under the budget, from a trace (floor 1, policy; no torch).

Belady's rule with look-ahead: fetches go out in the order of next use, as early as frames can be
had, and a fetch may displace only what is needed later than itself. The planner lays out addresses,
not only bytes, with the frame map that the runtime uses (handed in as ``space``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hetero.plan.schedule import Op, Schedule, Shape
from hetero.plan.trace import Trace


class Place(Protocol):
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
        self, length: int, worth: Callable[[int], tuple[float, float] | None]
    ) -> Place | None: ...


def next_use(places: Sequence[int], after: int) -> float:
    """Return the first position beyond ``after`` in ascending ``places``, or infinity."""
    at = bisect_right(places, after)
    return places[at] if at < len(places) else math.inf


class Planner:
    """Simulates two steps over a frame map and keeps the second, which is the steady one."""

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
        self.depth = depth if depth is not None else len(trace.accesses)
        self.uses = trace.uses()
        self.resident: set[int] = set()

    def build(self) -> Schedule:
        """Return the schedule of the steady step."""
        ops: list[tuple[Op, ...]] = []
        for _ in range(2):
            self._update()
            ops = [self._look_ahead(-1, ())]
            for point, access in enumerate(self.trace.accesses):
                for bucket in access.buckets:
                    if bucket not in self.resident:
                        self._fetch(bucket, point, access.buckets, deadline=-1)
                ops.append(self._look_ahead(point, access.buckets))
        return Schedule(self.trace, tuple(ops), self.limit)

    def _update(self) -> None:
        for bucket in sorted(self.resident):
            if self.shapes[bucket].rewritten:
                self.space.drop(bucket)
                self.resident.discard(bucket)

    def _look_ahead(self, point: int, pinned: Sequence[int]) -> tuple[Op, ...]:
        ops: list[Op] = []
        last = min(len(self.trace.accesses), point + 1 + self.depth)
        for ahead in range(point + 1, last):
            for bucket in self.trace.accesses[ahead].buckets:
                if bucket in self.resident:
                    continue
                op = self._fetch(bucket, point, pinned, deadline=ahead)
                if op is None:
                    return tuple(ops)
                ops.append(op)
        return tuple(ops)

    def _fetch(self, bucket: int, point: int, pinned: Sequence[int], *, deadline: int) -> Op | None:
        def worth(owner: int) -> tuple[float, float] | None:
            use = self._next_use(owner, point)
            return None if owner in pinned or use <= deadline else (use, 0.0)

        granules = self.shapes[bucket].granules
        place = self.space.place(granules, worth)
        if place is None:
            return None
        for owner in place.evict:
            self.space.drop(owner)
            self.resident.discard(owner)
        self.space.take(bucket, place.start, granules)
        self.resident.add(bucket)
        return Op(bucket, place.start, place.evict)

    def _next_use(self, bucket: int, point: int) -> float:
        """Positions of the next step count too, for what survives the update."""
        places = self.uses.get(bucket, ())
        use = next_use(places, point)
        if math.isinf(use) and places and not self.shapes[bucket].rewritten:
            return len(self.trace.accesses) + places[0]
        return use
