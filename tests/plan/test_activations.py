"""The choice among keeping, computing again and sending down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.plan.activations import (
    KEEP,
    LEAST,
    OFFLOAD,
    RECOMPUTE,
    Policy,
    Use,
    choose,
    cost_seconds,
    excess_bytes,
    peak_bytes,
    peaks,
)
from tests.counting import lines_of

SAVED, INPUT = 100, 10


def block(seconds: float = 1.0) -> Use:
    return Use(SAVED, INPUT, seconds)


def rate(bytes_per_second: float):
    return lambda n_bytes: n_bytes / bytes_per_second


FAST, SLOW = rate(1e6), rate(1.0)


def test_what_fits_is_kept() -> None:
    uses = [block()] * 4

    assert choose(uses, 4 * SAVED, down=FAST, up=FAST) == [KEEP] * 4


def test_the_first_units_give_way_and_the_last_one_never() -> None:
    uses = [block()] * 4
    policies = choose(uses, 3 * SAVED + INPUT, down=SLOW, up=SLOW)

    assert policies == [RECOMPUTE, KEEP, KEEP, KEEP]
    assert choose(uses, 2 * SAVED, down=SLOW, up=SLOW)[-1] == KEEP
    cheapest_last = [block(5.0)] * 3 + [block(0.1)]
    assert choose(cheapest_last, 4 * SAVED - 1, down=SLOW, up=SLOW)[-1] == KEEP


def test_a_link_that_keeps_up_is_cheaper_than_computing_again() -> None:
    uses = [block()] * 6

    assert set(choose(uses, 3 * SAVED, down=FAST, up=FAST)) == {OFFLOAD, KEEP}
    assert set(choose(uses, 3 * SAVED, down=SLOW, up=SLOW)) == {RECOMPUTE, KEEP}


def test_weights_on_the_same_link_count() -> None:
    use = Use(100, 10, forward_seconds=1.0, weight_bytes=200)
    link = rate(100)  # two seconds for the weights: all that a backward hides

    assert cost_seconds(use, OFFLOAD, link, link) == 1.0
    assert cost_seconds(Use(100, 10, 1.0), OFFLOAD, link, link) == 0.0


def test_where_inputs_alone_are_too_many_they_go_down() -> None:
    uses = [block()] * 40
    policies = choose(uses, 2 * SAVED + 2 * INPUT, down=SLOW, up=SLOW)

    assert LEAST in policies
    assert choose(uses, SAVED // 2, down=SLOW, up=SLOW) is None


sizes = st.builds(
    lambda saved, part, seconds: Use(saved, int(saved * part), seconds),
    st.integers(0, 1000),
    st.floats(0, 1),
    st.floats(0, 10),
)


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 4000), st.floats(1, 1e4))
def test_a_choice_fits_and_is_made_where_one_for_all_fits(
    uses: list[Use], room: int, speed: float
) -> None:
    found = choose(uses, room, down=rate(speed), up=rate(speed))

    if found is not None:
        assert peak_bytes(uses, found) <= room
        return
    for policy in (KEEP, RECOMPUTE, OFFLOAD, LEAST):
        assert peak_bytes(uses, [policy] * (len(uses) - 1) + [KEEP]) > room


@given(
    st.lists(sizes, min_size=1, max_size=4),
    st.integers(0, 9000),
    st.floats(1, 1e4),
    st.integers(0, 3),
)
def test_what_earlier_forwards_left_under_the_same_choice_fits_too(
    uses: list[Use], room: int, speed: float, earlier: int
) -> None:
    found = choose(uses, room, down=rate(speed), up=rate(speed), earlier=earlier)

    if found is not None:
        stays = [use.left_bytes(p) for use, p in zip(uses, found, strict=True) if not p.offload]
        assert peak_bytes(uses, found) + earlier * sum(stays) <= room


def test_units_give_way_where_several_forwards_wait() -> None:
    uses = [block()] * 4

    assert choose(uses, 8 * SAVED, down=SLOW, up=SLOW) == [KEEP] * 4
    assert choose(uses, 8 * SAVED, down=SLOW, up=SLOW, earlier=1) == [KEEP] * 4
    assert RECOMPUTE in (choose(uses, 8 * SAVED, down=SLOW, up=SLOW, earlier=2) or [])


def test_the_last_unit_gives_way_where_forwards_wait_alone() -> None:
    """Of eleven that wait, each would hold all of it until its backward."""
    uses = [block()] * 4
    room = 11 * 4 * INPUT + SAVED + 4 * INPUT

    assert choose(uses, room, down=SLOW, up=SLOW, earlier=11) == [RECOMPUTE] * 4
    assert (choose(uses, 2 * SAVED, down=SLOW, up=SLOW) or [])[-1] == KEEP


def test_what_several_forwards_send_down_has_room_below() -> None:
    uses = [block()] * 4
    below = 3 * SAVED
    one = choose(uses, 2 * SAVED, down=FAST, up=FAST, below_bytes=below) or []
    two = choose(uses, 4 * SAVED, down=FAST, up=FAST, below_bytes=below, earlier=1) or []

    assert one.count(OFFLOAD) == 3
    assert two.count(OFFLOAD) == 1


policies = st.sampled_from([KEEP, RECOMPUTE, OFFLOAD, LEAST])


def plainly(uses: list[Use], chosen: list[Policy], working: int, end: int, overlaps: bool) -> int:
    """Return the peak by going through forward once."""
    held = top = next_bytes = 0
    for use, policy in zip(uses, chosen, strict=True):
        left = use.left_bytes(policy)
        again = max(0, use.saved_bytes - use.input_bytes) if policy.recompute else 0
        top = max(top, held + next_bytes + left + again)
        if not policy.offload:
            held += left
        elif overlaps:
            next_bytes = left
    return max(top + working, held + next_bytes + end)


@given(
    st.lists(st.tuples(sizes, policies), max_size=6),
    st.integers(0, 500),
    st.integers(0, 500),
    st.booleans(),
)
def test_the_peaks_of_what_is_ahead_are_those_of_a_forward_from_there(
    pairs: list[tuple[Use, Policy]], working: int, end: int, overlaps: bool
) -> None:
    uses, chosen = [use for use, _ in pairs], [policy for _, policy in pairs]
    found = peaks(uses, chosen, working, end_bytes=end, overlaps=overlaps)

    assert found == [
        plainly(uses[at:], chosen[at:], working, end, overlaps) for at in range(len(uses) + 1)
    ]


@given(st.lists(st.tuples(sizes, policies), min_size=1, max_size=5), st.data())
def test_a_unit_more_that_gives_way_never_raises_the_peak(
    pairs: list[tuple[Use, Policy]], data: st.DataObject
) -> None:
    """`choose` looks for the first choice that fits by halves."""
    uses, chosen = [use for use, _ in pairs], [policy for _, policy in pairs]
    at = data.draw(st.sampled_from(range(len(uses))))
    smaller = {KEEP: (OFFLOAD,), RECOMPUTE: (LEAST,)}.get(chosen[at], ())
    if chosen[at] == KEEP and uses[at].saved_bytes > uses[at].input_bytes:
        smaller = (OFFLOAD, RECOMPUTE)
    for policy in smaller:
        assert peak_bytes(uses, [*chosen[:at], policy, *chosen[at + 1 :]]) <= peak_bytes(
            uses, chosen
        )


def test_choosing_is_linear_in_the_units() -> None:
    def chosen(n_units: int) -> int:
        uses = [block()] * n_units
        room = 2 * SAVED + 2 * INPUT  # the very last choice that there is
        return lines_of(lambda: choose(uses, room, down=SLOW, up=SLOW))

    assert chosen(400) < 1.6 * 8 * chosen(50)  # by halves: three times more for eight times as many


# -- room below ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_below", [0, 1, 2, 5])
def test_no_more_units_offload_than_there_is_room_for_below(n_below: int) -> None:
    uses = [block()] * 6
    below = n_below * SAVED + SAVED // 2

    policies = choose(uses, 3 * SAVED, down=FAST, up=FAST, below_bytes=below)

    assert policies is not None
    assert policies.count(OFFLOAD) <= n_below
    assert excess_bytes(uses, policies, below) == 0
    assert peak_bytes(uses, policies) <= 3 * SAVED


def test_what_may_not_be_computed_again_does_not_fit_without_room_below() -> None:
    uses = [Use(SAVED, INPUT, 1.0, again=False)] * 6

    assert choose(uses, 3 * SAVED, down=FAST, up=FAST) is not None
    assert choose(uses, 3 * SAVED, down=FAST, up=FAST, below_bytes=SAVED) is None
    assert excess_bytes(uses, [OFFLOAD] * 5 + [KEEP], SAVED) == 4 * SAVED
