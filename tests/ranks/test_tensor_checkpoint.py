"""What ranks saved that divide tensors, ranks that divide them otherwise, or not, load."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hetero
from hetero.checkpoint.verify import verify
from hetero.errors import CheckpointMismatch, ConfigError
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import (
    LM,
    TIGHT,
    TensorRun,
    Trained,
    difference,
    differing,
    found_in,
    mesh_of,
    plan_of,
    train,
    weights_of,
)

HALF = 2


class Ranks(NamedTuple):
    """How ranks divide a model."""

    tp: int = 1
    dp: int = 1

    @property
    def n_ranks(self) -> int:
        return self.tp * self.dp

    @property
    def mesh(self) -> dict[str, int] | None:
        return {"dp_shard": self.dp, "tp": self.tp} if self.n_ranks > 1 else None


RESIDENT: Mapping[str, Any] = {"device": "cpu"}
BF16: Mapping[str, Any] = {**TIGHT, "precision": "bf16"}


def prepared(
    ranks: Ranks, run: TensorRun, seed: int, weights: Path | None = None
) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    with nullcontext() if weights is None else hetero.empty_init():
        model = LM()
    if ranks.tp > 1:
        run = replace(run, dp=ranks.dp)
        parallelize_module(model, mesh_of(run), plan_of(run.style, len(model.blocks)))
    for number in run.frozen:
        model.blocks[number].requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    plain = OPTIMIZERS[run.optimizer](trained)
    settings = {**run.settings, "mesh": ranks.mesh, "weights": weights and str(weights)}
    if ranks.tp == 1 and "hbm" in settings:  # activations are whole
        settings["hbm"] *= 2
    return hetero.prepare(model, plain, **settings)


def values(model: Any, optimizer: Any) -> Trained:
    """Return all of a model, masters and states of the optimizer, whole."""
    _, plain = hetero.release(model, optimizer)
    return found_in(model, plain)


def saved(rank: int, ranks: Ranks, run: TensorRun, folder: Path) -> tuple[Trained, Trained]:
    """Return what a model has when it is saved, and what it comes to if it goes on."""
    found = []
    for steps in (HALF, 2 * HALF):
        model, optimizer = prepared(ranks, run, 0)
        train(model, optimizer, replace(run, steps=HALF), dp=rank // ranks.tp)
        if steps == HALF:
            save = hetero.save_checkpoint(folder, model, optimizer, {"at": HALF})
            save.wait()
        else:
            go_on(model, optimizer, run, rank // ranks.tp)
        found.append(values(model, optimizer))
    return found[0], found[1]


def go_on(model: Any, optimizer: Any, run: TensorRun, dp: int) -> None:
    train(model, optimizer, replace(run, steps=HALF), lambda *_: torch.zeros(()), dp=dp + 7)


def loaded(
    rank: int, ranks: Ranks, run: TensorRun, folder: Path, goes_on: bool
) -> tuple[Trained, int]:
    model, optimizer = prepared(ranks, run, 1)
    assert hetero.load_checkpoint(folder, model, optimizer) == {"at": HALF}
    if goes_on:
        go_on(model, optimizer, run, rank // ranks.tp)
    evictions = hetero.status(model).evictions
    return values(model, optimizer), evictions


ALONE, TP2, TP3, TP4 = Ranks(), Ranks(2), Ranks(3), Ranks(4)
DP2, BOTH = Ranks(1, 2), Ranks(2, 2)
PAIRS = [
    *((TP2, TP2), (TP2, ALONE), (ALONE, TP2), (BOTH, BOTH), (BOTH, TP2), (TP2, BOTH)),
    *((DP2, TP2), (BOTH, DP2), (DP2, BOTH), (BOTH, ALONE), (TP2, TP4), (TP2, TP3)),
]
NAMES = {ALONE: "alone", TP2: "tp2", TP3: "tp3", TP4: "tp4", DP2: "dp2", BOTH: "both"}


def check(before: Ranks, after: Ranks, run: TensorRun, folder: Path) -> list[int]:
    kept, ended = run_ranks(before.n_ranks, saved, before, run, folder)[0]
    assert verify(folder).ok
    found = run_ranks(after.n_ranks, loaded, after, run, folder, False)
    for value, _ in found:
        assert not difference(value, kept)
    if before != after:
        return []
    found = run_ranks(after.n_ranks, loaded, after, run, folder, True)
    for value, _ in found:
        assert not difference(value, ended)
    return [evictions for _, evictions in found]


@pytest.mark.filterwarnings("ignore:the checkpoint is of fewer ranks")
@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("style, optimizer", [("sequence", "sgd"), ("tp", "adamw")])
@pytest.mark.parametrize("settings", [TIGHT, BF16, RESIDENT], ids=["fp32", "bf16", "resident"])
@pytest.mark.parametrize("before, after", PAIRS, ids=NAMES.__getitem__)
def test_what_is_divided_in_one_way_is_loaded_in_another(
    before: Ranks,
    after: Ranks,
    style: str,
    optimizer: str,
    settings: Mapping[str, Any],
    tmp_path: Path,
) -> None:
    run = TensorRun(style, optimizer, settings=settings)
    evictions = check(before, after, run, tmp_path)
    if settings is TIGHT:
        assert all(each >= 3 for each in evictions)


CODES: Mapping[str, Any] = {**TIGHT, "hbm": 30_000, "frozen": "int8"}


@pytest.mark.slow
def test_parts_in_code_and_on_disk_are_saved_while_training_goes_on(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    settings = {**CODES, "host": 400_000, "nvme": str(nvme)}
    check(TP2, TP2, TensorRun("vocabulary", frozen=(1, 2), settings=settings), tmp_path / "saved")


@pytest.mark.slow
def test_codes_of_parts_are_loaded_by_ranks_that_divide_alike(tmp_path: Path) -> None:
    run = TensorRun("tp", frozen=(1, 2), settings=CODES)
    run_ranks(2, saved, TP2, run, tmp_path)
    for each in outcomes(1, loaded, ALONE, run, tmp_path, False):
        assert isinstance(each.error, CheckpointMismatch)
        assert "'blocks.1.down.weight' in int8 of parts cut at [[], [32]]" in str(each.error)


def uneven(rank: int, folder: Path) -> None:
    layer = nn.Linear(3, 5, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.ones(1 if rank else 4, 3)  # torch would divide 5 as 3 and 2
    part = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1))
    layer.weight = nn.Parameter(part)
    optimizer: Any
    model, optimizer = hetero.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    hetero.save_checkpoint(folder, model, optimizer)


def test_a_division_of_the_users_own_is_refused_by_name(tmp_path: Path) -> None:
    first, second = outcomes(2, uneven, tmp_path)
    assert isinstance(first.error, ConfigError)
    assert isinstance(second.error, ConfigError)
    assert "'weight' is a DTensor of [5, 3] of which this rank has [4, 3]" in str(first.error)
    assert not list(tmp_path.iterdir())


class Odd(nn.Module):
    """Weights cut along two axes of a mesh, in shares that differ, transposed, or copied."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(3)
        both, twice = [Shard(1), Shard(0)], [Shard(0), Shard(0)]
        for name, shape, placements in (
            ("grid", (10, 6), both),
            ("uneven", (7, 5), twice),
            ("few", (3, 8), twice),  # one of four ranks has nothing of it
            ("rows", (5, 4, 3), [Replicate(), Shard(1)]),
            ("copied", (33,), [Replicate(), Replicate()]),
            ("plain", (12, 3), None),
            ("turned", (6, 10), both),
            ("scale", (), [Replicate(), Replicate()]),
        ):
            value = torch.randn(shape, generator=source)
            value = value.t().contiguous().t() if name == "turned" else value
            if mesh is not None and placements is not None:
                value = distribute_tensor(value, mesh, placements)
            trains = placements is not twice and shape != ()  # which torch's rules do not step
            self.register_parameter(name, nn.Parameter(value, requires_grad=trains))
        seen = torch.arange(6.0)
        self.register_buffer("seen", distribute_tensor(seen, mesh) if mesh is not None else seen)


