"""The tracer and cursor: records a step's accesses and follows the plan through them (floor 2).

[Note: second sight]  The first trace is planned at once. A different one is planned only when it
comes twice in a row, so one odd step does not cost the plan of the usual one. A trace that was only
expected is followed until a step is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero.plan.planner import next_use
from hetero.plan.schedule import Op, Schedule
from hetero.plan.trace import Access, Trace

LONGEST = 20_000  # accesses recorded of one step


class Cursor:
    """Follows accesses along a schedule and resynchronises after a deviation."""

    def __init__(self, build: Callable[[Trace], Schedule]) -> None:
        self.deviations = 0
        self._schedule: Schedule | None = None
        self._is_stale = False  # made for other limits
        self._is_expected = False  # of a trace that no step has made yet
        self._build = build
        self._seen: list[Access] = []
        self._before: tuple[Access, ...] = ()
        self._uses: dict[int, list[int]] = {}
        self._places: dict[Access, list[int]] = {}  # positions in the schedule
        self._at = -1

    @property
    def schedule(self) -> Schedule | None:
        """The schedule to follow; after a change of limits it is planned anew on the next read."""
        if self._is_stale and self._schedule is not None:
            self.plan(self._schedule.trace)
        return self._schedule

    @property
    def seen(self) -> tuple[Access, ...]:
        """The accesses of this step so far."""
        return tuple(self._seen)

    def observe(self, access: Access) -> tuple[Op, ...]:
        """Record an access and return the ops to issue, none when off plan.

        One like the last one asks for nothing new: a unit that is computed again, slice by slice,
        is used once. So ranks whose batches are cut into unlike numbers of slices plan alike.
        """
        if self._seen and self._seen[-1] == access:
            return ()
        if len(self._seen) == LONGEST:
            self._seen.clear()  # passes without a step are not planned
        self._seen.append(access)
        schedule = self.schedule
        if schedule is None:
            return ()
        accesses, here = schedule.trace.accesses, self._at + 1
        if here < len(accesses) and accesses[here] == access:
            self._at = here
            return schedule.ops[here + 1]
        return self._resynchronise(schedule, access)

    def expect(self, trace: Trace) -> tuple[Op, ...]:
        """Follow a trace that the first step is expected to make; return the ops of its border.

        Nothing is expected of a step that has begun, or after one.
        """
        if self._schedule is not None or self._seen or not 0 < len(trace.accesses) <= LONGEST:
            return ()
        self.plan(trace)
        self._is_expected = True
        assert self._schedule is not None
        return self._schedule.at(-1)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Accesses inside are no part of the step."""
        n_seen, at = len(self._seen), self._at
        try:
            yield
        finally:
            del self._seen[n_seen:]
            self._at = at

    def border(self) -> tuple[Op, ...]:
        """End the step: plan its trace if that is due, return the ops of the border."""
        trace = Trace(tuple(self._seen))
        self._seen.clear()
        self._at = -1
        known = self._schedule.trace.accesses if self._schedule else None
        due = known is None or self._is_expected or trace.accesses == self._before
        if trace.accesses and trace.accesses != known and due:
            self.plan(trace)
        self._is_expected = self._is_expected and not trace.accesses
        self._before = trace.accesses
        schedule = self.schedule
        return schedule.at(-1) if schedule else ()

    def plan(self, trace: Trace) -> None:
        """Make the schedule of a trace, and follow it from the next step on."""
        self._schedule, self._is_stale = self._build(trace), False
        self._uses = trace.uses()
        self._places = {}

    def order(self) -> dict[int, int]:
        """Return the rank by first use of every bucket of the planned step, else of this one."""
        accesses = self._schedule.trace.accesses if self._schedule else tuple(self._seen)
        found: dict[int, int] = {}
        for access in accesses:
            for bucket in access.buckets:
                found.setdefault(bucket, len(found))
        return found

    def replan(self) -> None:
        """The limits changed: plan anew before the schedule is read again."""
        self._is_stale = True

    def next_use(self, bucket: int) -> float:
        """Return the distance to a bucket's next use; 0 without a plan (then: LRU)."""
        if self._schedule is None:
            return 0.0
        return next_use(self._uses.get(bucket, ()), self._at) - self._at

    def _resynchronise(self, schedule: Schedule, access: Access) -> tuple[Op, ...]:
        """Jump forward to the access and return the skipped ops; stay if it is not ahead."""
        self.deviations += 1
        if not self._places:
            for at, other in enumerate(schedule.trace.accesses):
                self._places.setdefault(other, []).append(at)
        places = self._places.get(access, ())
        there = next_use(places, self._at)
        if math.isinf(there):
            return ()
        skipped, self._at = range(self._at + 1, int(there) + 1), int(there)
        return tuple(op for point in skipped for op in schedule.at(point))
