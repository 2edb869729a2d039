"""The frame map, against a model that paints every frame with its owner."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hetero.errors import StateError
from hetero.memory.frame import FrameMap, FramePlace, FrameRun

FREE = -1
Worths = dict[int, "tuple[float, float] | None"]


def ranked(worths: Worths) -> list[Any]:
    """Return who may leave, worth most first."""
    pairs = ((worth, owner) for owner, worth in worths.items() if worth is not None)
    return sorted(pairs, reverse=True)


def by_use(*uses: float) -> list[Any]:
    """Return owners 0, 1, ..., by their next uses, furthest first."""
    return ranked({owner: (use, 0.0) for owner, use in enumerate(uses)})


class Painted:
    """The naive model: one cell per frame, holding its owner or FREE."""

    def __init__(self, limit: int) -> None:
        self.cells = [FREE] * limit

    def take(self, owner: int, start: int, length: int) -> None:
        self.cells[start : start + length] = [owner] * length

    def drop(self, owner: int) -> None:
        self.cells = [FREE if cell == owner else cell for cell in self.cells]

    def owners(self, start: int, length: int) -> list[int]:
        """Return who holds frames of a window, in address order."""
        held = self.cells[max(start, 0) : max(start + length, 0)]
        return list(dict.fromkeys(cell for cell in held if cell != FREE))

    def free_starts(self, length: int) -> list[int]:
        last = len(self.cells) - length
        return [s for s in range(last + 1) if not self.owners(s, length)]

    def best(self, length: int, worth: Worths) -> tuple[tuple[float, float], int] | None:
        """Return the best (nearest next use, minus evicted frames) over every single window."""
        scores = []
        for start in range(len(self.cells) - length + 1):
            owners = self.owners(start, length)
            values = [worth[owner] for owner in owners]
            if None not in values:
                frames = sum(self.cells.count(owner) for owner in owners)
                scores.append((min(v for v in values if v is not None), -frames))
        return max(scores, default=None)


class FrameMachine(RuleBasedStateMachine):
    """Takes, drops and places runs in both."""

    @initialize(limit=st.integers(1, 24))
    def start(self, limit: int) -> None:
        self.map = FrameMap(limit)
        self.model = Painted(limit)
        self.held: set[int] = set()

    @rule(owner=st.integers(0, 7), start=st.integers(-2, 23), length=st.integers(1, 9))
    def take(self, owner: int, start: int, length: int) -> None:
        if start + length > self.map.limit:
            return
        if owner in self.held or start < 0 or self.model.owners(start, length):
            with pytest.raises(StateError, match="overlap"):
                self.map.take(owner, start, length)
            return
        self.map.take(owner, start, length)
        self.model.take(owner, start, length)
        self.held.add(owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.map.drop(owner)
        self.model.drop(owner)
        self.held.discard(owner)

    @rule(length=st.integers(1, 26), data=st.data())
    def place(self, length: int, data: st.DataObject) -> None:
        values = st.one_of(st.none(), st.tuples(st.integers(0, 4), st.integers(-4, 0)))
        worth = {owner: data.draw(values) for owner in sorted(self.held)}
        high = data.draw(st.booleans())
        place = self.map.place(length, ranked(worth), high=high)
        free = self.model.free_starts(length)
        if free:
            assert place == FramePlace(free[-1 if high else 0], ())
            return
        best = self.model.best(length, worth)
        if best is None:
            assert place is None
            return
        assert place is not None
        assert 0 <= place.start <= self.map.limit - length
        assert list(place.evict) == self.model.owners(place.start, length)
        frames = sum(self.model.cells.count(owner) for owner in place.evict)
        assert (min(worth[owner] for owner in place.evict), -frames) == best

    @rule(start=st.integers(-3, 25), length=st.integers(1, 12))
    def look(self, start: int, length: int) -> None:
        found = self.map.overlapping(start, length)

        assert [run.owner for run in found] == self.model.owners(start, length)

    @invariant()
    def the_two_agree(self) -> None:
        painted = Painted(self.map.limit)
        for run in self.map.runs:
            assert 0 <= run.start < run.end <= self.map.limit
            assert painted.owners(run.start, run.length) == []
            painted.take(run.owner, run.start, run.length)
        assert painted.cells == self.model.cells
        assert [run.start for run in self.map.runs] == sorted(run.start for run in self.map.runs)
        assert self.map.end == max(
            (i + 1 for i, c in enumerate(painted.cells) if c != FREE), default=0
        )
        assert self.map.used == self.map.limit - self.model.cells.count(FREE)


TestFrameMachine = FrameMachine.TestCase
TestFrameMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=200, stateful_step_count=30
)


def test_an_empty_map_places_at_the_low_end() -> None:
    assert FrameMap(10).place(4, ()) == FramePlace(0, ())


def test_a_run_longer_than_the_map_has_no_place() -> None:
    assert FrameMap(10).place(11, ()) is None


def test_owners_who_may_not_leave_are_not_evicted() -> None:
    frames = FrameMap(4)
    frames.take(0, 0, 4)

    assert frames.place(1, ()) is None


def test_the_furthest_next_use_leaves_first() -> None:
    frames = FrameMap(6)
    for owner in range(3):
        frames.take(owner, 2 * owner, 2)

    assert frames.place(2, by_use(5.0, 9.0, 7.0)) == FramePlace(2, (1,))


def test_a_window_is_worth_what_its_nearest_use_is() -> None:
    frames = FrameMap(6)
    for owner in range(3):
        frames.take(owner, 2 * owner, 2)

    place = frames.place(4, by_use(1.0, 9.0, 3.0))

    assert place == FramePlace(2, (1, 2))


def test_equal_next_uses_are_told_apart_by_the_second_worth() -> None:
    frames = FrameMap(4)
    frames.take(0, 0, 2)
    frames.take(1, 2, 2)

    assert frames.place(2, ranked({0: (0.0, -5.0), 1: (0.0, -1.0)})) == FramePlace(2, (1,))
    assert frames.place(2, ranked({0: (0.0, -1.0), 1: (0.0, -5.0)})) == FramePlace(0, (0,))


def test_of_equal_worth_the_window_that_evicts_fewest_frames_is_taken() -> None:
    frames = FrameMap(5)
    frames.take(0, 0, 4)
    frames.take(1, 4, 1)

    assert frames.place(1, by_use(1.0, 1.0)) == FramePlace(4, (1,))


def test_free_frames_beside_a_run_count_towards_the_window() -> None:
    frames = FrameMap(8)
    frames.take(0, 3, 2)

    assert frames.place(5, by_use(1.0)) == FramePlace(0, (0,))


def test_the_same_owner_cannot_hold_two_runs() -> None:
    frames = FrameMap(8)
    frames.take(0, 0, 2)

    with pytest.raises(StateError, match="bucket 0"):
        frames.take(0, 4, 2)


def test_a_run_that_reaches_into_others_by_one_frame_overlaps_them() -> None:
    frames = FrameMap(8)
    frames.take(0, 0, 3)

    assert [run.owner for run in frames.overlapping(2, 4)] == [0]
    assert frames.overlapping(3, 4) == []


def test_frames_that_become_free_side_by_side_are_one_gap() -> None:
    frames = FrameMap(8)
    for owner, start, length in ((0, 0, 3), (1, 3, 3), (2, 6, 2)):
        frames.take(owner, start, length)

    frames.drop(0)
    frames.drop(1)

    assert frames.place(6, ()) == FramePlace(0, ())


def test_a_run_ends_where_its_length_says() -> None:
    assert FrameRun(3, 4, owner=0).end == 7


@given(st.integers(1, 30), st.lists(st.integers(1, 5), max_size=8))
@settings(derandomize=True, deadline=None)
def test_runs_placed_one_after_another_leave_no_gaps(limit: int, lengths: list[int]) -> None:
    frames = FrameMap(limit)
    for owner, length in enumerate(lengths):
        place = frames.place(length, ())
        if place is None:
            assert frames.used + length > limit
            break
        assert place.start == frames.used
        frames.take(owner, place.start, length)
