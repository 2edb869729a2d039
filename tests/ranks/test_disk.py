"""Shares on disk: states, with weights in RAM, or everything; the bits are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero import DivergenceError
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import Run, assert_same, built, by_one_rank, by_ranks, by_torch, loss_of

LARGE = Run(steps=3, width=128, n_blocks=14)
HBM = {"device": "cpu:sim", "hbm": 4_000_000, "chunk_bytes": 16384}
ROOM = {"states": 7_000_000, "all": 3_700_000}
"""HOST of a rank of two: states and gradients do not fit, or weights neither. An update of fused
AdamW, and what is on its way, need 3.65 MB."""


def on_disk(folder: Path, room: str, n_ranks: int = 2) -> dict[str, Any]:
    less = 1_000_000 if (n_ranks, room) == (3, "states") else 0
    return {**HBM, "host": ROOM[room] - less, "nvme": str(folder)}


def check_tiers(status: Any, room: str) -> None:
    disk, ram = status.tiers["NVME"], status.tiers["HOST"]
    assert disk["state"] > 1_000_000
    assert ram["peak"] <= ram["budget"]
    assert (disk["param"] > 0) == (room == "all")


@pytest.mark.campaign(seconds=8)
@pytest.mark.parametrize("room", list(ROOM))
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_shares_on_disk_change_no_bit(
    n_ranks: int, optimizer: str, one_sided: bool, room: str, tmp_path: Path
) -> None:
    settings = on_disk(tmp_path, room, n_ranks)
    run = replace(LARGE, optimizer=optimizer, passes=2, one_sided=one_sided, settings=settings)
    expected = by_torch(run, n_ranks)

    for found in run_ranks(n_ranks, by_ranks, run):
        assert_same(found, expected)
        check_tiers(found.status, room)


@pytest.mark.campaign(seconds=4)
def test_a_rank_takes_its_part_of_the_disk(tmp_path: Path) -> None:
    run = replace(LARGE, steps=1, settings=on_disk(tmp_path, "all"))
    share = sum(p.numel() for p in built(run)[0].parameters()) // 2

    for found in run_ranks(2, by_ranks, run):
        used = found.status.tiers["NVME"]
        assert used["state"] <= 1.1 * 8 * share
        assert used["param"] <= 1.1 * 4 * share


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("room", list(ROOM))
def test_masters_and_codes_lie_on_disk_in_shares(room: str, tmp_path: Path) -> None:
    settings = {**on_disk(tmp_path, room), "precision": "bf16", "frozen": "int8"}
    run = replace(LARGE, frozen=(1, 2), settings={**settings, "host": ROOM[room] * 5 // 7})
    in_ram = {**HBM, "precision": "bf16", "frozen": "int8"}
    expected = by_one_rank(replace(run, settings=in_ram), 2)

    for found in run_ranks(2, by_ranks, run):
        assert_same(found, expected)
        assert found.status.tiers["NVME"]["state"] > 0


def half(rank: int, run: Run, folder: Path, first: int) -> list[float]:
    """Train two of four steps, and save while the next one runs."""
    model, plain = built(run)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **run.settings)
    if first:
        hetero.load_checkpoint(folder, model, optimizer)
    losses = []
    for step in range(first, first + 2):
        loss = loss_of(model, run, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    save = hetero.save_checkpoint(folder, model, optimizer, asynchronous=True)
    loss_of(model, run, 9, rank).backward()
    optimizer.step()
    save.wait()
    hetero.release(model, optimizer)
    return losses


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize(
    ("before", "after"), [("states", None), (None, "all"), ("all", "states")], ids=str
)
def test_what_lay_on_disk_is_saved_and_loaded(
    before: str | None, after: str | None, tmp_path: Path
) -> None:
    def run(room: str | None) -> Run:
        return replace(LARGE, settings=on_disk(tmp_path, room) if room else HBM)

    folder, expected = tmp_path / "disk", tmp_path / "RAM"
    found = run_ranks(2, half, run(before), folder, 0), run_ranks(2, half, run(after), folder, 2)
    right = run_ranks(2, half, run(None), expected, 0), run_ranks(2, half, run(None), expected, 2)
    assert found == right


def reads_alone(rank: int, run: Run) -> None:
    model, plain = built(run)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **run.settings)
    for step in range(2):
        loss_of(model, run, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            state = optimizer.state[next(model.blocks[0].parameters())]
            state["exp_avg"].sum().item()


def test_a_state_on_disk_that_one_rank_reads_alone_is_an_error_on_all(tmp_path: Path) -> None:
    run = replace(LARGE, settings=on_disk(tmp_path, "states"))

    for each in outcomes(2, reads_alone, run):
        assert isinstance(each.error, DivergenceError), each.text
        assert "a read of" in str(each.error)
