"""Every model of the zoo trains on a CUDA device bit for bit as without hetero, and in order."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import pytest

from tests.emulator import fake
from tests.emulator.harness import adamw, assert_no_pageable_copies, check_smallest, sgd, zoo
from tests.equivalence.harness import MakeOptimizer
from tests.equivalence.zoo import CASES, Case

NOT_HERE = {"recurrent"}  # CUDA's own kernels for these cells are not emulated


class Way(NamedTuple):
    make: MakeOptimizer
    settings: dict[str, Any]


WAYS = {
    "keep": Way(sgd, {"activations": "keep"}),
    "recompute": Way(adamw, {"activations": "recompute"}),
    "offload": Way(adamw, {"activations": "offload"}),
    "auto": Way(sgd, {}),
}
ROWS = [
    pytest.param(case, way, id=f"{case.name}-{way}")
    for case in CASES
    for way in WAYS
    if case.name not in NOT_HERE
]


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize(("case", "way"), ROWS)
def test_a_model_trains_in_order_and_bitwise(case: Case, way: str, watched: None) -> None:
    fake.start(seed=zlib.crc32(f"{case.name} {way}".encode()))
    make, settings = WAYS[way]
    seen = check_smallest(zoo(case, make), **settings)
    assert seen.counts["fetch"] > 3
    assert seen.counts["evict"] + seen.counts["discard"] > 3
    assert_no_pageable_copies()
