"""What the table of plans says of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.planned import in_order, lanes
from hetero.events import Event

NS = 10**9


def event(
    what: str, begin: float, end: float, lane: str = "", why: str = "", bucket: int = -1
) -> Event:
    """Return an event of step 3, in forward, by its times in seconds."""
    times = round(begin * NS), round((end - begin) * NS)
    return Event(0, *times, what, 3, "forward", lane, "", -1, bucket, 0, "", why, -1)


def planned(events: list[Event], seconds: float, **shares: float) -> Any:
    """Return a plan of which only that much is known."""
    run = SimpleNamespace(events=events)
    named = {f"{name}_seconds": value for name, value in shares.items()}
    return SimpleNamespace(step_seconds=seconds, shares=named, rehearsal=SimpleNamespace(run=run))


def test_a_step_takes_at_least_its_longest_lane_before_and_after_the_end_of_forward() -> None:
    """Updates have to end before forward does, and gradients go down after it."""
    events = [
        event("phase", 0, 10, why="forward"),
        event("update", 21, 26, "update", bucket=1),  # after its end: the step before began with it
        event("update", 4, 9, "update", bucket=2),  # on another thread
        event("move", 2, 4, "h2d"),
        event("move", 9, 12, "h2d"),  # some of it after the end of forward
        event("move", 12, 18, "d2h"),
        event("phase", 10, 21, why="backward"),
    ]
    found = planned(
        *(events, 21.0),
        compute_forward=2.0,
        rest_forward=0.5,
        wait_update=7.5,
        compute_backward=7.0,
        step=0.25,
    )
    assert lanes(found) == pytest.approx({"update": 9, "h2d": 5, "d2h": 6, "compute": 9.75})
    assert in_order(found) == pytest.approx(9 + 7.25)


def test_the_last_update_is_followed_by_its_fetch_and_by_the_rest_of_forward() -> None:
    events = [
        event("update", 0, 4, "update", bucket=1),
        event("move", 4.5, 6, "h2d", bucket=1),
        event("update", 4, 9, "update", bucket=2),
        event("wait", 7, 10.5, why="h2d", bucket=2),
        event("move", 9.5, 10.5, "h2d", bucket=2),
        event("phase", 0, 12, why="forward"),
        event("phase", 12, 20, why="backward"),
    ]
    found = planned(events, 20.0, compute_forward=8.5, wait_h2d=3.5, compute_backward=8.0)
    assert in_order(found) == pytest.approx((9 + 1 + 1.5) + 8)
