"""Shares that stand on HBM: the bits of shares in RAM, wherever each rank has its own."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import DivergenceError, RankLost
from hetero.plan.figures import Figure
from hetero.plan.hardware import find
from hetero.plan.machine import InterNet, Net
from hetero.rehearse.rehearsal import Scene, rehearse
from hetero.testing.ranks import run_ranks
from hetero.train.engine.tuning import Tuning
from hetero.types import Kind, Lane
from tests.ranks.models import (
    Run,
    Values,
    assert_same,
    built,
    by_one_rank,
    by_ranks,
    by_torch,
    loss_of,
)
from tests.ranks.test_crossing import Planted, planted, slow_sums
from tests.ranks.test_plan import PROFILE, TIERS, TOKENS, Peaks, WithTargets

pytestmark = pytest.mark.usefixtures("short_parts")
SOME: dict[str, Any] = {"device": "cpu:sim", "hbm": 120_000, "chunk_bytes": 1024}
ALL = {**SOME, "hbm": 400_000}
CASES: list[tuple[int, dict[str, Any]]] = [
    (3, {"passes": 2}),
    (2, {"optimizer": "sgd", "clip": None}),
    (2, {"settings": {"precision": "bf16"}, "passes": 2}),
    (2, {"settings": {"precision": "fp16"}}),
    (2, {"settings": {"precision": "bf16", "frozen": "int8"}, "frozen": (1, 2)}),
    (2, {"settings": {"activations": "offload"}, "slow": 1}),
    (4, {"settings": {"sum_group": 2}, "passes": 2}),
    (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}}),
]


def run_of(settings: dict[str, Any], **what: Any) -> Run:
    return Run(settings=settings, one_sided=False, homes_on_hbm=True, **what)


@pytest.mark.campaign(seconds=8)
@pytest.mark.parametrize("room", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize(("n_ranks", "case"), CASES, ids=str)
def test_shares_on_hbm_train_as_micro_batches(
    n_ranks: int, case: dict[str, Any], room: dict[str, Any]
) -> None:
    case = dict(case)
    assert_trains_on_hbm(n_ranks, run_of({**room, **case.pop("settings", {})}, **case))


def assert_trains_on_hbm(n_ranks: int, run: Run) -> None:
    by = by_one_rank if run.settings.keys() & {"precision", "frozen"} else by_torch
    expected = by(run, n_ranks)
    for found in run_ranks(n_ranks, by_ranks, run):
        assert_same(found, expected)
        assert found.on_hbm


NEAR: list[tuple[int, dict[str, Any]]] = [
    (3, {"passes": 2}),
    (2, {"settings": {"precision": "bf16", "frozen": "int8"}, "frozen": (1, 2)}),
    (2, {"settings": {"activations": "offload"}, "slow": 1}),
    (4, {"settings": {"sum_group": 2}, "mesh": {"dp_replicate": 2, "dp_shard": 2}}),
]


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("room", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize(("n_ranks", "case"), NEAR, ids=str)
def test_ranks_of_one_machine_that_gather_have_homes_on_hbm(
    n_ranks: int, case: dict[str, Any], room: dict[str, Any]
) -> None:
    case = dict(case)
    settings = {**room, "gather_shares": True, **case.pop("settings", {})}
    assert_trains_on_hbm(n_ranks, replace(run_of(settings, **case), one_sided=True))


def prepared(**settings: Any) -> tuple[Any, Any, Run]:
    run = run_of({**ALL, **settings})
    model, plain = built(run)
    config = Config.load(mesh="world", **run.settings)
    return *prepare_tuned(model, plain, config, Tuning(one_sided=False, homes_on_hbm=True)), run


def step(model: Any, optimizer: Any, run: Run, number: int, rank: int) -> None:
    hetero.backward(loss_of(model, run, number, rank))
    optimizer.step()
    optimizer.zero_grad()


def on_hbm(model: Any) -> frozenset[int]:
    return frozenset(engine_of(model).setup.store.places.on_hbm)


def moves(rank: int, alone: bool) -> tuple[list[frozenset[int]], list[torch.Tensor]]:
    """Let homes of the first rank move down in a backward pass, while their sums are made."""
    slow_sums(0.003)  # one of the buckets that move is under way still
    model, optimizer, run = prepared()
    seen: list[frozenset[int]] = []

    def give_way(*_: Any) -> None:
        if seen and rank == 0 and not alone:
            engine_of(model).residence.hbm.rehoming.give_way(75_000)

    model.blocks[1].register_full_backward_hook(give_way)
    for number in range(6):
        hetero.backward(loss_of(model, run, number, rank))
        seen.append(on_hbm(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen, [value.clone() for value in model.state_dict().values()]


@pytest.mark.campaign(seconds=4)
def test_one_rank_may_move_its_shares_while_they_are_summed() -> None:
    (first, found), (second, other) = run_ranks(2, moves, False)
    (_, expected), _ = run_ranks(2, moves, True)

    assert first[3] < second[3]  # on one rank less
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, other, expected))


def reads(rank: int, folder: Path) -> Values:
    """Read and write what is on HBM, alike on all ranks; save it, and go on from the save."""
    model, optimizer, run = prepared(precision="bf16")
    weight = model.blocks[0][0].weight
    for number in range(3):
        hetero.backward(loss_of(model, run, number, rank))
        weight.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert on_hbm(model)
    held = model.state_dict()["blocks.0.0.weight"].view(-1)  # a copy that later steps change
    optimizer.state[weight]["exp_avg"].mul_(2.0)
    with torch.no_grad():
        weight.add_(0.5)
    step(model, optimizer, run, 3, rank)
    assert torch.equal(held, weight.detach().view(-1))
    save = hetero.save_checkpoint(folder, model, optimizer, asynchronous=True)
    step(model, optimizer, run, 4, rank)
    save.wait()
    again, resumed, _ = prepared(precision="bf16")
    hetero.load_checkpoint(folder, again, resumed)
    step(again, resumed, run, 4, rank)
    found = values_of(model, optimizer)
    assert same(found, values_of(again, resumed))
    hetero.release(model, optimizer)
    assert all(p.device.type == "cpu" for p in model.parameters())
    return found


def values_of(model: Any, optimizer: Any) -> Values:
    """Return weights, masters and averages."""
    states = optimizer.state_dict()
    averages = {number: state["exp_avg"] for number, state in states["state"].items()}
    kinds = {"weight": model.state_dict(), "master": states["masters"], "average": averages}
    return {f"{kind} {k}": v.clone() for kind, each in kinds.items() for k, v in each.items()}


def same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


@pytest.mark.campaign(seconds=3)
def test_what_is_on_hbm_is_read_and_written_and_saved(tmp_path: Path) -> None:
    first, second = run_ranks(2, reads, tmp_path)

    assert same(first, second)


def fails(rank: int, slow: int) -> tuple[list[str], Values]:
    """Train; in one pass a sum on HBM fails on a rank, and the step is made again. A slow rank
    knows of it while it is in the middle of the pass."""
    model, optimizer, run = prepared()
    for block in model.blocks if rank == slow else ():
        block.register_full_backward_hook(lambda *_: time.sleep(0.05))
    ends = []
    for number in range(5):
        with pytest.MonkeyPatch.context() as patch:
            if (rank, number) == (1, 3):
                planted(patch, at=2, act=fail)
            try:
                hetero.backward(loss_of(model, run, number, rank))
                optimizer.step()
                ends.append("made")
            except (DivergenceError, RankLost, Planted) as error:
                ends.append(type(error).__name__)
        optimizer.zero_grad()
        if number == 2:
            assert on_hbm(model)
    return ends, {name: value.clone() for name, value in model.state_dict().items()}


def fail() -> None:
    raise Planted("planted")


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.campaign(seconds=2))])
def test_a_sum_on_hbm_that_fails_on_one_rank_is_told_to_all(slow: int) -> None:
    (ends, found), (others, other) = run_ranks(2, fails, slow)

    assert ends == ["made"] * 3 + ["DivergenceError"] + ["made"]
    assert others == ["made"] * 3 + ["Planted"] + ["made"]
    assert same(found, other)


def traffic(rank: int) -> dict[Lane, int]:
    model, optimizer, run = prepared()
    for number in range(6):
        step(model, optimizer, run, number, rank)
    return dict(engine_of(model).setup.stats.n_bytes)


def test_a_fetch_of_what_is_on_hbm_is_a_gather_alone() -> None:
    for n_bytes in run_ranks(2, traffic):
        both = 2 * n_bytes[Lane.REDUCE]  # the addends of each rank, with the padding of a share
        assert n_bytes[Lane.H2D] <= both and n_bytes[Lane.D2H] <= both


SETTINGS = {
    "some": {"hbm": 900_000},
    "all": {"hbm": 1_500_000},
    "bf16": {"hbm": 700_000, "precision": "bf16"},
    "clipped": {"hbm": 800_000, "max_grad_norm": 1.0},
}


def taken(rank: int, settings: dict[str, Any]) -> Peaks:
    torch.manual_seed(0)
    model = WithTargets()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tuning = Tuning(one_sided=False, homes_on_hbm=True)
    _, optimizer = prepare_tuned(model, plain, Config.load(**settings), tuning)
    for _ in range(5):
        model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert on_hbm(model)
    ledger = engine_of(model).setup.ledger
    return {(tier, kind): ledger.peak(tier, kind) for tier in TIERS for kind in (None, *Kind)}


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_rank_with_shares_on_hbm_takes_what_was_planned(n_ranks: int, name: str) -> None:
    settings = {"device": "cpu:sim", "chunk_bytes": 1024, "mesh": {"dp_shard": n_ranks}}
    settings["activations"] = "keep"  # else what is left depends on the pace of updates
    settings |= SETTINGS[name]
    far = InterNet(bytes_per_second=Figure(1e9, "est"), devices_per_node=1)
    model = WithTargets()
    scene = Scene(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        args=(TOKENS.to("meta"),),
        kwargs={},
        loss=lambda loss: loss,
        config=Config.load(**settings),
        profile=replace(find(PROFILE), net=Net(inter=far)),
        homes_on_hbm=True,
    )
    found = rehearse(scene)
    planned: Peaks = {(tier, None): found.peaks[tier] for tier in TIERS}
    planned.update({(tier, kind): found.kinds[tier, kind] for tier in TIERS for kind in Kind})

    for real in run_ranks(n_ranks, taken, settings):
        assert real == planned
