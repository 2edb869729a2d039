"""Keeping, computing again and slicing change no number."""

from __future__ import annotations

import pytest

from tests.equivalence.harness import adamw, compare, measure, smallest
from tests.equivalence.zoo import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_model_trains_bitwise_when_every_unit_is_computed_again(case: Case) -> None:
    budget = measure(case, adamw, 512)

    seen = smallest(
        case,
        budget,
        lambda hbm: compare(case, adamw, hbm=hbm, chunk_bytes=512, activations="recompute"),
    )

    assert seen.mode == "paged"
