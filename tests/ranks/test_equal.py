"""N ranks are one rank with N micro-batches, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from hetero.testing.ranks import run_ranks
from tests.ranks.models import OPTIMIZERS, Run, assert_same, by_one_rank, by_ranks, by_torch

pytestmark = pytest.mark.usefixtures("short_parts")
TIGHT = {"device": "cpu:sim", "hbm": 50_000, "chunk_bytes": 1024}
ROOMY = {"device": "cpu:sim", "hbm": 400_000, "chunk_bytes": 4096}


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("settings", [TIGHT, ROOMY, {"device": "cpu"}], ids=["few", "all", "cpu"])
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_ranks_are_micro_batches(
    n_ranks: int,
    optimizer: str,
    passes: int,
    clip: float | None,
    one_sided: bool,
    settings: dict[str, Any],
) -> None:
    run = Run(optimizer, passes=passes, clip=clip, settings=settings, one_sided=one_sided)
    expected = by_torch(run, n_ranks)
    for found in run_ranks(n_ranks, by_ranks, run):
        assert_same(found, expected)
        assert found.status.mode == "paged"
        assert found.status.evictions >= 3 or settings is not TIGHT


def test_ranks_whose_gloo_takes_no_lists_are_micro_batches_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.11."""

    def lists(*_: Any, **__: Any) -> None:
        raise RuntimeError("Backend gloo does not support alltoall")

    monkeypatch.setattr(dist, "all_to_all", lists)
    run = Run("adamw", passes=2, clip=0.5, settings=TIGHT, one_sided=False)
    expected = by_torch(run, 3)
    for found in run_ranks(3, by_ranks, run):
        assert_same(found, expected)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("frozen", ["keep", "int8", "nf4"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_working_weights_and_codes_are_shared(n_ranks: int, precision: str, frozen: str) -> None:
    settings = {**TIGHT, "hbm": 80_000, "precision": precision, "frozen": frozen}
    run = Run(passes=2, frozen=(1, 2), settings=settings)
    expected = by_one_rank(run, n_ranks)
    for found in run_ranks(n_ranks, by_ranks, run):
        assert_same(found, expected)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_block_that_no_rank_or_one_rank_skips_gets_the_gradients_there_are(n_ranks: int) -> None:
    by_all = {(1, rank): 2 for rank in range(n_ranks)}
    run = Run(skips={(0, 0): 1, **by_all, (2, 1): 0, (3, n_ranks - 1): 3}, settings=TIGHT)
    expected = by_torch(run, n_ranks)
    for found in run_ranks(n_ranks, by_ranks, run):
        assert_same(found, expected)
