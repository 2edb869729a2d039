"""A checkpoint of N ranks loads on M, and training goes on bit for bit."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero import CheckpointError, DivergenceError
from hetero.errors import DiskFull
from hetero.testing.faults import FaultPlan
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import Found, Run, assert_same, built, by_torch, found, loss_of

TIGHT: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
HALF = 3

BATCHES = 4
"""Micro-batches of a step; a power of two, so that 1, 2 and 4 ranks divide sums alike."""
WHOLE = Run(steps=2 * HALF, settings=TIGHT)


def by_halves(
    rank: int, n_ranks: int, folder: Path, first: int, asynchronous: bool = False
) -> Found:
    """Train half of the steps, after a load unless they are the first half, and save."""
    model, plain = built(WHOLE)
    mesh = "world" if n_ranks > 1 else None
    _, optimizer = hetero.prepare(model, plain, mesh=mesh, **TIGHT)
    if first:
        assert hetero.load_checkpoint(folder, model, optimizer) == {"steps": first}
    norms = []
    for step in range(first, first + HALF):
        for i in range(BATCHES // n_ranks):
            loss = loss_of(model, WHOLE, step, i * n_ranks + rank)
            (loss * (n_ranks / BATCHES)).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    extra = {"steps": first + HALF}
    save = hetero.save_checkpoint(folder, model, optimizer, extra, asynchronous=asynchronous)
    if asynchronous:  # the next step waits until it was read
        loss_of(model, WHOLE, 0, rank).backward()
        optimizer.step()
    save.wait()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


def trained(n_ranks: int, *args: Any) -> list[Found]:
    return run_ranks(n_ranks, by_halves, n_ranks, *args)


@pytest.mark.campaign(seconds=8)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 4), (4, 2)])
def test_what_ranks_saved_others_go_on_with(
    before: int, after: int, asynchronous: bool, tmp_path: Path
) -> None:
    expected = by_torch(WHOLE, BATCHES)
    first = trained(before, tmp_path, 0, asynchronous)
    second = trained(after, tmp_path, HALF)

    for each in second:
        each.norms = [*first[0].norms, *each.norms]
        assert_same(each, expected)


def loaded(rank: int, folder: Path) -> Found:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    hetero.load_checkpoint(folder, model, optimizer)
    state = found(model, optimizer, [])
    hetero.release(model, optimizer)
    return state


def test_shares_that_no_rank_had_before_are_loaded(tmp_path: Path) -> None:
    before = trained(2, tmp_path, 0)[0]
    before.norms = []

    for each in run_ranks(3, loaded, tmp_path):
        assert_same(each, before)


def save_twice(rank: int, folder: Path) -> None:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    for _ in range(2):
        hetero.save_checkpoint(folder, model, optimizer, step=1)


def test_a_save_that_the_first_rank_cannot_make_fails_on_all(tmp_path: Path) -> None:
    first, second = outcomes(2, save_twice, tmp_path)

    assert isinstance(first.error, CheckpointError) and "step-1" in str(first.error)
    assert isinstance(second.error, CheckpointError) and "step-1" in str(second.error)


def save_after_one_that_failed(rank: int, folder: Path) -> None:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    full = FaultPlan()
    full.fail_at("write", 0, errno.ENOSPC, times=None)
    hetero.save_checkpoint(folder, model, optimizer, step=1, asynchronous=True, io=full)
    hetero.save_checkpoint(folder, model, optimizer, step=2)


def test_what_the_last_save_failed_with_reaches_all_at_the_next(tmp_path: Path) -> None:
    first, second = outcomes(2, save_after_one_that_failed, tmp_path)

    assert isinstance(first.error, DiskFull), first.text
    assert isinstance(second.error, CheckpointError), second.text
    assert "did not save" in str(second.error)


def load_alone(rank: int, folder: Path) -> None:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    hetero.save_checkpoint(folder, model, optimizer)
    if rank == 0:
        hetero.load_checkpoint(folder, model, optimizer)
    model(torch.zeros(2, 10)).sum().backward()


def test_a_load_on_one_rank_alone_is_an_error_on_all(tmp_path: Path) -> None:
    for each in outcomes(2, load_alone, tmp_path):
        assert isinstance(each.error, DivergenceError), each.text
        assert "a load" in str(each.error)
