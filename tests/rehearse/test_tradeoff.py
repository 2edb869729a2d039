"""What activations leave to homes on HBM makes steps about as short as they can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.placement import SHAPES, Shape, scene_for, seconds
from hetero.rehearse.rehearsal import rehearse
from hetero.train.update.pace import UpdatePace
from hetero.types import Tier

SHARES = (1 / 12, 1 / 6, 1 / 3, 2 / 3, 1.0)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.tokens}-{shape.hbm}")
def test_the_automatic_choice_is_near_the_best_of_others(shape: Shape) -> None:
    scene = scene_for(shape)
    found = rehearse(scene)
    others = [took for share in SHARES if (took := seconds(scene, share)) is not None]
    assert found.error is None and found.steps[-1].is_decided
    assert found.step_seconds <= 1.05 * min(others)
    assert found.step_seconds < 0.95 * max(others)  # it matters


@pytest.mark.slow
def test_a_plan_takes_no_ram_that_the_machine_has_not() -> None:
    scene = scene_for(SHAPES[2])
    peak = rehearse(scene).peaks[Tier.HOST]
    ram = replace(scene.profile.host.ram_bytes, value=peak - 2**30)
    profile = replace(scene.profile, host=replace(scene.profile.host, ram_bytes=ram))
    found = rehearse(replace(scene, profile=profile))
    assert found.error is None
    assert found.peaks[Tier.HOST] <= peak - 2**30


def test_a_pace_counts_times_in_which_updates_ran_once() -> None:
    pace = UpdatePace()
    assert pace.seconds_per_numel is None
    for began, ended, numel in ((5.0, 7.0, 10), (1.0, 2.0, 10), (6.0, 6.5, 5), (6.5, 8.0, 15)):
        pace.note(began, ended, numel)
    pace.close()
    assert pace.seconds_per_numel == 4.0 / 40
    pace.close()
    assert pace.seconds_per_numel == 4.0 / 40
