"""Trainer and Fabric whose ranks share one model give the numbers of one rank that accumulates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

pytest.importorskip("lightning")

from lightning import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint

from hetero.api import prepare_tuned
from hetero.errors import ConfigError, RankLost
from hetero.integrations import lightning as integration
from hetero.integrations.lightning import HeteroFabricStrategy, HeteroStrategy
from hetero.testing.ranks import free_port, outcomes, run_ranks
from hetero.train.engine.tuning import Tuning
from tests.integrations.models import Tied
from tests.ranks.lightning_script import (
    CLIP,
    RANKS,
    SETTINGS,
    SIZE,
    STEPS,
    Module,
    loader,
    on_ranks,
    samples,
    trainer,
    weights_of,
)
from tests.ranks.models import Net, Values

Passes = list[list[torch.Tensor]]
"""The batch of each rank, in each pass."""


def in_order(data: torch.Tensor, n_ranks: int = RANKS) -> Passes:
    """Cut samples as `DistributedSampler` does: of N * SIZE of them rank r has each Nth."""
    return [[every[r::n_ranks] for r in range(n_ranks)] for every in data.split(n_ranks * SIZE)]


def epoch(number: int, n_ranks: int = RANKS) -> Passes:
    """Return an epoch of a Trainer's on ranks, which shuffles even a loader that does not."""
    data, dice = samples(), torch.Generator().manual_seed(number)
    return in_order(data[torch.randperm(len(data), generator=dice)], n_ranks)


def for_one(passes: Passes) -> DataLoader[Any]:
    """Return a loader of one rank, which takes the batches of all."""
    return loader(torch.cat([batch for each in passes for batch in each]))


by_norm = partial(nn.utils.clip_grad_norm_, max_norm=CLIP)


def by_torch(
    passes: Passes, accumulate: int = 1, *, summed_first: bool = False, clip: Any = by_norm
) -> Values:
    """Train as one process that accumulates; a rank's passes are ``summed_first`` or not at all."""
    torch.manual_seed(0)
    module = Module()
    params, optimizer = list(module.parameters()), module.configure_optimizers()
    for at in range(0, len(passes), accumulate):
        step = passes[at : at + accumulate]
        groups: Iterable[Any] = (
            zip(*step, strict=True)
            if summed_first
            else ([batch] for each in step for batch in each)
        )
        for group in groups:
            rank = [torch.zeros_like(param) for param in params]
            for batch in group:
                loss = module.net(batch).pow(2).mean() / (accumulate * len(step[0]))
                for held, grad in zip(rank, torch.autograd.grad(loss, params), strict=True):
                    held += grad
            for param, held in zip(params, rank, strict=True):
                param.grad = held if param.grad is None else param.grad + held
        clip(params)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(module)


