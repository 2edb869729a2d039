"""Gradients that add up group by group: one order, whatever carries the bytes."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetero
from hetero import ConfigError, DivergenceError
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device.comm import Addends, Relay
from hetero.errors import RankLost
from hetero.parallel import groups
from hetero.parallel.gloo import Gloo
from hetero.parallel.groups import Swap
from hetero.parallel.mesh import check_group
from hetero.testing.ranks import outcomes, run_ranks
from hetero.train.engine.tuning import Tuning
from tests.ranks.models import Found, Run, assert_same, built, by_ranks, by_torch, loss_of
from tests.ranks.test_copies import WAYS, by_copies, mesh_of

TIGHT: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}


def grouped(sum_group: int, n_copies: int, n_shares: int, **given: Any) -> Run:
    settings = {**TIGHT, "sum_group": sum_group, **given.pop("settings", {})}
    return Run(steps=3, settings=settings, mesh=mesh_of(n_copies, n_shares), **given)


@pytest.mark.parametrize(
    ("sum_group", "n_copies", "n_shares"),
    [(2, 1, 4), (2, 2, 2), (2, 4, 1), (4, 1, 4), (4, 2, 4), (2, 2, 4), (4, 4, 2), (3, 1, 6)],
)
def test_every_share_of_every_rank_is_added_up_once_a_group(
    sum_group: int, n_copies: int, n_shares: int
) -> None:
    size = n_copies * n_shares
    relays = [Relay(rank, size, n_shares, sum_group) for rank in range(size)]

    for rank, relay in enumerate(relays):
        assert rank in relay.members
        assert rank in relay.keepers
        assert rank % n_shares in relay.shares
        assert len(relay.keepers) == size // sum_group
        # each of the others adds up what this rank keeps, for a group of its own
        assert {at // sum_group for at in relay.keepers} == set(range(size // sum_group))
        assert all(rank % n_shares in relays[at].shares for at in relay.keepers)
        assert sorted(map(relay.place, range(n_shares))) == list(range(n_shares))
        firsts = [relay.place(share) for share in relay.shares]
        assert firsts == list(range(firsts[0], firsts[0] + len(firsts)))
    for first in range(0, size, sum_group):
        group = relays[first : first + sum_group]
        assert set().union(*(relay.shares for relay in group)) == set(range(n_shares))


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n_copies", "n_shares"), [(1, 4), (2, 2)])
@pytest.mark.usefixtures("short_parts")
def test_groups_are_sums_of_sums(n_copies: int, n_shares: int, way: str) -> None:
    run = grouped(2, n_copies, n_shares, passes=2)
    expected = by_torch(run, 4)

    for each in run_ranks(4, by_copies, run, way):
        assert_same(each, expected)
        assert each.status.evictions >= 3


class Late:
    """Sums that leave when they are waited for."""

    def __init__(self, begin: Callable[[], Addends]) -> None:
        self._begin = begin

    def wait(self) -> list[torch.Tensor]:
        return self._begin().wait()


def by_late_copies(rank: int, run: Run) -> Found:
    begin = Gloo.pass_on

    def late(self: Gloo, sums: torch.Tensor, what: str) -> Addends:
        return Late(lambda: begin(self, sums, what))

    pytest.MonkeyPatch().setattr(Gloo, "pass_on", late)  # this process is a fork
    return by_copies(rank, run, "gathered")


@pytest.mark.campaign(seconds=6)
@pytest.mark.usefixtures("short_parts")
def test_sums_of_groups_stay_until_they_have_left() -> None:
    run = grouped(2, 1, 4)
    expected = by_torch(run, 4)

    for each in run_ranks(4, by_late_copies, run):
        assert_same(each, expected)


def test_groups_give_other_bits_than_ranks_in_a_row() -> None:
    one, other = (by_torch(grouped(n, 1, 4), 4) for n in (1, 2))
    assert any(not torch.equal(value, other.weights[k]) for k, value in one.weights.items())


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("sum_group", "n_copies", "n_shares"),
    [(2, 1, 4), (4, 1, 4), (2, 1, 6), (3, 1, 6), (2, 3, 2), (3, 2, 3), (4, 4, 2), (2, 4, 2)],
)
@pytest.mark.usefixtures("short_parts")
def test_groups_of_all_sizes(
    sum_group: int, n_copies: int, n_shares: int, passes: int, optimizer: str, way: str
) -> None:
    run = grouped(sum_group, n_copies, n_shares, passes=passes, optimizer=optimizer)
    n_ranks = n_copies * n_shares
    expected = by_torch(run, n_ranks)

    for each in run_ranks(n_ranks, by_copies, run, way):
        assert_same(each, expected)


def first_sums() -> list[torch.Tensor]:
    """Gradients of bf16 weights on four ranks in groups of two, in fp32."""
    model, _ = built(Run())
    model.to(torch.bfloat16)
    params, sums = list(model.parameters()), []
    for first in (0, 2):
        one, other = (
            [
                grad.float().mul_(1 / 4)
                for grad in torch.autograd.grad(loss_of(model, Run(), 0, rank), params)
            ]
            for rank in (first, first + 1)
        )
        sums.append([a + b for a, b in zip(one, other, strict=True)])
    return [a + b for a, b in zip(*sums, strict=True)]


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("way", ["read", "gathered"])
def test_masters_take_sums_of_groups_in_fp32(way: str) -> None:
    settings = {"hbm": 80_000, "precision": "bf16"}
    run = replace(grouped(2, 1, 4, settings=settings), steps=1, clip=None)
    beta, _ = torch.optim.AdamW([torch.zeros(1)]).defaults["betas"]

    for each in run_ranks(4, by_copies, run, way):
        for number, total in enumerate(first_sums()):
            expected = torch.zeros_like(total).lerp_(total, 1 - beta)
            assert torch.equal(each.states[number]["exp_avg"], expected), number


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("way", ["read", "apart"])
def test_a_group_of_which_no_rank_has_a_gradient_adds_nothing(way: str) -> None:
    skips = {(0, 0): 1, (0, 1): 1, (1, 2): 2, (1, 3): 2, (2, 0): 0, (2, 3): 3}
    run = grouped(2, 2, 2, skips=skips)
    expected = by_torch(run, 4)

    for each in run_ranks(4, by_copies, run, way):
        assert_same(each, expected)


# -- bytes ---------------------------------------------------------------------------------------


class Counting(Swap):
    """Counts what leaves a rank's group of two."""

    left = 0

    def begin(self, parts: list[torch.Tensor], what: str) -> Addends:
        mine = dist.get_rank() // 2
        for rank, part in zip(dist.get_process_group_ranks(self._group), parts, strict=True):
            Counting.left += part.numel() if rank // 2 != mine else 0
        return super().begin(parts, what)