def square(param: torch.Tensor) -> torch.Tensor:
    value = (param * param).sum()
    gather = getattr(value, "full_tensor", None)
    found: torch.Tensor = value if gather is None else gather()
    return found


def odd(rank: int, n_ranks: int, folder: Path, load: bool) -> Trained:
    mesh = None
    if n_ranks > 1:
        mesh = init_device_mesh("cpu", (2, n_ranks // 2), mesh_dim_names=("x", "y"))
    model = Odd(mesh)
    trained = [param for param in model.parameters() if param.requires_grad]
    plain = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    sizes = {"tp": n_ranks} if n_ranks > 1 else None
    model, optimizer = hetero.prepare(model, plain, **{**TIGHT, "hbm": 12_000}, mesh=sizes)
    if load:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        hetero.load_checkpoint(folder, model, optimizer)
    else:
        for _ in range(2):
            for param in (p for p in model.parameters() if p.requires_grad):
                square(param).backward()
            optimizer.step()
            optimizer.zero_grad()
        hetero.save_checkpoint(folder, model, optimizer)
    return values(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(4, 4), (4, 2), (2, 4), (4, 1), (1, 4)])
def test_weights_divided_in_any_way_are_loaded(before: int, after: int, tmp_path: Path) -> None:
    first = run_ranks(before, odd, before, tmp_path, False)
    for each in run_ranks(after, odd, after, tmp_path, True):
        assert not difference(each, first[0])


def normed(rank: int, dp: int, folder: Path, load: bool) -> dict[str, bytes]:
    """Return the running means of features that ranks divide, of a rank's own."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(8, affine=False), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp_shard", "tp"))["tp"]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, optimizer, mesh={"dp_shard": dp, "tp": 2}, **TIGHT)
    if load:
        hetero.load_checkpoint(folder, model, optimizer)
    else:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        hetero.save_checkpoint(folder, model, optimizer)
    return {name: buffer.numpy().tobytes() for name, buffer in model.named_buffers()}


@pytest.mark.filterwarnings("ignore:the checkpoint is of fewer ranks")
def test_each_copy_has_the_buffers_of_its_parts_of_tensors(tmp_path: Path) -> None:
    """Ranks that were new had the first one's, which are of other features."""
    saved = run_ranks(2, normed, 1, tmp_path, False)
    assert saved[0]["1.running_mean"] != saved[1]["1.running_mean"]

    assert run_ranks(4, normed, 2, tmp_path, True) == [*saved, *saved]


def exported(rank: int, ranks: Ranks, run: TensorRun, folder: Path) -> Trained:
    model, optimizer = prepared(ranks, run, 0)
    train(model, optimizer, replace(run, steps=HALF), dp=rank // ranks.tp)
    hetero.export(model, folder, max_shard_bytes=4096)
    found = found_in(model, optimizer)
    hetero.release(model, optimizer)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [TP2, BOTH], ids=NAMES.__getitem__)
@pytest.mark.parametrize("settings", [TIGHT, CODES, RESIDENT], ids=["fp32", "codes", "resident"])
def test_whole_tensors_are_exported(
    ranks: Ranks, settings: Mapping[str, Any], tmp_path: Path
) -> None:
    run = TensorRun("sequence", frozen=(1,), settings=settings)
    found = run_ranks(ranks.n_ranks, exported, ranks, run, tmp_path)[0]
    files = sorted(tmp_path.glob("*.safetensors"))
    there = {name: value for file in files for name, value in load_file(file).items()}
    assert len(files) > 3
    assert not differing(there, found.weights)
    for each in run_ranks(ranks.n_ranks, from_files, ranks, run, tmp_path):
        assert not differing(each, there)


def from_files(rank: int, ranks: Ranks, run: TensorRun, folder: Path) -> dict[str, torch.Tensor]:
    """Return what a model without memory has that reads its parts of exported tensors."""
    model, _ = prepared(ranks, run, 1, weights=folder)
    return weights_of(model)