def assert_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def launched(n_ranks: int = RANKS) -> None:
    """Leave the group of the test's, and be as a process of Lightning's launcher."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.pop("RANK", None)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port[0]}", WORLD_SIZE=f"{n_ranks}")


# -- Trainer -------------------------------------------------------------------------------------


def fitted(rank: int, root: Path, how: str, given: dict[str, Any]) -> tuple[int, Values]:
    n_ranks = given.get("devices", RANKS)
    launched(n_ranks)
    torch.manual_seed(rank)  # the first one's values count
    run, module, data = on_ranks(root, **given), Module(how), samples()
    own = {"sampler": DistributedSampler(data, n_ranks, rank, shuffle=False)}
    run.fit(module, loader(data, **own if how == "in order" else {}))
    return module.evictions, weights_of(module)


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("how", ["automatic", "in order", "accumulated", "manual", "value"])
def test_ranks_give_the_numbers_of_one_process_that_accumulates(how: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"accumulated": {"accumulate_grad_batches": 2}}.get(how, {})
    if how == "manual":
        given = {"gradient_clip_val": None}
    if how == "value":
        given = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    passes = in_order(samples()) if how == "in order" else epoch(0)
    clip = partial(nn.utils.clip_grad_value_, clip_value=0.01) if how == "value" else by_norm
    expected = by_torch(passes, given.get("accumulate_grad_batches", 1), clip=clip)

    for evictions, weights in run_ranks(RANKS, fitted, tmp_path, how, given):
        assert_equal(weights, expected)
        assert evictions > STEPS


def test_one_device_may_have_a_mesh(tmp_path: Path) -> None:
    ((_, weights),) = run_ranks(1, fitted, tmp_path, "automatic", {"devices": 1})

    assert_equal(weights, by_torch(epoch(0, 1)))


def on_machines(rank: int, root: Path) -> tuple[str, Values]:
    launched()
    os.environ.update(LOCAL_RANK="0", NODE_RANK=f"{rank}")
    torch.manual_seed(0)
    run, module = on_ranks(root, devices=1, num_nodes=RANKS), Module()
    run.fit(module, loader(samples()))
    assert "WORLD_SIZE" not in os.environ  # as any strategy of Lightning's leaves it
    return os.environ["LOCAL_WORLD_SIZE"], weights_of(module)


def test_a_rank_knows_how_many_share_its_machine(tmp_path: Path) -> None:
    for n_local, weights in run_ranks(RANKS, on_machines, tmp_path):
        assert n_local == "1"
        assert_equal(weights, by_torch(epoch(0)))


def kept(rank: int, root: Path) -> Values:
    launched()
    torch.manual_seed(0)
    keep = ModelCheckpoint(root / "kept", "{epoch}", monitor="val", save_last=True)
    given = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 2}
    run, module = on_ranks(root, **given), Module()
    run.fit(module, loader(samples()), loader(samples(8, seed=2)))
    run.save_checkpoint(root / "weights.ckpt", weights_only=True)
    return weights_of(module)


def resumed(rank: int, root: Path, path: Path, epochs: int) -> Values:
    launched()
    run, module = on_ranks(root, max_epochs=epochs), Module()
    run.fit(module, loader(samples()), ckpt_path=path)
    return weights_of(module)


@pytest.mark.campaign(seconds=3)
def test_a_checkpoint_of_ranks_is_gone_on_with_by_ranks_and_by_one(tmp_path: Path) -> None:
    at_two = by_torch([*epoch(0), *epoch(1)])
    for weights in run_ranks(RANKS, kept, tmp_path):
        assert_equal(weights, at_two)
    last = tmp_path / "kept/last.ckpt"
    assert len(list((tmp_path / "kept").iterdir())) == 2  # all but the best and the last are gone
    assert len(list(last.glob("step-*/model-*.safetensors"))) == RANKS
    assert_equal(torch.load(tmp_path / "weights.ckpt")["state_dict"], at_two)
    assert_equal(weights_of(Module.load_from_checkpoint(last)), at_two)

    expected = by_torch([*epoch(0), *epoch(1), *epoch(2)])
    for weights in run_ranks(RANKS, resumed, tmp_path, last, 3):
        assert_equal(weights, expected)
    alone, module = HeteroStrategy(**SETTINGS), Module()
    run = trainer(tmp_path, alone, max_epochs=3, accumulate_grad_batches=RANKS)
    run.fit(module, for_one(epoch(2)), ckpt_path=last)
    assert_equal(weights_of(module), expected)


class Unsynced(Module):
    """Logs the loss of each rank's own batches."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).pow(2).mean())


def named_by_a_metric(rank: int, root: Path) -> tuple[str, Values]:
    launched()
    torch.manual_seed(0)
    keep = ModelCheckpoint(root / "kept", "{epoch}-{val:.6f}", monitor="val")
    given = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 2}
    run, module = on_ranks(root, **given), Unsynced()
    run.fit(module, loader(samples()), loader(samples(8, seed=2)))
    named = keep.best_model_path
    run.validate(module, loader(samples(8, seed=2)), ckpt_path="best", verbose=False)
    return named, weights_of(module)


