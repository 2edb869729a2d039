"""The time of a step, by where homes are and what becomes of activations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.plan.activations import KEEP, LEAST, OFFLOAD, RECOMPUTE, Use
from hetero.plan.weighing import Copies, Drive, Traffic, UnitStep, passing_share, step_seconds

FREE = Copies(lambda n: 0.0, lambda n: 0.0, lambda n: 0.0)
LINK = Copies(lambda n: n / 100, lambda n: n / 50, lambda n: n / 1000)
UNITS = 4


def stages(policy: Any = KEEP, saved: int = 0) -> list[UnitStep]:
    use = Use(saved, 0, forward_seconds=1.0)
    return [UnitStep(use, policy, [unit]) for unit in range(UNITS)]


def traffic(weights: int = 0, gradients: int = 0, update: float = 0.0) -> dict[int, Traffic]:
    return {unit: Traffic(weights, gradients, update, 500) for unit in range(UNITS)}


def test_compute_alone_takes_a_forward_and_a_backward() -> None:
    assert step_seconds(stages(), traffic(), (), FREE) == 3 * UNITS
    assert step_seconds(stages(RECOMPUTE), traffic(), (), FREE) == 4 * UNITS


def test_homes_on_the_device_are_updated_before_forward_and_cost_nothing_else() -> None:
    costly = traffic(weights=1000, gradients=1000, update=9.0)
    assert step_seconds(stages(), costly, range(UNITS), LINK) == 3 * UNITS + UNITS * 500 / 1000


def test_forward_waits_for_updates_one_after_the_other() -> None:
    assert step_seconds(stages(), traffic(update=5.0), (), FREE) == 5.0 * UNITS + 1 + 2 * UNITS


def test_updates_of_later_units_hide_in_the_forward_of_earlier_ones() -> None:
    assert (
        step_seconds(stages(), traffic(update=1.5), (0, 1), FREE) == 2 + 1 + 1 + 1 + 2 * UNITS - 1
    )


def test_a_drive_takes_its_time_for_what_homes_on_the_device_leave_there() -> None:
    drive = Drive(1200, seconds_per_byte=0.1)
    took = [step_seconds(stages(), traffic(), range(n), FREE, drive=drive) for n in range(4)]
    assert took == pytest.approx([120.0, 70.0, 20.0, 3 * UNITS])


def test_as_much_passes_through_hbm_as_lets_host_and_link_end_at_one_time() -> None:
    slow = traffic(weights=100, gradients=100, update=13.0)
    share = passing_share(slow, (), LINK)
    assert share == pytest.approx((13 - 1) / (13 + 8))  # 5 s up, 8 s down
    passing, alone = (step_seconds(stages(), slow, (), LINK, passing=s) for s in (share, 0.0))
    assert passing < alone


def test_nothing_passes_through_hbm_where_updates_are_faster_than_weights_go_up() -> None:
    assert passing_share(traffic(weights=100, update=1.0), (), LINK) == 0.0
    assert passing_share(traffic(weights=100, update=9.0), range(UNITS), LINK) == 0.0


def test_what_passes_takes_its_time_of_the_link() -> None:
    quick = traffic(weights=100, update=1.0)
    costs = [step_seconds(stages(), quick, (), LINK, passing=share) for share in (0.0, 0.5, 1.0)]
    assert costs == sorted(costs) and costs[0] < costs[2]


def test_early_updates_hide_in_backward_but_for_the_last_one() -> None:
    found = step_seconds(stages(), traffic(gradients=1, update=2.0), (), FREE, early=True)
    assert found == 3 * UNITS + 2.0


def test_weights_go_up_twice_but_for_those_that_are_there_still() -> None:
    found = step_seconds(stages(), traffic(weights=400), (), LINK)
    assert found == 4 * UNITS + 1 + 2 + 2 + 2 + 4  # the first unit's come 8 after forward


def test_gradients_go_down_while_earlier_units_compute() -> None:
    assert step_seconds(stages(), traffic(gradients=50), (), LINK) == 3 * UNITS + 1
    assert step_seconds(stages(), traffic(gradients=400), (), LINK) == UNITS + 2 + 8 * UNITS


def test_offloaded_activations_hold_up_the_unit_after_the_next() -> None:
    forward = step_seconds(stages(OFFLOAD, saved=200), traffic(), (), LINK) - (2 * UNITS + 2)
    assert forward == 1 + 4 + 4 + 1  # units 2 and 3 wait until two others have only one left


times = st.floats(0, 4)
sizes = st.integers(0, 400)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[UnitStep], dict[int, Traffic]]:
    policies = st.sampled_from([KEEP, RECOMPUTE, OFFLOAD, LEAST])
    found = [
        UnitStep(Use(n + draw(sizes), n, draw(times)), draw(policies), [unit, UNITS])
        for unit in range(UNITS)
        for n in [draw(sizes)]
    ]
    apart = {b: Traffic(draw(sizes), draw(sizes), draw(times), 0) for b in range(UNITS + 1)}
    return found, apart


@given(cases(), st.sets(st.integers(0, UNITS)), st.booleans())
def test_a_step_takes_as_long_as_its_busiest_lane_and_no_longer_than_all_in_turn(
    case: tuple[list[UnitStep], dict[int, Traffic]], held: set[int], early: bool
) -> None:
    found, apart = case
    left = [each for bucket, each in apart.items() if bucket not in held]
    compute = sum(s.forward_seconds + s.backward_seconds for s in found)
    update = sum(each.update_seconds for each in left)
    gone = sum(stage.offloaded_bytes for stage in found)
    down = LINK.down(gone + sum(each.gradient_bytes for each in left))
    up = LINK.up(gone + sum(each.weight_bytes for each in left))
    again = LINK.up(sum(each.weight_bytes for each in left))
    took = step_seconds(found, apart, held, LINK, early=early)
    assert took >= max(compute, update, down, up) - 1e-9
    assert took <= compute + update + down + up + again + 1e-9


@given(cases(), st.sets(st.integers(0, UNITS)), st.integers(0, UNITS), st.booleans())
def test_one_more_home_on_the_device_never_makes_a_step_longer_if_its_update_is_free(
    case: tuple[list[UnitStep], dict[int, Traffic]], held: set[int], more: int, early: bool
) -> None:
    found, apart = case
    fewer, most = (step_seconds(found, apart, h, LINK, early=early) for h in (held, held | {more}))
    assert most <= fewer + 1e-9


@pytest.mark.parametrize("early", [False, True])
def test_a_step_is_no_shorter_than_its_updates(early: bool) -> None:
    slow = traffic(gradients=1, update=9.0)
    assert step_seconds([], slow, (), FREE, early=early) == 0.0
    assert step_seconds(stages(), slow, (), FREE, early=early) >= 36.0
