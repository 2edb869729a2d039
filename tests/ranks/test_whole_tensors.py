"""Rules that need whole tensors give the bits of one rank to ranks that have shares of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.testing.ranks import run_ranks
from hetero.train.engine.tuning import Tuning
from hetero.train.update.together import WholeShares, owners_of
from tests.ranks.models import (
    WHOLE,
    Found,
    Net,
    Run,
    assert_same,
    built,
    by_one_rank,
    by_ranks,
    by_torch,
    found,
    loss_of,
)
from tests.ranks.test_disk import LARGE, on_disk

TIGHT: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("optimizer", list(WHOLE))
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_whole_tensors_are_stepped_by_all_ranks(
    n_ranks: int, optimizer: str, passes: int, one_sided: bool
) -> None:
    run = Run(optimizer, passes=passes, settings=TIGHT, one_sided=one_sided)
    expected = by_torch(run, n_ranks)

    for each in run_ranks(n_ranks, by_ranks, run):
        assert_same(each, expected)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", list(WHOLE))
def test_so_are_their_masters(optimizer: str, precision: str, one_sided: bool) -> None:
    settings = {**TIGHT, "precision": precision}
    run = Run(optimizer, frozen=(1,), settings=settings, one_sided=one_sided)
    expected = by_one_rank(run, 2)

    for each in run_ranks(2, by_ranks, run):
        assert_same(each, expected)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
def test_a_block_that_a_rank_skips_is_stepped_all_the_same(one_sided: bool) -> None:
    skips = {(0, 0): 1, (1, 0): 2, (1, 1): 2, (2, 1): 0}
    run = Run("lamb", skips=skips if one_sided else {}, settings=TIGHT, one_sided=one_sided)
    expected = by_torch(run, 2)

    for each in run_ranks(2, by_ranks, run):
        assert_same(each, expected)


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("room", ["states", "all"])
def test_shares_on_disk_are_put_together(room: str, tmp_path: Path) -> None:
    settings = on_disk(tmp_path, room)
    settings["host"] += 3_000_000
    run = replace(LARGE, steps=2, optimizer="lamb", settings=settings)
    expected = by_torch(run, 2)

    for each in run_ranks(2, by_ranks, run):
        assert_same(each, expected)
        assert each.status.tiers["NVME"]["state"] > 0


def half(rank: int, n_ranks: int, optimizer: str, folder: Path, first: int) -> Found:
    run = Run(optimizer, settings=TIGHT)
    model, plain = built(run)
    mesh = "world" if n_ranks > 1 else None
    _, prepared = hetero.prepare(model, plain, mesh=mesh, **TIGHT)
    if first:
        hetero.load_checkpoint(folder, model, prepared)
    for step in range(first, first + 2):
        for micro in range(2 // n_ranks):
            loss_of(model, run, step, micro * n_ranks + rank).backward()
        if n_ranks == 1:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
        prepared.step()
        prepared.zero_grad()
    hetero.save_checkpoint(folder, model, prepared)
    state = found(model, prepared, [])
    hetero.release(model, prepared)
    return state


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "8bit"])
def test_their_states_are_saved_and_loaded(
    optimizer: str, before: int, after: int, tmp_path: Path
) -> None:
    run_ranks(before, half, before, optimizer, tmp_path, 0)
    expected = by_torch(Run(optimizer, clip=None, settings=TIGHT), 2)

    for each in run_ranks(after, half, after, optimizer, tmp_path, 2):
        assert_same(each, expected)


def fails(rank: int) -> None:
    run = Run("lamb", settings=TIGHT)
    model, plain = built(run)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    loss_of(model, run, 0, rank).backward()
    if rank == 0:
        optimizer.step()
    else:
        assert model.first.weight.grad is not None
        model.first.weight.grad.mul_(torch.tensor(2.0))
        optimizer.step()


def test_a_gradient_that_one_rank_changed_is_refused_before_the_step() -> None:
    with pytest.raises(AssertionError, match="DivergenceError"):
        run_ranks(2, fails)


def counts_its_steps(rank: int, one_sided: bool) -> int:
    """Return how many elements this rank has stepped in one step."""
    run = Run("lamb", settings=TIGHT)
    model, plain = built(run)
    config = Config.load(mesh="world", **TIGHT)
    _, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=one_sided))
    loss_of(model, run, 0, rank).backward()
    n_stepped, step = 0, WholeShares._step

    def counted(self: WholeShares, param: torch.Tensor, state: Any) -> Any:
        nonlocal n_stepped
        n_stepped += param.numel()
        return step(self, param, state)

    WholeShares._step = counted
    optimizer.step()
    hetero.release(model, optimizer)
    return n_stepped


@pytest.mark.campaign(seconds=3)
def test_ranks_that_see_each_others_homes_divide_the_tensors() -> None:
    whole = sum(p.numel() for p in Net().parameters())

    divided = run_ranks(3, counts_its_steps, True)
    assert sum(divided) == whole
    assert max(divided) <= 1.1 * whole / 3
    assert run_ranks(3, counts_its_steps, False) == [whole] * 3


class Decays(torch.optim.Optimizer):
    """Writes to gradients, and is not known to hetero."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(param, alpha=0.1)
                    param.sub_(param.grad * (group["lr"] / (1 + param.norm())))


