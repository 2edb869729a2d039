"""Ranks with budgets of their own, of which one could keep its parameters where they compute, and
another has to page: all have the bits of plain torch, and none waits for what others do not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import hetero
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.testing.ranks import run_ranks
from hetero.train.engine.tuning import Tuning
from tests.ranks.models import OPTIMIZERS, Run, assert_same, by_ranks, by_torch
from tests.ranks.tensor_models import (
    LM,
    TensorRun,
    built,
    by_hetero,
    difference,
    masters_by_torch,
    mesh_of,
    plan_of,
    torch_clip,
    train,
    weights_of,
)
from tests.ranks.tensor_models import (
    by_torch as tensors_by_torch,
)

FEW: dict[str, Any] = {"device": "cpu", "hbm": 26_000}
ALL: dict[str, Any] = {"device": "cpu", "hbm": None}
FITS: dict[str, Any] = {"device": "cpu", "hbm": 400_000}
"""Paged at first: that everything fits shows after a step."""
SOME = 325_000
"""RAM that does not hold all homes of a rank."""
MIXED = {
    "first has all": (ALL, FEW),
    "last has all": (FEW, ALL),
    "first fits": (FITS, FEW),
    "last fits": (FEW, FITS),
}


def compared(rank: int, run: TensorRun, kinds: tuple[dict[str, Any], ...]) -> tuple[list[str], Any]:
    expected = tensors_by_torch(run)
    found = by_hetero(run, **kinds[rank])
    return difference(found, expected), found.status


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("kinds", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    ("style", "optimizer"),
    [
        ("tp", "adamw"),
        ("sequence", "adamw"),
        ("vocabulary", "sgd"),
        ("tp", "lamb"),
        ("sequence", "lars"),
    ],
)
def test_a_rank_with_room_for_all_pages_as_the_others_of_its_tensors_do(
    style: str, optimizer: str, clip: float | None, passes: int, kinds: Any
) -> None:
    run = TensorRun(style, optimizer, passes=passes, clip=clip)
    found = run_ranks(2, compared, run, kinds)
    for odd, status in found:
        assert not odd
        assert status.mode == "paged"


def compared_masters(rank: int, run: TensorRun, kinds: tuple[dict[str, Any], ...]) -> list[str]:
    expected = masters_by_torch(run)
    given = {**run.settings, "precision": "bf16", **kinds[rank]}
    model, optimizer = hetero.prepare(*built(run), **given)
    found = train(model, optimizer, run, lambda _, most: optimizer.clip_grad_norm_(most))
    hetero.release(model, optimizer)
    found.weights, found.states = weights_of(model), {}  # masters
    return difference(found, expected)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("kinds", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
def test_masters_of_such_ranks_have_the_bits_of_a_plain_loop(style: str, kinds: Any) -> None:
    run = TensorRun(style, "sgd", passes=2, clip=0.05, steps=3)
    assert run_ranks(2, compared_masters, run, kinds) == [[], []]


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("kinds", [(ALL, FITS), (FITS, ALL)], ids=["first", "last"])
def test_ranks_of_a_tensor_stay_once_everything_fits_on_all(kinds: Any) -> None:
    for odd, status in run_ranks(2, compared, TensorRun("sequence", clip=0.05), kinds):
        assert not odd
        assert status.mode == "resident"


def deep(run: TensorRun) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose homes take more RAM than its largest update."""
    torch.manual_seed(0)
    model = LM(24)
    parallelize_module(model, mesh_of(run), plan_of(run.style, 24))
    return model, OPTIMIZERS[run.optimizer](model.parameters())


def with_disk(
    rank: int, run: TensorRun, kinds: tuple[dict[str, Any], ...]
) -> tuple[list[str], int]:
    """Return what differs from torch, and the bytes of states on disk."""
    expected = train(*deep(run), run, torch_clip)
    config = Config.load(**kinds[rank])
    model, optimizer = prepare_tuned(*deep(run), config, Tuning(extent_numel=1024))
    found = train(model, optimizer, run, lambda _, most: optimizer.clip_grad_norm_(most))
    n_bytes = hetero.status(model).tiers.get("NVME", {"state": 0})["state"]
    hetero.release(model, optimizer)
    return difference(found, expected), n_bytes


@pytest.mark.slow
@pytest.mark.parametrize("first", [{"hbm": 400_000}, {"host": SOME}], ids=["one", "both"])
@pytest.mark.parametrize("style", ["tp", "sequence"])
def test_ranks_of_a_tensor_have_homes_on_disk(
    style: str, first: dict[str, Any], tmp_path: Path
) -> None:
    disk = {**FEW, "hbm": 60_000, "chunk_bytes": 1024, "nvme": str(tmp_path)}
    kinds = ({**disk, **first}, {**disk, "host": SOME})
    (odd, there), (other, here) = run_ranks(2, with_disk, TensorRun(style, clip=0.05), kinds)
    assert not odd
    assert not other
    assert here > 0
    assert (there > 0) == ("host" in first)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("kinds", MIXED.values(), ids=MIXED)
def test_ranks_with_shares_and_budgets_of_their_own_are_micro_batches(
    kinds: tuple[dict[str, Any], ...], one_sided: bool
) -> None:
    found = run_ranks(2, shared, kinds, one_sided)
    expected = by_torch(Run(passes=2, clip=0.5, settings=FEW), 2)
    for each in found:
        assert_same(each, expected)


def shared(rank: int, kinds: tuple[dict[str, Any], ...], one_sided: bool) -> Any:
    settings = {**kinds[rank], "chunk_bytes": 1024}
    settings["hbm"] = settings["hbm"] and settings["hbm"] + 24_000
    return by_ranks(rank, Run(passes=2, clip=0.5, settings=settings, one_sided=one_sided))
