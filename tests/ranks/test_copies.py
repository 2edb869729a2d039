"""Several copies of a model, each cut into shares: the bits of one rank's micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero import ConfigError
from hetero.api import engine_of
from hetero.checkpoint.verify import verify
from hetero.parallel import node
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import (
    Found,
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
WAYS = ["read", "apart", "gathered"]
"""Of ranks on one machine, of copies on a machine each, and of ranks without common memory."""


def mesh_of(n_copies: int, n_shares: int) -> dict[str, int]:
    return {"dp_replicate": n_copies, "dp_shard": n_shares}


def by_copies(rank: int, run: Run, way: str) -> Found:
    if way == "apart":
        copy = rank // run.mesh["dp_shard"]
        node.machine = lambda: f"machine {copy}"
    return by_ranks(rank, replace(run, one_sided=way != "gathered"))


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "lamb", "adafactor"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("n_copies", "n_shares"), [(2, 2), (3, 2), (2, 3)])
def test_copies_of_shares_are_micro_batches(
    n_copies: int, n_shares: int, passes: int, optimizer: str, way: str
) -> None:
    mesh = mesh_of(n_copies, n_shares)
    run = Run(optimizer, passes=passes, steps=3, settings=TIGHT, mesh=mesh)
    n_ranks = n_copies * n_shares
    expected = by_torch(run, n_ranks)

    for each in run_ranks(n_ranks, by_copies, run, way):
        assert_same(each, expected)
        assert each.status.evictions >= 3


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("precision", "frozen"), [("bf16", "int8"), ("fp16", "nf4")])
def test_working_weights_and_codes_are_copied(precision: str, frozen: str, way: str) -> None:
    settings = {**TIGHT, "hbm": 80_000, "precision": precision, "frozen": frozen}
    run = Run(passes=2, frozen=(1, 2), settings=settings, mesh=mesh_of(2, 2))
    expected = by_one_rank(run, 4)

    for each in run_ranks(4, by_copies, run, way):
        assert_same(each, expected)


@pytest.mark.campaign(seconds=5)
def test_a_block_that_some_ranks_skip_gets_the_gradients_there_are() -> None:
    skips = {(0, 0): 1, (1, 3): 2, (2, 1): 0, (2, 2): 0}
    run = Run(skips=skips, settings=TIGHT, mesh=mesh_of(2, 2))
    expected = by_torch(run, 4)

    for way in ("read", "apart"):
        for each in run_ranks(4, by_copies, run, way):
            assert_same(each, expected)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", ["states", "all"])
def test_shares_of_copies_lie_on_disk(room: str, way: str, tmp_path: Path) -> None:
    settings = on_disk(tmp_path, room)
    settings["host"] += 1_000_000
    run = replace(LARGE, steps=2, settings=settings, mesh=mesh_of(2, 2))
    expected = by_torch(run, 4)

    for each in run_ranks(4, by_copies, run, way):
        assert_same(each, expected)
        assert each.status.tiers["NVME"]["state"] > 1_000_000


# -- checkpoints ---------------------------------------------------------------------------------

HALF = 2
SAVING = Run(steps=2 * HALF, settings=TIGHT)


def half(rank: int, mesh: Any, folder: Path, first: int, batches: int, way: str) -> Found:
    """Train half of the steps with as many batches as there are ranks at most, and save."""
    if way == "apart":
        node.machine = lambda: f"machine {rank // 2}"
    n_ranks = torch.distributed.get_world_size()
    model, plain = built(SAVING)
    _, optimizer = hetero.prepare(model, plain, mesh=mesh, **TIGHT)
    if first:
        assert hetero.load_checkpoint(folder, model, optimizer) == {"steps": first}
    norms = []
    for step in range(first, first + HALF):
        for i in range(batches // n_ranks):
            loss = loss_of(model, SAVING, step, i * n_ranks + rank)
            (loss * (n_ranks / batches)).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    hetero.save_checkpoint(folder, model, optimizer, {"steps": first + HALF})
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("way", ["read", "apart"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(mesh_of(2, 2), "world"), ("world", mesh_of(2, 2)), (mesh_of(2, 2), mesh_of(2, 2))],
    ids=["to shares", "to copies", "to the same"],
)
def test_what_copies_saved_others_go_on_with(
    before: Any, after: Any, way: str, tmp_path: Path
) -> None:
    expected = by_torch(SAVING, 4)
    first = run_ranks(4, half, before, tmp_path, 0, 4, way)
    second = run_ranks(2 if after == "world" else 4, half, after, tmp_path, HALF, 4, way)
    assert verify(tmp_path).ok

    for each in second:
        each.norms = [*first[0].norms, *each.norms]
        assert_same(each, expected)


def save_wide(rank: int, folder: Path) -> None:
    model, plain = built(LARGE)
    _, optimizer = hetero.prepare(model, plain, mesh=mesh_of(2, 2), device="cpu")
    loss_of(model, LARGE, 0, rank).backward()
    optimizer.step()
    hetero.save_checkpoint(folder, model, optimizer)


def test_copies_save_a_part_of_their_shares_each(tmp_path: Path) -> None:
    run_ranks(4, save_wide, tmp_path)

    sizes = [file.stat().st_size for file in tmp_path.glob("*/model-*.safetensors")]
    whole = 12 * sum(p.numel() for p in built(LARGE)[0].parameters())
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * whole / 4


# -- meshes --------------------------------------------------------------------------------------


def prepared(mesh: Any) -> tuple[int, int]:
    model, plain = built(SAVING)
    _, optimizer = hetero.prepare(model, plain, mesh=mesh, **TIGHT)
    comm = engine_of(model).setup.comm
    hetero.release(model, optimizer)
    return comm.n_shares, comm.n_copies


def with_device_mesh(rank: int, sizes: tuple[int, int], names: tuple[str, str]) -> tuple[int, int]:
    return prepared(init_device_mesh("cpu", sizes, mesh_dim_names=names))


def test_a_device_mesh_says_which_ranks_keep_a_copy() -> None:
    found = run_ranks(4, with_device_mesh, (2, 2), ("dp_replicate", "dp_shard"))
    assert found == [(2, 2)] * 4


def test_a_mesh_whose_ranks_are_numbered_otherwise_is_refused() -> None:
    for each in outcomes(4, with_device_mesh, (2, 2), ("dp_shard", "dp_replicate")):
        assert isinstance(each.error, ConfigError), each.text
        assert "numbered" in str(each.error)


def memory_of(rank: int, mesh: Any) -> int:
    model, plain = built(replace(SAVING, width=96))
    hetero.prepare(model, plain, mesh=mesh, **{**TIGHT, "hbm": 600_000})
    return int(hetero.status(model).tiers["HOST"]["param"])


def test_a_rank_keeps_one_share_of_its_copy() -> None:
    two = run_ranks(2, memory_of, "world")
    assert run_ranks(4, memory_of, mesh_of(2, 2)) == 2 * two