def decayed(rank: int, n_ranks: int, one_sided: bool) -> list[torch.Tensor]:
    """Take three steps whose gradients add up; return weights and gradients."""
    model = Net()
    torch.manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    plain: Any = Decays(model.parameters())
    optimizer = plain
    if n_ranks > 1:
        config = Config.load(mesh="world", **TIGHT)
        _, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=one_sided))
    for step in range(3):
        for micro in [rank] if n_ranks > 1 else range(2):
            loss = loss_of(model, Run(), step, micro)
            (loss if n_ranks > 1 else loss * 0.5).backward()
        optimizer.step()
    found = [param.detach().clone() for param in model.parameters()]
    return found + [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize(
    "one_sided",
    [True, pytest.param(False, marks=pytest.mark.campaign(seconds=2))],
    ids=["read", "gathered"],
)
def test_what_a_rule_writes_to_gradients_stays(one_sided: bool) -> None:
    ((*expected,),) = run_ranks(1, decayed, 1, one_sided)

    for each in run_ranks(2, decayed, 2, one_sided):
        assert len(each) == len(expected)
        assert all(map(torch.equal, each, expected))


class Fails(Decays):
    """Fails at some parameters, from some time on."""

    armed = False

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if self.armed and param.shape == (73, 24):
                    raise RuntimeError("planted")
        super().step(closure)


def torn(rank: int, one_sided: bool, folder: Path) -> list[str]:
    model = Net()
    plain: Any = Fails(model.parameters())
    config = Config.load(mesh="world", timeout_seconds=5, **TIGHT)
    _, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=one_sided))
    loss_of(model, Run(), 0, rank).backward()
    optimizer.step()  # the first one tries the class on other tensors
    Fails.armed = True
    told = []
    acts: list[Any] = [
        optimizer.step,
        lambda: loss_of(model, Run(), 1, rank),
        model.state_dict,
        lambda: hetero.save_checkpoint(folder, model, optimizer),
    ]
    for act in acts:
        try:
            act()
            told.append("")
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize(
    "one_sided",
    [True, pytest.param(False, marks=pytest.mark.campaign(seconds=1))],
    ids=["read", "gathered"],
)
def test_a_step_that_failed_in_part_leaves_a_model_that_is_refused(
    one_sided: bool, tmp_path: Path
) -> None:
    for step, *later in run_ranks(2, torn, one_sided, tmp_path):
        assert "planted" in step
        assert all("load a whole checkpoint" in text for text in later), later
    assert list(tmp_path.iterdir()) == []


def test_each_tensor_goes_to_the_rank_with_the_least() -> None:
    assert owners_of([5, 4, 3, 3, 3], 2) == [0, 1, 1, 0, 1]
    assert owners_of([], 4) == []
    assert owners_of([7], 4) == [0]
