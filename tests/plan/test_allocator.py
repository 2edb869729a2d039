"""The replay of torch's caching allocator: sizes of segments, best fit, splits and merges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import StateError
from hetero.plan.allocator import Event, replay

MIB = 2**20


def peak(*events: tuple[object, int], expandable: bool = False) -> int:
    """Return the MiB reserved for (key, MiB) events; 0 MiB ends a key."""
    sized = [Event(key, int(mib * MIB)) for key, mib in events]
    return replay(sized, expandable=expandable).peak_bytes // MIB


@pytest.mark.parametrize(
    ("n_bytes", "reserved_mib"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (11 * MIB, 12),
        (100 * MIB + 1, 102),
    ],
)
def test_the_first_request_reserves_a_segment_of_its_class(n_bytes: int, reserved_mib: int) -> None:
    assert replay([Event("a", n_bytes)]).peak_bytes == reserved_mib * MIB


def test_requests_are_rounded_to_512_bytes() -> None:
    found = replay([Event("a", 1), Event("b", 513)])

    assert found.active_peak_bytes == 512 + 1024
    assert found.largest_free_bytes == 2 * MIB - 1536


def test_small_and_large_requests_share_no_segment() -> None:
    assert peak(("large", 2), ("small", 0.5)) == 20 + 2


def test_a_segment_of_20_mib_is_split_while_more_than_one_mib_is_left() -> None:
    assert peak(("a", 9), ("b", 9), ("c", 2)) == 20
    assert peak(("a", 9), ("b", 9), ("c", 2), ("d", 2)) == 40
    assert peak(("a", 9.5), ("b", 9.75), ("c", 0.75 + 0.5)) == 40  # 0.75 is left with b


def test_the_smallest_block_that_fits_is_taken() -> None:
    freed = [("a", 32), ("b", 12), ("a", 0), ("b", 0)]

    assert peak(*freed, ("c", 12), ("d", 32)) == 44
    assert peak(*freed, ("c", 13), ("d", 32)) == 44 + 32  # c splits a's


def test_neighbours_that_are_free_are_one_block_again() -> None:
    events = [("a", 40), ("a", 0), ("b", 20), ("c", 20), ("b", 0), ("c", 0), ("d", 40)]

    assert peak(*events) == 40
    assert peak(*events, ("d", 0), ("e", 10), ("f", 20), ("e", 0), ("g", 30)) == 40 + 30


def test_freed_segments_of_their_own_do_not_join() -> None:
    """Three of 20 MiB cannot serve 60; one range that grows can."""
    events = [*((i, 20) for i in range(3)), *((i, 0) for i in range(3)), ("all", 60)]

    assert peak(*events) == 120
    assert peak(*events, expandable=True) == 60


def test_an_expandable_range_grows_by_what_its_free_end_lacks() -> None:
    assert peak(("a", 30), expandable=True) == 40
    assert peak(("a", 30), ("b", 30), expandable=True) == 60
    assert peak(("a", 30), ("b", 10), ("a", 0), ("c", 50), expandable=True) == 100  # 30 is a hole
    assert peak(("small", 0.5), ("large", 5), expandable=True) == 22


def test_growing_batches_fragment_only_what_cannot_grow() -> None:
    events: list[tuple[object, int]] = []
    for n in range(20, 100, 20):
        events += [(n, n), (n, 0)]

    assert peak(*events) == 20 + 40 + 60 + 80
    assert peak(*events, expandable=True) == 80


def test_a_key_is_allocated_once_and_freed_once() -> None:
    with pytest.raises(StateError, match="'a' is allocated twice"):
        replay([Event("a", 1), Event("a", 1)])
    with pytest.raises(StateError, match="'a' is freed unallocated"):
        replay([Event("a")])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30 * MIB)), max_size=40), st.booleans())
def test_reserved_is_never_less_than_active(
    choices: list[tuple[int, int]], expandable: bool
) -> None:
    held: set[int] = set()
    events = []
    for key, n_bytes in choices:
        events.append(Event(key, 0 if key in held else n_bytes))
        held ^= {key}
    found = replay(events, expandable=expandable)

    assert found.peak_bytes >= found.active_peak_bytes
    assert found.peak_bytes % (2 * MIB) == 0
    assert found.largest_free_bytes <= found.peak_bytes
