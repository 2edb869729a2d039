"""The schedule: it prints, parses, and is executed symbolically against its limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import StateError
from hetero.plan.schedule import Op, Schedule, ScheduleVerdict, Shape, verify
from hetero.plan.trace import Access, Trace
from hetero.types import Phase

small = st.integers(0, 99)
ops = st.builds(Op, small, st.integers(0, 10**6), st.lists(small, max_size=3).map(tuple))
accesses = st.builds(Access, st.sampled_from(Phase), small, st.lists(small, max_size=3).map(tuple))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    trace = Trace(tuple(draw(st.lists(accesses, max_size=8))))
    n_points = len(trace.accesses) + 1
    rows = st.lists(ops, max_size=3).map(tuple)
    planned = draw(st.lists(rows, min_size=n_points, max_size=n_points))
    return Schedule(trace, tuple(planned), draw(st.integers(1, 10**9)))


def chain(*needs: tuple[int, ...]) -> Trace:
    """Return a trace of one access per tuple of buckets."""
    return Trace(tuple(Access(Phase.FORWARD, i, need) for i, need in enumerate(needs)))


def plan(trace: Trace, limit: int, **points: Op) -> Schedule:
    """Return a schedule with one op at each named point: ``border``, ``at0``, ``at1``, ..."""
    rows: list[tuple[Op, ...]] = [() for _ in range(len(trace.accesses) + 1)]
    for name, op in points.items():
        rows[0 if name == "border" else int(name.removeprefix("at")) + 1] = (op,)
    return Schedule(trace, tuple(rows), limit)


def shapes(*granules: int, rewritten: bool = True) -> dict[int, Shape]:
    return {bucket: Shape(n, rewritten) for bucket, n in enumerate(granules)}


# -- print and parse -----------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(schedules())
def test_what_a_schedule_prints_it_parses(schedule: Schedule) -> None:
    assert Schedule.parse(schedule.show()) == schedule


@settings(derandomize=True, deadline=None)
@given(schedules())
def test_names_of_units_do_not_disturb_the_parser(schedule: Schedule) -> None:
    names = [f"model.layers.{i}" for i in range(100)]

    assert Schedule.parse(schedule.show(names)) == schedule


def test_a_schedule_prints_one_line_per_point() -> None:
    schedule = plan(chain((0,), (1, 2)), 24, border=Op(0, 0), at0=Op(1, 16, (3, 4)))

    assert schedule.show(["embed", "layers.0"]).splitlines() == [
        "# limit 24",
        "  -1  border | FETCH b0@0;",
        "   0  F u0[0] embed | FETCH b1@16 EVICT b3 EVICT b4;",
        "   1  F u1[1,2] layers.0 |",
    ]


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_prints_and_parses(phase: Phase) -> None:
    schedule = Schedule(Trace((Access(phase, 3, (7,)),)), ((), ()), 5)

    assert Schedule.parse(schedule.show()).trace.accesses[0].phase is phase


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "   0  F u0[0] FETCH b0@0;",
        "   0  F u0 | FETCH b0@0;",
        "   0  F u0[0] | FETCH b0;",
    ],
)
def test_a_line_that_does_not_parse_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"(program point|not an op)") as caught:
        Schedule.parse(f"# limit 4\n  -1  border |\n{line}")
    assert caught.value.args[0].split("'")[1].strip() in line


@pytest.mark.parametrize("op", ["FETCH", "EVICT b1", "FETCH bx@1", "FETCH b1@-1", "FLUSH b1@2"])
def test_an_op_that_is_no_fetch_is_refused(op: str) -> None:
    with pytest.raises(ValueError, match="not an op"):
        Schedule.parse(f"# limit 4\n  -1  border | {op};")


def test_point_minus_one_is_the_border() -> None:
    schedule = plan(chain((0,), (1,)), 9, border=Op(0, 0), at1=Op(1, 4))

    assert schedule.at(-1) == (Op(0, 0),)
    assert schedule.at(0) == ()
    assert schedule.at(1) == (Op(1, 4),)


# -- the trace -----------------------------------------------------------------------------------


def test_uses_are_positions_in_order_each_once() -> None:
    assert chain((0, 1), (1, 1), (0,), (2,)).uses() == {0: [0, 2], 1: [0, 1], 2: [3]}


def test_the_key_of_a_trace_depends_on_its_accesses_alone() -> None:
    assert chain((0,), (1,)).key == chain((0,), (1,)).key
    assert chain((0,), (1,)).key != chain((1,), (0,)).key


# -- symbolic execution --------------------------------------------------------------------------


def test_without_ops_every_access_after_an_update_is_a_demand_miss() -> None:
    schedule = plan(chain((0,), (1,), (0,)), 8)

    assert verify(schedule, shapes(4, 4)) == ScheduleVerdict(2, 0, 8)


def test_what_an_update_does_not_rewrite_is_still_there_in_the_second_step() -> None:
    schedule = plan(chain((0,), (1,), (0,)), 8)

    assert verify(schedule, shapes(4, 4, rewritten=False)) == ScheduleVerdict(0, 0, 8)


def test_a_planned_fetch_saves_a_miss() -> None:
    schedule = plan(chain((0,), (1,)), 8, border=Op(0, 0), at0=Op(1, 4))

    assert verify(schedule, shapes(4, 4)) == ScheduleVerdict(0, 2, 8)


def test_a_fetch_of_what_is_there_already_counts_for_nothing() -> None:
    schedule = plan(chain((0,), (1,)), 8, border=Op(0, 0), at0=Op(0, 4))

    assert verify(schedule, shapes(4, 4)) == ScheduleVerdict(1, 1, 8)


def test_the_peak_is_what_lies_in_frames_at_once() -> None:
    schedule = plan(chain((0,), (1,)), 100, border=Op(0, 0), at0=Op(1, 0 + 3, ()))

    assert verify(schedule, shapes(3, 5)).peak_granules == 8


def test_a_fetch_over_what_the_access_needs_is_caught_with_its_line() -> None:
    schedule = plan(chain((0,), (1,)), 8, border=Op(0, 0), at0=Op(1, 3))

    with pytest.raises(StateError, match=r"0: FETCH b1@3   <-- b0 is in use here"):
        verify(schedule, shapes(4, 4))


def test_an_eviction_of_what_the_access_needs_is_caught() -> None:
    schedule = plan(chain((0,), (1,)), 8, border=Op(0, 0), at0=Op(1, 0, (0,)))

    with pytest.raises(StateError, match=r"EVICT b0.*b0 is in use"):
        verify(schedule, shapes(4, 4))


def test_a_fetch_over_what_it_does_not_evict_is_caught() -> None:
    trace, sizes = chain((0,), (1,), (2,)), shapes(4, 4, 2)
    silent = plan(trace, 8, border=Op(0, 0), at0=Op(1, 4), at1=Op(2, 2))
    honest = plan(trace, 8, border=Op(0, 0), at0=Op(1, 4), at1=Op(2, 2, (0,)))

    assert verify(honest, sizes) == ScheduleVerdict(0, 3, 8)
    with pytest.raises(StateError, match=r"1: FETCH b2@2 .*b0"):
        verify(silent, sizes)


@pytest.mark.parametrize("start", [5, 8, 100])
def test_a_fetch_past_the_limit_is_caught(start: int) -> None:
    schedule = plan(chain((0,), (1,)), 8, at0=Op(1, start))

    with pytest.raises(StateError, match="past the limit of 8 frames"):
        verify(schedule, shapes(4, 4))


def test_a_fetch_before_the_first_frame_is_caught() -> None:
    with pytest.raises(StateError, match="past the limit"):
        verify(plan(chain((0,), (1,)), 8, at0=Op(1, -1)), shapes(4, 4))


def test_a_fetch_that_ends_at_the_limit_is_right() -> None:
    assert verify(plan(chain((0,), (1,)), 8, at0=Op(1, 4)), shapes(4, 4)).fetches == 1


def test_an_access_larger_than_the_limit_is_caught() -> None:
    with pytest.raises(StateError, match="does not fit"):
        verify(plan(chain((0, 1)), 7), shapes(4, 4))


def test_a_mistake_of_the_second_step_alone_is_caught() -> None:
    # b2 is not rewritten: in the first step b1 is fetched over nothing, in the second over b2.
    trace = chain((0,), (1,), (2,))
    sizes = {**shapes(4, 4), 2: Shape(4, rewritten=False)}
    schedule = plan(trace, 12, border=Op(0, 8), at0=Op(1, 6))

    with pytest.raises(StateError, match="in use"):
        verify(schedule, sizes)
