"""The planner: fetches in the order of next use, as early as frames can be had."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetero.memory.frame import FrameMap
from hetero.plan.planner import LatestUse, Planner, next_use
from hetero.plan.schedule import Schedule, ScheduleVerdict, Shape, verify
from hetero.plan.standing import StreamedBuckets, standing, window
from hetero.plan.trace import Access, Trace
from hetero.types import Phase
from tests.counting import lines_of

MANY = settings(derandomize=True, deadline=None, max_examples=200)


def chain(*needs: tuple[int, ...]) -> Trace:
    """Return a trace of one access per tuple of buckets."""
    return Trace(tuple(Access(Phase.FORWARD, i, need) for i, need in enumerate(needs)))


def build(
    trace: Trace, shapes: dict[int, Shape], limit: int, depth: int | None = None
) -> tuple[Schedule, ScheduleVerdict]:
    schedule = Planner(trace, shapes, FrameMap(limit), limit, depth).build()
    return schedule, verify(schedule, shapes)


def widest(trace: Trace, shapes: dict[int, Shape]) -> int:
    """Return the frames of the largest access."""
    return max(sum(shapes[b].granules for b in set(a.buckets)) for a in trace.accesses)


def equal(n_buckets: int, *, granules: int = 4, rewritten: bool = True) -> dict[int, Shape]:
    return {b: Shape(granules, rewritten) for b in range(n_buckets)}


def palindrome(n_buckets: int) -> Trace:
    """Return forward and backward through a chain, as one training step goes."""
    order = [*range(n_buckets), *reversed(range(n_buckets))]
    return chain(*((bucket,) for bucket in order))


def cyclic(n_buckets: int, rounds: int) -> Trace:
    return chain(*((bucket,) for _ in range(rounds) for bucket in range(n_buckets)))


@st.composite
def traces(draw: st.DrawFn, *, many: bool = True) -> tuple[Trace, dict[int, Shape]]:
    """Return a random trace over up to six buckets of random sizes."""
    n_buckets = draw(st.integers(1, 6))
    bucket = st.integers(0, n_buckets - 1)
    need = st.lists(bucket, min_size=1, max_size=3 if many else 1, unique=True).map(tuple)
    shape = st.builds(Shape, st.integers(1, 8), st.booleans())
    shapes = {b: draw(shape) for b in range(n_buckets)}
    return chain(*draw(st.lists(need, min_size=1, max_size=14))), shapes


def fetches_under_lru(trace: Trace, shapes: dict[int, Shape], n_frames: int) -> int:
    """Return the fetches of a steady step under demand paging with LRU, for buckets of one size."""
    resident: OrderedDict[int, None] = OrderedDict()
    fetches = 0
    for _ in range(3):
        fetches = 0
        for bucket in [b for b in resident if shapes[b].rewritten]:
            del resident[bucket]
        for access in trace.accesses:
            for bucket in access.buckets:
                if bucket not in resident:
                    fetches += 1
                    if len(resident) == n_frames:
                        resident.popitem(last=False)
                resident[bucket] = None
                resident.move_to_end(bucket)
    return fetches


# -- every schedule is a right one ---------------------------------------------------------------


@MANY
@given(traces(), st.integers(0, 30))
def test_every_schedule_passes_verification(
    model: tuple[Trace, dict[int, Shape]], spare: int
) -> None:
    trace, shapes = model
    limit = widest(trace, shapes) + spare
    schedule, verdict = build(trace, shapes, limit)

    assert verdict.peak_granules <= limit
    assert len(schedule.ops) == len(trace.accesses) + 1


@MANY
@given(traces())
def test_a_schedule_for_the_very_least_of_frames_passes_verification(
    model: tuple[Trace, dict[int, Shape]],
) -> None:
    trace, shapes = model
    limit = widest(trace, shapes)

    assert build(trace, shapes, limit)[1].peak_granules <= limit


@MANY
@given(traces(many=False), st.integers(0, 30), st.integers(0, 5))
def test_every_depth_of_look_ahead_passes_verification(
    model: tuple[Trace, dict[int, Shape]], spare: int, depth: int
) -> None:
    trace, shapes = model
    limit = widest(trace, shapes) + spare

    assert build(trace, shapes, limit, depth)[1].peak_granules <= limit


@MANY
@given(traces(), st.integers(0, 30))
def test_the_same_trace_gives_the_same_schedule(
    model: tuple[Trace, dict[int, Shape]], spare: int
) -> None:
    trace, shapes = model
    limit = widest(trace, shapes) + spare
    first, second = (Planner(trace, shapes, FrameMap(limit), limit).build() for _ in range(2))

    assert first == second


@MANY
@given(traces(), st.integers(0, 30))
def test_a_built_schedule_prints_and_parses(
    model: tuple[Trace, dict[int, Shape]], spare: int
) -> None:
    trace, shapes = model
    limit = widest(trace, shapes) + spare
    schedule = Planner(trace, shapes, FrameMap(limit), limit).build()

    assert Schedule.parse(schedule.show()) == schedule


# -- and a good one ------------------------------------------------------------------------------


@MANY
@given(traces(), st.integers(1, 8), st.integers(0, 20))
def test_equal_rewritten_buckets_never_miss_when_two_accesses_fit(
    model: tuple[Trace, dict[int, Shape]], granules: int, spare: int
) -> None:
    trace, shapes = model
    shapes = {b: Shape(granules, rewritten=True) for b in shapes}
    limit = 2 * widest(trace, shapes) + spare

    assert build(trace, shapes, limit)[1].demand_misses == 0


@MANY
@given(traces(many=False), st.integers(1, 8), st.integers(0, 3))
def test_equal_frozen_buckets_never_miss_when_two_accesses_fit(
    model: tuple[Trace, dict[int, Shape]], granules: int, spare: int
) -> None:
    trace, shapes = model
    shapes = {b: Shape(granules, shapes[b].rewritten) for b in shapes}
    limit = 2 * widest(trace, shapes) + spare

    assert build(trace, shapes, limit)[1].demand_misses == 0


@MANY
@given(traces(many=False), st.integers(0, 3))
def test_unequal_rewritten_buckets_never_miss_when_three_of_the_largest_fit(
    model: tuple[Trace, dict[int, Shape]], spare: int
) -> None:
    trace, shapes = model
    shapes = {b: Shape(s.granules, rewritten=True) for b, s in shapes.items()}
    # A pinned run in the middle leaves the largest one room on a side only in three times its size.
    limit = 3 * widest(trace, shapes) + spare

    assert build(trace, shapes, limit)[1].demand_misses == 0


@MANY
@given(traces(), st.integers(0, 20))
def test_nothing_misses_when_everything_fits(
    model: tuple[Trace, dict[int, Shape]], spare: int
) -> None:
    trace, shapes = model
    schedule, verdict = build(trace, shapes, sum(s.granules for s in shapes.values()) + spare)

    assert verdict.demand_misses == 0
    assert verdict.fetches == sum(1 for b in trace.uses() if shapes[b].rewritten)
    assert all(not op.evict for row in schedule.ops for op in row)


ROUNDS = (st.integers(2, 9), st.integers(1, 9), st.integers(0, 3))


def rounds_of(n_buckets: int, rounds: int) -> Trace:
    """Return that many rounds through the buckets, or the way there and back for none."""
    return cyclic(n_buckets, rounds) if rounds else palindrome(n_buckets)


@MANY
@given(*ROUNDS)
def test_never_more_is_fetched_than_under_demand_paging_with_lru(
    n_buckets: int, n_frames: int, rounds: int
) -> None:
    trace, shapes = rounds_of(n_buckets, rounds), equal(n_buckets)
    verdict = build(trace, shapes, 4 * n_frames)[1]

    assert verdict.fetches + verdict.demand_misses <= fetches_under_lru(trace, shapes, n_frames)


@MANY
@given(st.integers(2, 9), st.integers(2, 9), st.lists(st.booleans(), min_size=9, max_size=9))
def test_with_frozen_buckets_a_training_step_fetches_no_more_than_under_lru(
    n_buckets: int, n_frames: int, rewritten: list[bool]
) -> None:
    trace = palindrome(n_buckets)
    shapes = {b: Shape(4, rewritten[b]) for b in range(n_buckets)}
    verdict = build(trace, shapes, 4 * n_frames)[1]

    assert verdict.fetches + verdict.demand_misses <= fetches_under_lru(trace, shapes, n_frames)


@MANY
@given(traces(many=False), st.integers(1, 6))
def test_on_any_trace_of_equal_buckets_no_more_is_fetched_than_under_lru(
    model: tuple[Trace, dict[int, Shape]], n_frames: int
) -> None:
    trace, shapes = model
    shapes = {b: Shape(4, rewritten=True) for b in shapes}
    verdict = build(trace, shapes, 4 * n_frames)[1]

    assert verdict.fetches + verdict.demand_misses <= fetches_under_lru(trace, shapes, n_frames)


def test_a_small_bucket_at_the_low_end_does_not_keep_two_large_ones_apart() -> None:
    shapes = {0: Shape(2, True), 1: Shape(8, True), 2: Shape(8, True)}
    _, verdict = build(chain((0,), (1,), (2,)), shapes, 2 * 8)

    assert verdict.demand_misses == 0


def test_a_plan_for_frozen_buckets_begins_the_step_where_it_ended_the_last_one() -> None:
    _, verdict = build(chain((0,), (1,), (2,), (0,)), equal(3, rewritten=False), 2 * 4)

    assert verdict.demand_misses == 0


def test_the_buckets_of_one_access_are_laid_out_together_when_nothing_else_fits() -> None:
    shapes = {0: Shape(8, True), 1: Shape(8, True), 2: Shape(1, True)}
    _, verdict = build(chain((2,), (1, 0)), shapes, 8 + 8)

    assert verdict.peak_granules == 16


def test_a_palindrome_with_three_frames_keeps_what_the_turn_needs() -> None:
    _, verdict = build(palindrome(6), equal(6), 3 * 4)

    assert verdict == ScheduleVerdict(demand_misses=0, fetches=6 + 3, peak_granules=12)


def test_the_border_prefetches_for_the_first_accesses() -> None:
    schedule, _ = build(palindrome(6), equal(6), 2 * 4)

    assert [op.bucket for op in schedule.at(-1)] == [0, 1]


def test_what_the_update_did_not_rewrite_is_not_fetched_again() -> None:
    schedule, verdict = build(palindrome(3), equal(3, rewritten=False), 3 * 4)

    assert verdict.fetches == 0
    assert all(not row for row in schedule.ops[1:])  # the border names where they stand


def test_frozen_buckets_stay_while_rewritten_ones_are_fetched_anew() -> None:
    shapes = {0: Shape(4, rewritten=False), 1: Shape(4, rewritten=True)}
    _, verdict = build(palindrome(2), shapes, 2 * 4)

    assert (verdict.demand_misses, verdict.fetches) == (0, 1)


def test_a_fetch_displaces_only_what_is_needed_later_than_itself() -> None:
    trace = chain((0,), (1,), (0,), (2,), (0,))
    schedule, verdict = build(trace, equal(3), 2 * 4)

    assert verdict.demand_misses == 0
    for point, row in enumerate(schedule.ops, start=-1):
        for op in row:
            wanted = next_use(trace.uses()[op.bucket], point)
            assert all(next_use(trace.uses()[b], point) > wanted for b in op.evict)


def test_a_depth_of_zero_plans_nothing() -> None:
    schedule, verdict = build(palindrome(4), equal(4), 2 * 4, depth=0)

    assert all(op.demand for row in schedule.ops for op in row)
    assert verdict.demand_misses > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_depth_bounds_how_far_ahead_a_fetch_is(depth: int) -> None:
    trace = palindrome(6)
    schedule, _ = build(trace, equal(6), 4 * 4, depth=depth)

    for point, row in enumerate(schedule.ops, start=-1):
        for op in row:
            assert op.demand or next_use(trace.uses()[op.bucket], point) <= point + depth


def test_an_access_of_several_buckets_has_them_all_at_once() -> None:
    schedule, verdict = build(chain((0, 1), (2,), (0, 1)), equal(3), 3 * 4)

    assert verdict == ScheduleVerdict(demand_misses=0, fetches=3, peak_granules=12)
    assert {op.bucket for op in schedule.at(-1)} == {0, 1, 2}


@given(st.lists(st.integers(0, 50), unique=True).map(sorted), st.integers(-2, 60))
@settings(derandomize=True, deadline=None)
def test_the_next_use_is_the_first_one_strictly_behind(places: list[int], after: int) -> None:
    assert next_use(places, after) == min((p for p in places if p > after), default=math.inf)


@given(traces())
@settings(derandomize=True, deadline=None)
def test_uses_agree_with_the_trace(model: tuple[Trace, dict[int, Shape]]) -> None:
    trace, _ = model
    assume(trace.accesses)

    for bucket, places in trace.uses().items():
        assert places == [i for i, a in enumerate(trace.accesses) if bucket in a.buckets]


# -- micro-batches ---------------------------------------------------------------------------------


def fewest_fetches(trace: Trace, n_frames: int) -> int:
    """Return the fewest fetches of any schedule that has the bucket of each access and of the next
    one in frames, for buckets of one size that the update rewrites: all choices are tried."""
    order = [access.buckets[0] for access in trace.accesses]
    ways: dict[frozenset[int], int] = {frozenset(): 0}
    for pair in zip(order, [*order[1:], order[-1]], strict=True):
        after: dict[frozenset[int], int] = {}
        for held, fetched in ways.items():
            there = held | {*pair}
            spare = max(0, len(there) - n_frames)
            for gone in itertools.combinations(there - {*pair}, spare):
                kept = there - {*gone}
                cost = fetched + len(there) - len(held)
                after[kept] = min(cost, after.get(kept, cost))
        ways = after
    return min(ways.values())


def forwards_first(n_buckets: int, rounds: int) -> Trace:
    """Return the accesses of that many forwards, and of their backwards after them."""
    there, back = [*range(n_buckets)], [*reversed(range(n_buckets))]
    return chain(*((bucket,) for bucket in (*there * rounds, *back * rounds)))


def accumulated(n_buckets: int, rounds: int) -> Trace:
    """Return the accesses of that many forwards, each with its backward."""
    return chain(*((bucket,) for bucket in [*range(n_buckets), *range(n_buckets)[::-1]] * rounds))


@MANY
@given(traces(many=False), st.integers(2, 5))
def test_on_any_trace_of_equal_buckets_little_more_is_fetched_than_the_fewest(
    model: tuple[Trace, dict[int, Shape]], n_frames: int
) -> None:
    trace, shapes = model
    shapes = {b: Shape(4, rewritten=True) for b in shapes}
    verdict = build(trace, shapes, 4 * n_frames)[1]

    assert verdict.demand_misses == 0
    assert verdict.fetches <= 1.125 * fewest_fetches(trace, n_frames)


@pytest.mark.parametrize("n_frames", [2, 3, 4, 6])
@pytest.mark.parametrize("steps_of", [forwards_first, accumulated, cyclic])
def test_buckets_stand_inside_a_step_that_visits_them_again_and_again(
    steps_of: Callable[[int, int], Trace], n_frames: int
) -> None:
    trace = steps_of(6, 5)
    verdict = build(trace, equal(6), 4 * n_frames)[1]

    assert verdict.demand_misses == 0
    assert verdict.fetches <= 1.125 * fewest_fetches(trace, n_frames)


def test_forwards_first_fetches_a_third_of_what_streaming_would() -> None:
    _, verdict = build(forwards_first(8, 8), equal(8), 6 * 4)

    assert verdict == ScheduleVerdict(demand_misses=0, fetches=46, peak_granules=24)


def test_a_fetch_does_not_wait_where_waiting_would_displace_the_same() -> None:
    """Accumulation turns round at both ends: what was used last is needed first."""
    trace = accumulated(6, 3)
    schedule, verdict = build(trace, equal(6), 4 * 4)
    ahead = [
        next_use(trace.uses()[op.bucket], point) - point
        for point, row in enumerate(schedule.ops, start=-1)
        for op in row
    ]

    assert verdict.fetches == fewest_fetches(trace, 4)
    assert sum(ahead) / len(ahead) > 2.5


def test_the_latest_use_of_a_window_is_found_wherever_it_moves() -> None:
    trace = forwards_first(4, 2)
    uses = trace.uses()
    latest = LatestUse(trace, uses)
    for first, end in [(0, 3), (0, 5), (2, 5), (4, 9), (9, 9), (9, 12), (3, 6), (3, 2), (5, 7)]:
        after = [next_use(uses[b], at) for at in range(first, end) for b in trace[0][at].buckets]
        assert latest.among(first, end) == max(after, default=0.0)


# -- what stands -----------------------------------------------------------------------------------


def filled(schedule: Schedule, shapes: dict[int, Shape]) -> int:
    """Return the frames that a steady step fills: ops beside those of the border."""
    there = {op.bucket: op.start for op in schedule.at(-1)}
    moved = schedule.ops[0][0].evict if schedule.ops[0] else ()
    later = (op for row in schedule.ops[1:] for op in row)
    return sum(shapes[op.bucket].granules for op in later) + sum(
        shapes[b].granules for b in moved if b in there
    )


@pytest.mark.parametrize("n_buckets", [6, 17, 40])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_cycle_of_what_is_not_rewritten_streams_what_does_not_fit(
    n_buckets: int, share: float
) -> None:
    shapes = equal(n_buckets, rewritten=False) | {n_buckets: Shape(1, False)}
    trace = chain(*((bucket,) for bucket in range(n_buckets + 1)))
    whole = sum(shape.granules for shape in shapes.values())
    limit = max(8, int(share * whole))

    schedule, verdict = build(trace, shapes, limit)

    assert verdict.demand_misses == 0
    # two buckets' frames stream, and what is left of one is of no use
    assert filled(schedule, shapes) <= whole - limit + 3 * 4


def test_what_is_used_twice_in_a_pass_stands_or_streams_once_a_border() -> None:
    shapes = equal(12, rewritten=False) | {0: Shape(9, False)}
    trace = chain(*((bucket,) for bucket in (*range(12), 0)))
    whole = sum(shape.granules for shape in shapes.values())

    schedule, verdict = build(trace, shapes, 24)

    assert verdict.demand_misses == 0
    assert filled(schedule, shapes) <= whole


@MANY
@given(traces(many=False), st.integers(0, 30))
def test_what_stands_is_never_more_than_the_frames(
    model: tuple[Trace, dict[int, Shape]], spare: int
) -> None:
    trace, shapes = model
    still = {b: Shape(shape.granules, False) for b, shape in shapes.items()}
    limit = widest(trace, still) + spare
    for stand in standing(trace, still, limit):
        assert len(set(stand)) == len(stand)
        held = sum(still[bucket].granules for bucket in stand)
        assert held + window(trace, still, set(stand)) <= limit or not stand


@MANY
@given(traces(), st.data())
def test_the_window_of_a_stream_is_that_of_all_that_was_not_taken_out(
    model: tuple[Trace, dict[int, Shape]], data: st.DataObject
) -> None:
    trace, shapes = model
    stream, out = StreamedBuckets(trace, shapes), set()
    for bucket in data.draw(st.permutations(sorted(trace.uses()))):
        stream.take_out(bucket)
        assert stream.window == window(trace, shapes, out | {bucket})
        if data.draw(st.booleans()):
            out.add(bucket)
            continue
        stream.put_back(bucket)
        assert stream.window == window(trace, shapes, out)


# -- what planning takes ---------------------------------------------------------------------------


def passes(n_buckets: int, size: Callable[[int], int], rewritten: bool) -> list[Any]:
    """Return a planner for one pass, forward and backward where something is rewritten."""
    shapes = {b: Shape(size(b), rewritten) for b in range(n_buckets)}
    trace = palindrome(n_buckets) if rewritten else cyclic(n_buckets, 1)
    limit = sum(shape.granules for shape in shapes.values()) // 2
    return [trace, shapes, FrameMap(limit), limit]


@pytest.mark.parametrize("rewritten", [True, False])
@pytest.mark.parametrize("n_sizes", [1, 3])
def test_planning_is_linear_in_the_trace(rewritten: bool, n_sizes: int) -> None:
    few, many = (
        lines_of(Planner(*passes(n, lambda b: 2 + b % n_sizes, rewritten)).build) for n in (60, 480)
    )

    assert many < 1.3 * 8 * few
