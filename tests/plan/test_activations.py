"""The choice among keeping, computing again and sending down."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero.plan.activations import (
    KEEP,
    LEAST,
    OFFLOAD,
    RECOMPUTE,
    Use,
    choose,
    cost_seconds,
    peak_bytes,
)

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