def test_the_first_rank_names_a_checkpoint_after_its_own_metric(tmp_path: Path) -> None:
    (first, weights), (second, others) = run_ranks(RANKS, named_by_a_metric, tmp_path)

    assert first != second  # each callback has its own rank's metric
    assert [str(path) for path in (tmp_path / "kept").iterdir()] == [first]
    assert_equal(weights, by_torch([*epoch(0), *epoch(1)]))
    assert_equal(others, weights)


def test_ranks_go_on_with_a_file_of_the_stock_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock, module = trainer(tmp_path, "auto", accumulate_grad_batches=RANKS), Module()
    stock.fit(module, for_one(epoch(0)))
    stock.save_checkpoint(tmp_path / "stock.ckpt")

    for weights in run_ranks(RANKS, resumed, tmp_path, tmp_path / "stock.ckpt", 2):
        assert_equal(weights, by_torch([*epoch(0), *epoch(1)]))


def gathered(rank: int, root: Path) -> Values:
    """Save files as ranks of several machines, which read weights together."""
    launched()
    integration.prepare = prepare_far
    run, module = on_ranks(root), Module()
    run.fit(module, loader(samples()))
    run.save_checkpoint(root / "weights.ckpt", weights_only=True)
    fabric = fabric_of(HeteroFabricStrategy(**SETTINGS, mesh="world"), RANKS)
    net: Any = fabric.setup(Tied(blocks=2))
    fabric.save(root / "net.ckpt", {"net": net})
    return {**weights_of(module), **weights_of(net)}


def prepare_far(model: Any, optimizer: Any = None, *, config: Any) -> Any:
    return prepare_tuned(model, optimizer, config, Tuning(one_sided=False))


def test_the_first_rank_writes_files_of_weights_that_all_read(tmp_path: Path) -> None:
    found, _ = run_ranks(RANKS, gathered, tmp_path)

    saved = torch.load(tmp_path / "weights.ckpt")["state_dict"]
    net = torch.load(tmp_path / "net.ckpt")["net"]
    assert_equal({**saved, **net}, found)
    assert net["head.weight"].data_ptr() == net["embed.weight"].data_ptr()  # tied in the file too


def evaluated(rank: int, root: Path) -> tuple[float, float, torch.Tensor]:
    launched()
    torch.manual_seed(0)
    run, module = on_ranks(root), Module()
    (before,) = run.validate(module, loader(samples(8, seed=2)), verbose=False)
    run.fit(module, loader(samples()), loader(samples(8, seed=2)))
    after = run.callback_metrics["val"].item()
    made: Any = run.predict(module, loader(samples(9, seed=3)))
    return before["val"], after, torch.cat(made)


def test_ranks_evaluate_and_log_means_over_all_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    (every,) = in_order(samples(8, seed=2))
    first = sum(net(batch).pow(2).mean().item() for batch in every) / RANKS
    net.load_state_dict({k.removeprefix("net."): v for k, v in by_torch(epoch(0)).items()})
    later = sum(net(batch).pow(2).mean().item() for batch in every) / RANKS

    for rank, (before, after, made) in enumerate(run_ranks(RANKS, evaluated, tmp_path)):
        assert before == pytest.approx(first, rel=1e-6)
        assert after == pytest.approx(later, rel=1e-6)
        mine = samples(9, seed=3)[rank::RANKS]  # 5 samples, and 4
        assert torch.equal(made, torch.cat([net(batch) for batch in mine.split(SIZE)]))


def failed(rank: int, root: Path) -> None:
    launched()
    run, module = on_ranks(root), Module()
    step = module.training_step

    def fails(batch: Any, batch_idx: int) -> Any:
        if rank == 1 and batch_idx == 2:
            raise ValueError("a bad sample")
        return step(batch, batch_idx)

    module.training_step = fails
    run.fit(module, loader(samples()))


def test_an_error_on_one_rank_ends_the_others(tmp_path: Path) -> None:
    lost, bad = outcomes(RANKS, failed, tmp_path)

    assert isinstance(bad.error, ValueError)
    assert isinstance(lost.error, RankLost), lost.text
    assert "ValueError: a bad sample" in str(lost.error)


