"""Which homes begin on HBM because RAM does not hold them."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.plan.division import Hbm
from hetero.plan.placement import BucketHomes
from hetero.train.engine import hbm_homes

HBM = Hbm(total_bytes=100, buffer_bytes=0, least_bytes=1, granule_bytes=1)
PLAN: Any = None  # not looked at: its homes are given


@pytest.fixture(autouse=True)
def homes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [BucketHomes(number, 10) for number in range(20)]
    monkeypatch.setattr(hbm_homes, "movable_homes", lambda plan, *, is_cuda: found)


@pytest.mark.parametrize(
    ("short_bytes", "nvme", "n_homes"),
    [(40, False, 4), (40, True, 4), (1000, False, 9), (1000, True, 5)],
)
def test_they_leave_half_of_hbm_if_it_does_not_hold_all_and_a_disk_does(
    short_bytes: int, nvme: bool, n_homes: int
) -> None:
    assert len(hbm_homes.first_homes(PLAN, HBM, short_bytes, nvme=nvme)) == n_homes
