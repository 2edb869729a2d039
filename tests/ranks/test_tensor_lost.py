"""A rank that is lost inside of a collective of a tensor parallel model is an error of ours on the
others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hetero
from hetero.errors import DivergenceError, RankLost
from hetero.internals import limits_of
from hetero.testing.rank_faults import happen
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.ranks.tensor_models import TIGHT, TensorRun, around, built, loss_of, train

RUN = TensorRun(steps=2, clip=0.05)
SAID = {
    "killed": "it was killed",
    "memory": "OutOfMemory: HBM out of memory. planted",
    "error": "Planted: planted",
}


class Counted:
    """Counts the waits for collectives, and brings about a fault at one of them."""

    def __init__(self, wait: Callable[[Any], Any], at: int, how: str) -> None:
        self.n_waits = 0
        self._wait, self._at, self._how = wait, at, how

    def __call__(self, tensor: Any) -> Any:
        self.n_waits += 1
        if self.n_waits - 1 == self._at:
            happen(self._how)
        return self._wait(tensor)


def trained(
    rank: int, run: TensorRun, at: int, how: str, victim: int, timeout: float = 20.0
) -> int:
    """Train; return how many waits there were. The fault comes at one of the victim."""
    model, plain = built(run)
    mesh = {"dp_shard": run.dp, "tp": 2}
    given = {**TIGHT, "timeout_seconds": timeout, "mesh": mesh}
    model, optimizer = hetero.prepare(model, plain, **given)
    counted = Counted(collectives.wait_tensor, at if rank == victim else -1, how)
    collectives.wait_tensor = counted  # of this process alone
    train(model, optimizer, run, lambda _, most: optimizer.clip_grad_norm_(most), dp=rank // 2)
    return counted.n_waits


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("how", ["killed", "memory", "error"])
@pytest.mark.parametrize(
    ("style", "optimizer"),
    [("tp", "adamw"), ("sequence", "adamw"), ("vocabulary", "sgd"), ("tp", "lamb")],
)
def test_a_rank_that_is_lost_in_a_collective_is_named_on_the_others(
    style: str, optimizer: str, how: str, part: int
) -> None:
    """In sums, gathers and scatters, of forward and backward, of a loss over divided words, of a
    norm, of a step: at every eighth of a run's waits."""
    run = replace(RUN, style=style, optimizer=optimizer)
    most = min(run_ranks(2, trained, run, -1, how, 1))
    assert most > 16
    first, second = outcomes(2, trained, run, most * part // 8, how, 1)
    assert isinstance(first, Died) and isinstance(second, Died)
    assert isinstance(first.error, RankLost), first.text
    assert "rank 1 left" in str(first.error) and SAID[how] in str(first.error)
    assert first.error.advice
    if how == "memory":
        assert "errors.OutOfMemory: " in second.text


STOPS = [("tp", 1, "adamw"), ("vocabulary", 1, "lamb"), ("sequence", 2, "adamw")]


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(("style", "dp", "optimizer"), STOPS)
def test_a_rank_that_stops_in_a_collective_is_lost_after_the_timeout(
    style: str, dp: int, optimizer: str, part: int
) -> None:
    """In the forward, the backward, the norm and the step, with shares on top too. torch itself
    would wait for two minutes here."""
    run = replace(RUN, style=style, optimizer=optimizer, dp=dp)
    most = min(run_ranks(2 * dp, trained, run, -1, "", 1)) // 2  # others need a step after that
    ends = outcomes(2 * dp, trained, run, most * part // 8, "stopped", 1, 4.0)
    for rank, end in enumerate(ends):
        assert isinstance(end, Died)
        if rank != 1:
            assert isinstance(end.error, RankLost), end.text
            assert "rank 1 said nothing for 4 s" in str(end.error) or dp > 1


def limits(rank: int) -> None:
    """Prepare two models of one mesh, and let go of them in the order of their preparation."""
    model, plain = built(RUN)
    (group,) = model.blocks[0].up.weight.device_mesh.get_all_groups()
    own = limits_of(group)
    first = hetero.prepare(model, plain, **{**TIGHT, "timeout_seconds": 50.0})
    second = hetero.prepare(*built(RUN), **{**TIGHT, "timeout_seconds": 20.0})
    assert set(limits_of(group).values()) == {timedelta(seconds=20)} != set(own.values())
    hetero.release(*first)
    assert set(limits_of(group).values()) == {timedelta(seconds=20)}
    hetero.release(*second)
    assert limits_of(group) == own
    third = hetero.prepare(model, plain, **{**TIGHT, "timeout_seconds": 10_000.0})
    assert limits_of(group) == own
    torch.distributed.barrier()  # until then no rank lets go
    hetero.release(*third)


def test_a_group_has_its_own_time_limit_again_after_release() -> None:
    run_ranks(2, limits)


def goes_another_way(rank: int, way: str, style: str) -> None:
    """Make a step, and a second one of which one rank makes another."""
    run = TensorRun(style, steps=1)
    model, plain = built(run)
    model, optimizer = hetero.prepare(model, plain, **{**TIGHT, "timeout_seconds": 3.0})
    train(model, optimizer, run)
    if rank and way == "rate":
        optimizer.param_groups[0]["lr"] = 0.5
    elif rank and way == "block":
        model.blocks[1].forward = lambda x: x
    elif rank and way == "forward":
        with around(run), torch.no_grad():
            loss_of(model, run, 7)
    train(model, optimizer, run, first=1)
    train(model, optimizer, run, first=2)


WAYS = ("write", "clip", "order", "gradient")


def changes_alone(rank: int, hbm: int | None) -> list[str]:
    """Return what each way raised in which one rank changes what both have."""
    errors = []
    for way in WAYS:
        with pytest.raises(DivergenceError) as caught:
            changed_by(rank, way, hbm)
        errors.append(str(caught.value))
    return errors


def changed_by(rank: int, way: str, hbm: int | None) -> None:
    """Make a step, and a second one before which one rank changes what both have."""
    run = TensorRun("sequence", steps=1)
    model, plain = built(run)
    given = {**TIGHT, **({} if hbm else {"hbm": None, "device": "cpu"})}
    model, optimizer = hetero.prepare(model, plain, **{**given, "timeout_seconds": 20.0})
    train(model, optimizer, run)
    if way == "write" and rank:
        with torch.no_grad():
            model.norm.weight.mul_(0.5)
    with around(run):
        loss_of(model, run, 1).backward()
    if way == "clip":
        optimizer.clip_grad_norm_(0.5 if rank else 0.25)
    elif way == "order":
        optimizer.clip_grad_norm_(0.5, 1.0 + rank)
    elif way == "gradient" and rank:
        model.norm.weight.grad = None
    optimizer.step()


@pytest.mark.parametrize("hbm", [TIGHT["hbm"], None], ids=["paged", "fits"])
def test_what_one_rank_of_a_tensor_changes_is_an_error_on_all(hbm: int | None) -> None:
    for errors in run_ranks(2, changes_alone, hbm):
        for way, error in zip(WAYS, errors, strict=True):
            assert "come to a step in different ways" in error, way


def reads_alone(rank: int) -> None:
    """One rank reads the result of a collective, for which torch waits only then."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    plain = torch.optim.AdamW(net.parameters())
    model, optimizer = hetero.prepare(
        net, plain, **{**TIGHT, "mesh": {"tp": 2}, "timeout_seconds": 20.0}
    )
    for _ in range(3):
        model(torch.ones(8, 16)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            found = model(torch.ones(8, 16))
        if rank == 0:
            float(found.sum())
    torch.distributed.barrier()  # a rank that leaves would take its part of the last result along


def test_one_rank_alone_reads_results_of_collectives() -> None:
    run_ranks(2, reads_alone)


@pytest.mark.slow  # ranks wait until one is late
@pytest.mark.parametrize("style", ["tp", "sequence", "vocabulary"])
@pytest.mark.parametrize("way", ["rate", "block", "forward"])
def test_ranks_of_a_tensor_that_go_different_ways_are_an_error_on_all(way: str, style: str) -> None:
    found = outcomes(2, goes_another_way, way, style)
    assert all(isinstance(each, Died) for each in found)
    # gloo itself ends a process that is sent more than it waits for
    ended = [each for each in found if way == "block" and "killed: SIGABRT" in each.text]
    assert len(ended) < 2
    for each in (each for each in found if each not in ended):
        if way == "rate":
            assert "different ways (settings of groups: rank 0: " in str(each.error), each.text
        assert isinstance(each.error, DivergenceError), each.text  # or RankLost, which is one
        assert each.error.advice


def other_errors(rank: int) -> None:
    model, plain = built(RUN)
    own = collectives.wait_tensor
    model, optimizer = hetero.prepare(model, plain, **TIGHT)
    assert collectives.wait_tensor is not own
    error = RuntimeError("of the user's")
    with pytest.raises(RuntimeError, match="of the user's") as caught:
        next(iter(following())).ask_why(error, 0.0)
        raise error
    assert not isinstance(caught.value, RankLost)
    torch.distributed.barrier()  # until then no rank lets go
    hetero.release(model, optimizer)
    assert collectives.wait_tensor is own


def following() -> Any:
    from hetero.parallel import lost

    return lost._following


def test_torchs_wait_is_its_own_again_after_release() -> None:
    run_ranks(2, other_errors)


def makes_another_call(rank: int) -> None:
    """One rank clips, the other one steps: each waits for the other, in a call of its own."""
    run = TensorRun("sequence", steps=1)
    model, plain = built(run)
    model, optimizer = hetero.prepare(model, plain, **{**TIGHT, "timeout_seconds": 2.0})
    train(model, optimizer, run)
    with around(run):
        loss_of(model, run, 1).backward()
    if rank == 0:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()


def test_no_rank_blames_itself_for_a_wait_of_its_own() -> None:
    for rank, each in enumerate(outcomes(2, makes_another_call)):
        assert isinstance(each, Died) and isinstance(each.error, RankLost), each.text
        assert f"in vain: rank {1 - rank} " in str(each.error)
