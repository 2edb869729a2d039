"""The cursor along a schedule: which ops an access brings, and when a step is planned for."""

from __future__ import annotations

from hetero.plan.schedule import Op, Schedule
from hetero.plan.trace import Access, Trace
from hetero.train.access.cursor import Cursor
from hetero.types import Phase

UNITS = range(5)
FORWARD = [Access(Phase.FORWARD, unit, (unit,)) for unit in UNITS]


class Plans:
    """Makes schedules in which the op behind access ``n`` fetches bucket ``n`` + 10."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def __call__(self, trace: Trace) -> Schedule:
        self.traces.append(trace)
        rows = tuple((Op(point + 9, 0),) for point in range(len(trace.accesses) + 1))
        return Schedule(trace, rows, limit=100)


def followed() -> tuple[Cursor, Plans]:
    """Return a cursor that follows the plan of one step."""
    plans = Plans()
    cursor = Cursor(plans)
    step(cursor, FORWARD)
    return cursor, plans


def step(cursor: Cursor, accesses: list[Access]) -> list[int]:
    """Return the buckets that the ops of a step fetch, those of its border last."""
    rows = [cursor.observe(access) for access in accesses]
    return [op.bucket for row in (*rows, cursor.border()) for op in row]


def test_the_first_step_is_planned_for_at_once() -> None:
    cursor, plans = followed()

    assert [trace.accesses for trace in plans.traces] == [tuple(FORWARD)]
    assert step(cursor, FORWARD) == [10, 11, 12, 13, 14, 9]
    assert cursor.deviations == 0


def test_a_step_that_skips_accesses_issues_the_ops_that_it_skipped() -> None:
    cursor, _ = followed()

    assert step(cursor, [FORWARD[0], FORWARD[3]]) == [10, 11, 12, 13, 9]
    assert cursor.deviations == 1


def test_an_access_that_is_in_no_plan_issues_nothing_and_the_rest_goes_on() -> None:
    cursor, _ = followed()
    stranger = Access(Phase.BACKWARD, 0, (0,))

    assert step(cursor, [FORWARD[0], stranger, *FORWARD[1:]]) == [10, 11, 12, 13, 14, 9]
    assert cursor.deviations == 1


def test_another_step_is_planned_for_when_it_comes_twice_in_a_row() -> None:
    cursor, plans = followed()
    odd = FORWARD[:2]

    for accesses in (odd, FORWARD, odd, FORWARD):
        step(cursor, accesses)
    assert len(plans.traces) == 1

    for _ in range(2):
        step(cursor, odd)
    assert [trace.accesses for trace in plans.traces[1:]] == [tuple(odd)]


def test_a_bucket_is_needed_again_in_as_many_accesses_as_lie_between() -> None:
    cursor, _ = followed()
    cursor.observe(FORWARD[0])

    assert [cursor.next_use(bucket) for bucket in (1, 4)] == [1, 4]
    assert cursor.next_use(0) == float("inf")


def test_the_first_step_follows_the_trace_that_is_expected() -> None:
    plans = Plans()
    cursor = Cursor(plans)

    assert [op.bucket for op in cursor.expect(Trace(tuple(FORWARD)))] == [9]
    assert step(cursor, FORWARD) == [10, 11, 12, 13, 14, 9]
    assert len(plans.traces) == 1


def test_a_first_step_that_is_not_as_expected_is_planned_for_at_once_and_alone() -> None:
    plans = Plans()
    cursor = Cursor(plans)
    cursor.expect(Trace(tuple(FORWARD)))
    seen, odd = FORWARD[::-1], FORWARD[:2]

    for accesses in (seen, odd, seen):
        step(cursor, accesses)
    assert [trace.accesses for trace in plans.traces] == [tuple(FORWARD), tuple(seen)]


def test_nothing_is_expected_of_a_step_that_has_begun_or_once_one_is_known() -> None:
    begun, plans = Cursor(Plans()), Plans()
    begun.observe(FORWARD[0])
    known = Cursor(plans)
    step(known, FORWARD)

    assert begun.expect(Trace(tuple(FORWARD))) == known.expect(Trace(tuple(FORWARD[1:]))) == ()
    assert begun.schedule is None
    assert [trace.accesses for trace in plans.traces] == [tuple(FORWARD)]


def test_accesses_of_a_trial_are_no_part_of_the_step() -> None:
    cursor, plans = followed()
    for _ in range(2):
        with cursor.aside():
            for access in FORWARD[3:]:
                cursor.observe(access)
        assert step(cursor, FORWARD) == [10, 11, 12, 13, 14, 9]
    assert len(plans.traces) == 1
