"""DTensors are paged: a tensor parallel model has plain torch's bits on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.testing.ranks import run_ranks
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import TensorRun, by_hetero, by_torch, difference


def compared(rank: int, run: TensorRun, settings: dict[str, Any]) -> tuple[list[str], Any]:
    expected = by_torch(run)
    found = by_hetero(run, **settings)
    return difference(found, expected), found.status


def check(run: TensorRun, n_ranks: int = 2, **settings: Any) -> None:
    for odd, status in run_ranks(n_ranks, compared, run, settings):
        assert not odd
        assert status.mode == "paged"
        assert status.evictions >= 3


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
def test_a_paged_tensor_parallel_model_is_plain_torchs(
    style: str, passes: int, clip: float | None, optimizer: str
) -> None:
    if (style, optimizer) == ("tp", "fused"):
        optimizer = "sgd"  # torch's fused rules refuse plain parameters next to DTensors
    check(TensorRun(style, optimizer, passes=passes, clip=clip))
