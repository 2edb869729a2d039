"""Every model of the zoo trains bit for bit as it does without hetero."""

from __future__ import annotations

import zlib

import pytest

from hetero.device import SimDevice
from hetero.jobs import Worker
from hetero.train.engine.tuning import Tuning
from tests.equivalence.harness import adamw, compare, measure, sgd, smallest
from tests.equivalence.zoo import CASES, Case


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_model_trains_bitwise_at_its_smallest_budget(case: Case) -> None:
    budget = measure(case, sgd, 256)
    at_once = Tuning(worker=Worker(0))  # or what is fetched anew would depend on threads' timing
    seen = smallest(
        case,
        budget,
        lambda hbm: compare(case, sgd, hbm=hbm, chunk_bytes=256, tuning=at_once, steps=6),
    )
    assert seen.mode == "paged"
    assert seen.chunks >= 5
    assert seen.evictions >= 3
    assert seen.fetches > seen.chunks // 16  # views that are kept keep their frames


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_model_trains_bitwise_on_deferred_copies(case: Case) -> None:
    budget = measure(case, adamw, 512, devices=("cpu:sim",))
    device = SimDevice(seed=zlib.crc32(case.name.encode()), checked=True)
    seen = smallest(
        case,
        budget,
        lambda hbm: compare(
            case, adamw, hbm=hbm + budget.params // 4, chunk_bytes=512, device=device
        ),
    )
    assert seen.mode == "paged"
    assert seen.evictions >= 3
