"""Whether a passage of updates through HBM is opened, kept or dropped."""

from __future__ import annotations

import pytest

from hetero.device import SimDevice
from hetero.errors import StateError
from hetero.jobs import Job, Portable
from hetero.train.engine.paged import Paged
from hetero.train.engine.passing import PATIENCE, Passing, Trust
from hetero.train.update.pace import UpdatePace
from hetero.train.update.passage import MOST_NUMEL, N_SLOTS, passage_bytes, slot_numel
from tests.equivalence.blocks import Run


def passing(monkeypatch: pytest.MonkeyPatch) -> tuple[Passing, UpdatePace]:
    """Return the passage of a model, as if nothing had asked for it, and the pace of updates."""
    run = Run(SimDevice(), homes_on_hbm=False, passing=0.1, precision="bf16")
    run.step(0)
    residence = run.engine.residence
    assert isinstance(residence, Paged) and residence.trained.stepper is not None
    monkeypatch.setattr(run.engine.setup.tuning, "passing", None)
    found = residence.hbm.rehoming.passing
    found.apply(0)
    found.trust = Trust.UNTRIED
    found.choose(0.0, 1.0)
    return found, residence.trained.stepper.pace


@pytest.mark.parametrize(
    ("share", "gain", "wanted"), [(0.3, 0.8, True), (0.3, 0.99, False), (0.01, 0.8, False)]
)
def test_it_is_wanted_where_a_step_gets_shorter(
    share: float, gain: float, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = passing(monkeypatch)
    assert found.may_be_chosen and not found.wanted_bytes
    found.choose(share, gain)
    assert bool(found.wanted_bytes) == wanted == found.is_trying


@pytest.mark.parametrize(("seconds", "trust"), [(0.85, Trust.KEPT), (0.95, Trust.DROPPED)])
def test_it_is_kept_if_updates_were_faster_with_it(
    seconds: float, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, pace = passing(monkeypatch)
    found.choose(0.3, 0.8)
    found.apply(found.wanted_bytes)
    assert found.n_bytes and found.trust is Trust.TRIED and found.is_trying
    found.judge()
    assert found.trust is Trust.TRIED  # nothing was measured yet
    pace.seconds_per_numel, pace.passing = 1.0, seconds
    found.judge()
    assert found.trust is trust and not found.is_trying
    assert bool(found.wanted_bytes) == (trust is Trust.KEPT)
    found.judge()
    assert found.trust is trust


def test_it_is_dropped_if_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = passing(monkeypatch)
    found.choose(0.3, 0.8)
    for _ in range(PATIENCE + 1):
        found.judge()
        assert found.trust is not Trust.DROPPED
        found.apply(found.wanted_bytes)
    found.judge()
    assert found.trust is Trust.DROPPED and not found.may_be_chosen
    found.choose(0.3, 0.8)
    assert not found.wanted_bytes
    found.apply(found.wanted_bytes)
    assert not found.n_bytes


def test_what_was_dropped_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = passing(monkeypatch)
    found.trust = Trust.DROPPED
    with pytest.raises(StateError, match="dropped became tried"):
        found._move(Trust.TRIED)


def test_slots_hold_slices_of_so_many_elements() -> None:
    for room in (0, 1000, 10**5, 10**7, 10**9):
        numel = slot_numel(room, 14)
        assert numel <= MOST_NUMEL and (not numel or passage_bytes(numel, 14) <= room)
    assert slot_numel(10**9, 14) == MOST_NUMEL
    assert passage_bytes(MOST_NUMEL, 14) >= N_SLOTS * MOST_NUMEL * 14


def test_the_pace_of_steps_in_which_updates_may_pass_is_apart() -> None:
    pace = UpdatePace()
    pace.note(0.0, 4.0, 2)
    pace.close()
    pace.note(4.0, 5.0, 2, passes=True)
    pace.note(4.5, 6.0, 2)
    pace.close()
    assert (pace.seconds_per_numel, pace.passing) == (2.0, 0.5)


def test_a_step_that_touches_pages_or_compiles_kernels_is_no_measure_of_others() -> None:
    pace = UpdatePace(warms=True)
    found = []
    for seconds, passes in ((9.0, False), (4.0, False), (8.0, True), (2.0, True), (6.0, False)):
        pace.note(0.0, seconds, 2, passes=passes)
        pace.close()
        found.append((pace.seconds_per_numel, pace.passing))
    assert found == [(None, None), (2.0, None), (2.0, None), (2.0, 1.0), (3.0, 1.0)]


def test_carriers_take_the_last_slices_and_a_failed_one_ends_the_job() -> None:
    done: list[str] = []

    def fails() -> None:
        raise RuntimeError("lost")

    slices = [
        Portable(lambda: done.append("a"), fails, 1),
        Portable(lambda: done.append("b"), lambda: done.append("carried"), 1),
    ]
    job = Job([lambda: done.append("whole")], portable=slices)
    assert job.help(carries=True) and job.help()
    assert done == ["carried", "whole"] and not job.done
    assert job.help(carries=True) and job.failed and not job.is_portable
    with pytest.raises(RuntimeError, match="lost"):
        job.wait()
    assert not job.help() and not job.help(carries=True)