def refused(rank: int, root: Path, given: dict[str, Any]) -> None:
    launched()
    on_ranks(root, **given).fit(Module(), loader(samples()))


def test_batch_norms_over_ranks_are_refused(tmp_path: Path) -> None:
    for each in outcomes(RANKS, refused, tmp_path, {"sync_batchnorm": True}):
        assert isinstance(each.error, ConfigError), each.text


# -- Fabric --------------------------------------------------------------------------------------


def fabric_of(strategy: Any, devices: int) -> Fabric:
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices)
    fabric.launch()
    return fabric


def trained(fabric: Fabric, passes: Iterable[Any], steps: int, path: Path | None = None) -> Any:
    """Train from ``path`` on to ``steps``, with as many passes as it takes; returns the state."""
    torch.manual_seed(fabric.global_rank)
    net = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = fabric.setup(net, optimizer)
    state = {"model": net, "optimizer": optimizer, "step": 0}
    if path is not None:
        assert fabric.load(path, state) == {}
    per_step = RANKS // fabric.world_size
    for number, (batch,) in enumerate(list(passes)[state["step"] * per_step : steps * per_step]):
        fabric.backward(net(batch).pow(2).mean() / per_step)
        if number % per_step == per_step - 1:
            fabric.clip_gradients(net, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    state["step"] = steps
    return state


def net_of(state: Any) -> Values:
    return {f"net.{name}": value.clone() for name, value in state["model"].state_dict().items()}


def on_fabric(rank: int, path: Path) -> tuple[float, Values]:
    launched()
    fabric = fabric_of(HeteroFabricStrategy(**SETTINGS, mesh="world"), RANKS)
    batches: Any = fabric.setup_dataloaders(loader(samples()))
    fabric.save(path, trained(fabric, batches, 3))
    whole = trained(fabric, batches, STEPS, path)
    return fabric.all_reduce(torch.tensor(float(rank))).item(), net_of(whole)


def test_ranks_of_fabric_do_as_one_and_go_on_from_what_they_saved(tmp_path: Path) -> None:
    expected = by_torch(in_order(samples()))

    for mean, weights in run_ranks(RANKS, on_fabric, tmp_path / "third"):
        assert_equal(weights, expected)
        assert mean == 0.5
    alone = fabric_of(HeteroFabricStrategy(**SETTINGS), 1)
    one = trained(alone, for_one(in_order(samples())), STEPS, tmp_path / "third")
    assert_equal(net_of(one), expected)


def without_exchange(rank: int) -> Values:
    launched()
    fabric = fabric_of(HeteroFabricStrategy(**{**SETTINGS, "hbm": 120_000}, mesh="world"), RANKS)
    torch.manual_seed(0)
    net: Any = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = fabric.setup(net, optimizer)
    batches: Any = fabric.setup_dataloaders(loader(samples(SIZE * RANKS * 4)))
    for number, (batch,) in enumerate(batches):
        with fabric.no_backward_sync(net, enabled=number % 2 == 0):
            fabric.backward(net(batch).pow(2).mean() / 2)
        if number % 2:
            fabric.clip_gradients(net, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return net_of({"model": net})


def test_passes_of_fabric_exchange_nothing_where_it_is_said() -> None:
    passes = in_order(samples(SIZE * RANKS * 4))
    expected = by_torch(passes, 2, summed_first=True)
    each_exchanges = by_torch(passes, 2)
    assert any(not torch.equal(expected[name], each_exchanges[name]) for name in expected)

    for weights in run_ranks(RANKS, without_exchange):
        assert_equal(weights, expected)


# -- launchers -----------------------------------------------------------------------------------

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"],
    "Lightning": [],
}


@pytest.mark.slow  # processes that import
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_are_started_by(launcher: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], "tests.ranks.lightning_script", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(RANKS):
        assert_equal(torch.load(tmp_path / f"{rank}.pt"), by_torch(epoch(0)))
