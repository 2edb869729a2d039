"""Which homes HOST holds: every one it can, in the order in which they are missed most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero.plan.placement import PRIORITY, HomePart, lift, place
from hetero.types import Kind

SPILLING = (Kind.PARAM, Kind.GRAD, Kind.MASTER, Kind.STATE)
parts = st.lists(
    st.builds(HomePart, st.sampled_from(SPILLING), st.integers(0, 9), st.integers(0, 50)),
    max_size=30,
    unique_by=lambda part: (part.kind, part.bucket),
)


def model(n_buckets: int, sizes: dict[Kind, int]) -> list[HomePart]:
    return [HomePart(kind, b, n) for b in range(n_buckets) for kind, n in sizes.items()]


def on_host(found: frozenset[tuple[Kind, int]], given: list[HomePart]) -> list[HomePart]:
    return [part for part in given if (part.kind, part.bucket) not in found]


def test_where_everything_fits_nothing_goes_to_disk() -> None:
    given = model(3, {Kind.PARAM: 4, Kind.GRAD: 4, Kind.STATE: 8})
    assert place(given, 48) == frozenset()


def test_where_nothing_fits_everything_goes_to_disk() -> None:
    given = model(2, {Kind.PARAM: 4, Kind.STATE: 8})
    assert place(given, 3) == {(part.kind, part.bucket) for part in given}
    assert place(given, 0) == place(given, -5) == place(given, 3)


def test_states_go_first_then_masters_then_gradients_and_parameters_last() -> None:
    given = model(1, {Kind.STATE: 8, Kind.MASTER: 4, Kind.GRAD: 4, Kind.PARAM: 4})
    gone = [{kind for kind, _ in place(given, host)} for host in (20, 19, 11, 7, 3)]
    assert gone == [
        set(),
        {Kind.STATE},
        {Kind.STATE, Kind.MASTER},
        {Kind.STATE, Kind.MASTER, Kind.GRAD},
        set(SPILLING),
    ]


def test_of_one_kind_the_units_that_compute_first_stay() -> None:
    given = model(5, {Kind.STATE: 8})
    assert place(given, 24) == {(Kind.STATE, 3), (Kind.STATE, 4)}


def test_what_is_too_large_leaves_its_room_to_the_next() -> None:
    given = [HomePart(Kind.PARAM, 0, 10), HomePart(Kind.PARAM, 1, 3), HomePart(Kind.STATE, 0, 2)]
    assert place(given, 5) == {(Kind.PARAM, 0)}


def test_room_that_others_leave_is_for_what_is_missed_most() -> None:
    given = model(2, {Kind.STATE: 8, Kind.GRAD: 4})
    lifted = [lift(given, room) for room in (3, 7, 8, 16, 24)]
    assert lifted == [
        frozenset(),
        {(Kind.GRAD, 0)},
        {(Kind.GRAD, 0), (Kind.GRAD, 1)},
        {(Kind.GRAD, 0), (Kind.GRAD, 1), (Kind.STATE, 0)},
        {(part.kind, part.bucket) for part in given},
    ]


def test_every_kind_that_may_go_to_disk_has_a_priority() -> None:
    assert set(PRIORITY) == set(SPILLING)


@given(given=parts, host=st.integers(0, 400))
def test_what_stays_fits_and_nothing_that_fits_beside_it_goes(
    given: list[HomePart], host: int
) -> None:
    found = place(given, host)
    stays = on_host(found, given)
    room = host - sum(part.n_bytes for part in stays)

    assert found <= {(part.kind, part.bucket) for part in given}
    assert room >= 0
    assert all(part.n_bytes > room for part in given if part not in stays)
    assert place(iter(given), host) == found


@given(given=parts, host=st.integers(0, 400))
def test_what_goes_would_not_have_fitted_beside_what_is_missed_more(
    given: list[HomePart], host: int
) -> None:
    stays = on_host(place(given, host), given)
    for at, part in enumerate(given):
        before = (PRIORITY.index(part.kind), at)
        missed_more = [
            other
            for i, other in enumerate(given)
            if other in stays and (PRIORITY.index(other.kind), i) < before
        ]
        fits = sum(other.n_bytes for other in missed_more) + part.n_bytes <= host
        assert (part in stays) == fits
