"""Ranks that gather, on batches of unlike sizes: activations grow on one of them alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hetero
from hetero.testing.ranks import run_ranks
from tests.ranks import models
from tests.ranks.models import Run, assert_same

UNLIKE = Run(one_sided=False, rows=(2, 8, 5, 24), clip=None, steps=5)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("hbm", [90_000, 160_000])
@pytest.mark.parametrize("activations", ["auto", "keep", "offload", "recompute"])
def test_ranks_that_gather_train_on_batches_of_unlike_sizes(
    activations: str, hbm: int, passes: int, n_ranks: int
) -> None:
    """A rank with a large batch asks the others to give up frames with it."""
    settings = {**UNLIKE.settings, "hbm": hbm, "activations": activations}
    run = replace(UNLIKE, settings=settings, passes=passes)
    expected = models.by_torch(run, n_ranks)
    for each in run_ranks(n_ranks, models.by_ranks, run):
        assert_same(each, expected)
        assert each.status.evictions > 0 or hbm > 90_000


def reads(rank: int, n_ranks: int, gathers: bool) -> tuple[list[torch.Tensor], int]:
    """Return what a model that is not trained makes of batches that grow on one rank at a time."""
    model, _ = models.built(UNLIKE)
    settings = {"mesh": "world", "device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
    prepared = hetero.prepare(model, gather_shares=gathers, **settings)
    found = []
    for step in range(12):
        rows = (2, 40, 5, 2, 2, 60)[(step // 2 + rank) % 6]
        with torch.no_grad():
            found.append(prepared(batch_of(rows, step, rank)))
    return found, hetero.status(prepared).evictions


def batch_of(rows: int, step: int, rank: int) -> torch.Tensor:
    return torch.randn(rows, 10, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "read"])
def test_forwards_of_ranks_that_gather_take_batches_of_unlike_sizes(gathers: bool) -> None:
    plain, _ = models.built(UNLIKE)
    for rank, (found, evictions) in enumerate(run_ranks(2, reads, 2, gathers)):
        assert evictions > 0
        for step, output in enumerate(found):
            rows = (2, 40, 5, 2, 2, 60)[(step // 2 + rank) % 6]
            assert torch.equal(output, plain(batch_of(rows, step, rank)))
