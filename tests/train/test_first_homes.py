"""Which homes are on HBM for good, because RAM and disk do not hold them."""

from __future__ import annotations

import pytest

from hetero.plan.division import Hbm
from hetero.plan.placement import BucketHomes
from hetero.train.engine.hbm_homes import first_homes

HBM = Hbm(total_bytes=100, buffer_bytes=0, least_bytes=1, granule_bytes=1)
HOMES = [BucketHomes(number, 10) for number in range(20)]


@pytest.mark.parametrize(("short_bytes", "n_homes"), [(0, 0), (40, 4), (41, 5), (1000, 9)])
def test_they_leave_room_for_a_few_units(short_bytes: int, n_homes: int) -> None:
    assert len(first_homes(HOMES, HBM, short_bytes)) == n_homes