def left(rank: int, sum_group: int) -> int:
    pytest.MonkeyPatch().setattr(groups, "Swap", Counting)  # this process is a fork
    Counting.left = 0
    by_ranks(rank, replace(grouped(sum_group, 1, 4), one_sided=False))
    return Counting.left


@pytest.mark.campaign(seconds=4)
def test_what_leaves_a_group_is_one_sum_of_it() -> None:
    straight, passed_on = run_ranks(4, left, 1), run_ranks(4, left, 2)
    assert [2 * n for n in passed_on] == straight


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sum_group", "n_shares", "n_copies", "advice"),
    [(3, 4, 1, "1, 2, 4"), (8, 4, 1, "1, 2, 4"), (4, 6, 2, "1, 2, 3, 6, 12"), (2, 1, 1, "1:")],
)
def test_groups_that_do_not_fit_are_refused(
    sum_group: int, n_shares: int, n_copies: int, advice: str
) -> None:
    with pytest.raises(ConfigError, match=f"sum_group={sum_group}") as caught:
        check_group(sum_group, n_shares, n_copies)
    assert advice in str(caught.value)


def test_groups_on_one_rank_are_refused() -> None:
    model, plain = built(Run())
    with pytest.raises(ConfigError, match="sum_group=2"):
        hetero.prepare(model, plain, sum_group=2, **TIGHT)


def prepares_with_own(rank: int) -> None:
    model, plain = built(Run())
    hetero.prepare(model, plain, mesh="world", sum_group=1 + rank, **TIGHT)


def test_ranks_with_other_groups_diverge() -> None:
    for each in outcomes(2, prepares_with_own):
        assert isinstance(each.error, DivergenceError), each.text
        assert "sum_group" in str(each.error)


# -- faults --------------------------------------------------------------------------------------


def fails_between(rank: int, how: str) -> None:
    """Rank 1 fails between the sums of its group and their way to the others."""
    run = grouped(2, 1, 4, settings={"timeout_seconds": 20.0})
    model, plain = built(run)
    config = Config.load(mesh="world", **run.settings)
    prepare_tuned(model, plain, config, Tuning(one_sided=False))
    comm: Any = engine_of(model).setup.comm

    def fail(*args: Any) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted")

    if rank == 1:
        comm.pass_on = fail
    loss_of(model, run, 0, rank).backward()


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("how", ["killed", "error"])
def test_a_rank_that_fails_between_sums_is_told_of(how: str) -> None:
    ends = outcomes(4, fails_between, how)

    for end in ends[:1] + ends[2:]:
        if how == "killed":
            assert isinstance(end.error, RankLost), end.text
            assert "rank 1 left" in str(end.error)
        else:
            assert isinstance(end.error, DivergenceError), end.text
            assert "planted" in str(end.error)


# -- checkpoints ---------------------------------------------------------------------------------


def saves(rank: int, folder: Path) -> None:
    run = grouped(2, 1, 2)
    model, plain = built(run)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **run.settings)
    loss_of(model, run, 0, rank).backward()
    optimizer.step()
    hetero.save_checkpoint(folder, model, optimizer)


def test_a_load_says_that_groups_were_others(tmp_path: Path) -> None:
    run_ranks(2, saves, tmp_path)

    model, optimizer = hetero.prepare(*built(Run()), **TIGHT)
    with pytest.warns(UserWarning, match=r"groups of 2 ranks .* groups of 1"):
        hetero.load_checkpoint(tmp_path, model, optimizer)
    hetero.save_checkpoint(tmp_path / "again", model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hetero.load_checkpoint(tmp_path / "again", model, optimizer)
