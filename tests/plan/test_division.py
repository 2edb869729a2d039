"""The division of HBM: every byte once, activations first, frames in what is left."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.plan.activations import KEEP, OFFLOAD
from hetero.plan.division import WIDEST, WORTH, Hbm, divide
from hetero.plan.placement import BucketHomes


@st.composite
def hbms(draw: st.DrawFn) -> Hbm:
    granule = draw(st.sampled_from([1, 64, 4096, 2**21]))
    least = draw(st.integers(1, 64)) * granule
    buffers, more = draw(st.integers(0, 2**24)), draw(st.integers(0, 2**34))
    return Hbm(buffers + least + more, buffers, least, granule)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Hbm, int, int, int]:
    """An HBM, what activations need of it, the useful ring, and the frames that there are."""
    hbm = draw(hbms())
    need = draw(st.integers(0, hbm.room_bytes))
    ring = draw(st.integers(0, 2**30))
    return hbm, need, ring, draw(st.integers(hbm.fewest_frames, hbm.frames(0)))


@given(cases(), st.booleans())
def test_nothing_is_given_twice_and_everyone_has_what_it_must_have(
    case: tuple[Hbm, int, int, int], keeps: bool
) -> None:
    hbm, need, ring, frames = case
    found = divide(hbm, need, ring_bytes=ring, frames=frames, keeps=keeps)
    taken = found.buffer_bytes + found.moving_bytes + found.frames * hbm.granule_bytes
    assert taken <= hbm.total_bytes
    assert found.activation_bytes == need
    assert 0 <= found.ring_bytes <= ring
    assert found.frames >= hbm.fewest_frames


@given(cases(), st.integers(0, 2**24))
def test_the_passage_of_updates_comes_after_the_ring_and_is_whole_or_nothing(
    case: tuple[Hbm, int, int, int], passage: int
) -> None:
    hbm, need, ring, frames = case
    found = divide(hbm, need, ring_bytes=ring, frames=frames, passage_bytes=passage)
    taken = found.buffer_bytes + found.moving_bytes + found.passage_bytes
    assert taken + found.frames * hbm.granule_bytes <= hbm.total_bytes
    without = divide(hbm, need, ring_bytes=ring, frames=frames)
    fits = without.moving_bytes + passage <= hbm.room_bytes
    assert found.passage_bytes == (passage if fits else 0)
    assert found.frames >= hbm.fewest_frames and found.ring_bytes == without.ring_bytes


@given(cases())
def test_less_than_a_frame_is_left_over_where_frames_may_be_planned_anew(
    case: tuple[Hbm, int, int, int],
) -> None:
    hbm, need, ring, frames = case
    found = divide(hbm, need, ring_bytes=ring, frames=frames)
    taken = found.buffer_bytes + found.moving_bytes + found.frames * hbm.granule_bytes
    assert hbm.total_bytes - taken < hbm.granule_bytes


@given(cases())
def test_frames_that_are_kept_are_those_there_were_and_give_way_all_the_same(
    case: tuple[Hbm, int, int, int],
) -> None:
    hbm, need, ring, frames = case
    anew = divide(hbm, need, ring_bytes=ring, frames=frames)
    kept = divide(hbm, need, ring_bytes=ring, frames=frames, keeps=True)
    if anew.frames <= frames:
        assert kept == anew
    else:
        assert kept.frames in (frames, anew.frames)
        won = (anew.frames - frames) * hbm.granule_bytes
        if won > max(hbm.most_bytes // WORTH, hbm.least_bytes):
            assert kept == anew


@given(cases(), st.integers(0, 2**30))
def test_who_needs_more_leaves_no_more_to_the_others(
    case: tuple[Hbm, int, int, int], more: int
) -> None:
    hbm, need, ring, _ = case
    larger = min(need + more, hbm.room_bytes)
    before, after = (divide(hbm, n, ring_bytes=ring) for n in (need, larger))
    assert after.ring_bytes <= before.ring_bytes
    assert after.frames <= before.frames


@given(hbms())
def test_what_does_not_fit_with_the_fewest_frames_is_no_division(hbm: Hbm) -> None:
    assert divide(hbm, hbm.room_bytes).frames == hbm.fewest_frames
    with pytest.raises(ValueError, match="activations"):
        divide(hbm, hbm.room_bytes + 1)


def test_a_division_does_not_change_with_the_policies_that_it_was_made_for() -> None:
    policies = {0: KEEP}
    found = divide(Hbm(100, 10, 20, 10), 30, policies=policies)
    policies[0] = OFFLOAD
    assert found.policies == {0: KEEP}
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.frames = 1


@given(cases(), st.integers(0, 2**20), st.booleans())
def test_frames_that_would_stay_empty_are_not_made(
    case: tuple[Hbm, int, int, int], useful: int, keeps: bool
) -> None:
    hbm, need, ring, frames = case
    most = max(useful, hbm.fewest_frames)
    hbm = dataclasses.replace(hbm, useful_frames=most)
    found = divide(hbm, need, ring_bytes=ring, frames=min(frames, most), keeps=keeps)
    assert found.frames <= most


@given(cases(), st.lists(st.integers(1, 2**33), max_size=12), st.booleans(), st.data())
def test_homes_take_what_activations_and_a_few_frames_leave(
    case: tuple[Hbm, int, int, int], sizes: list[int], keeps: bool, data: st.DataObject
) -> None:
    hbm, need, ring, frames = case
    homes = [BucketHomes(bucket, n_bytes) for bucket, n_bytes in enumerate(sizes)]
    there = frozenset(data.draw(st.sets(st.integers(0, max(0, len(sizes) - 1)))) if sizes else ())
    found = divide(
        *(hbm, need), ring_bytes=ring, frames=frames, keeps=keeps, homes=homes, on_hbm=there
    )

    taken = found.buffer_bytes + found.moving_bytes + found.home_bytes
    assert taken + found.frames * hbm.granule_bytes <= hbm.total_bytes
    assert found.home_bytes == sum(h.n_bytes for h in homes if h.bucket in found.on_hbm)
    assert found.activation_bytes == need and found.frames >= hbm.fewest_frames
    if found.on_hbm:  # fetches go on beside compute
        assert hbm.total_bytes - taken >= 2 * hbm.least_bytes


@given(cases(), st.lists(st.integers(1, 2**33), min_size=1, max_size=12), st.data())
def test_units_that_page_have_frames_for_a_few_of_the_widest_of_them(
    case: tuple[Hbm, int, int, int], sizes: list[int], data: st.DataObject
) -> None:
    hbm, need, ring, _ = case
    fewest = st.integers(1, hbm.fewest_frames)
    units = tuple({b: data.draw(fewest) * hbm.granule_bytes} for b in range(len(sizes)))
    hbm = dataclasses.replace(hbm, units=units)
    homes = [BucketHomes(bucket, n_bytes) for bucket, n_bytes in enumerate(sizes)]
    found = divide(hbm, need, ring_bytes=ring, homes=homes)
    if found.on_hbm:
        left = hbm.most_bytes - found.moving_bytes - found.home_bytes
        paged = [n for pins in units for b, n in pins.items() if b not in found.on_hbm]
        assert left >= max(hbm.least_bytes, WIDEST * max(paged, default=0))


def test_frames_of_a_wide_unit_that_is_read_at_home_are_room_for_other_homes() -> None:
    homes = [BucketHomes(0, 500), *(BucketHomes(bucket, 150) for bucket in (1, 2, 3))]
    plain = Hbm(1000, 0, 100, 1)
    hbm = dataclasses.replace(plain, units=({0: 100}, {1: 10}, {2: 10}, {3: 10}))
    assert divide(plain, 0, homes=homes).on_hbm == {0, 1}
    assert divide(hbm, 0, homes=homes).on_hbm == {0, 1, 2}
    assert divide(hbm, 450, homes=homes).on_hbm == {1}  # frames for three of the widest


def test_frames_that_let_fetches_overlap_are_worth_a_new_plan() -> None:
    hbm = Hbm(1000, 0, 10, 1)
    few = divide(hbm, 960, frames=10, keeps=True)
    enough = divide(hbm, 960, frames=WIDEST * 10, keeps=True)
    assert (few.frames, enough.frames) == (40, 30)
