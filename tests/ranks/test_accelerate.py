"""An Accelerator whose processes share one model gives the numbers of one that accumulates."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from hetero import ConfigError
from hetero.api import company_of, engine_of
from hetero.integrations import accelerate as integration
from hetero.integrations.accelerate import HeteroAccelerator
from hetero.integrations.parallelism import drop_masks
from hetero.parallel.context import context_parallel
from hetero.status import status
from hetero.testing.ranks import outcomes, run_ranks
from hetero.train.engine.tuning import Tuning
from tests.ranks.context_models import averaged
from tests.ranks.models import Net, Values
from tests.ranks.tensor_models import differing, tiny_llama, whole

STEPS = 6
SETTINGS: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}


def data() -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(4 * 2 * STEPS, 10, generator=dice))


def started() -> None:
    world = torch.distributed.get_world_size()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE=f"{world}")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState._shared_state.clear()  # of the process that this one was forked from
    AcceleratorState._reset_state()
    GradientState._reset_state()


def shared(rank: int, folder: Path, evaluates: bool) -> dict[str, Any]:
    """Train, save and load; a model that ``evaluates`` does so before its optimizer comes."""
    started()
    accelerator = HeteroAccelerator(hetero_plugin={**SETTINGS, "mesh": "world"}, cpu=True)
    torch.manual_seed(rank)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=4)
    model, loader = accelerator.prepare(model, loader)
    if evaluates:
        with torch.no_grad():
            model(torch.zeros(2, 10))
    optimizer = accelerator.prepare(optimizer)
    norms = []
    for step, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).pow(2).mean())
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state(str(folder))
            accelerator.load_state(str(folder))
    weights = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return {"weights": weights, "norms": norms}


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("evaluates", [False, True])
def test_processes_share_a_model_that_accelerate_prepares(evaluates: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [batch for (batch,) in DataLoader(data(), batch_size=4)]
    norms = []
    for step in range(STEPS):
        for rank in range(2):
            (model(batches[2 * step + rank]).pow(2).mean() / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()

    for each in run_ranks(2, shared, tmp_path, evaluates):
        assert each["norms"] == norms
        for name, value in model.state_dict().items():
            assert torch.equal(each["weights"][name], value), name


def saved(rank: int, folder: Path, how: str) -> None:
    """Take a step on the same batch, and save the weights in files of at most 4 KB."""
    started()
    if how == "gathered":  # as ranks of several machines, which read weights together
        integration.AVERAGED = Tuning(averages=True, one_sided=False)
    accelerator = HeteroAccelerator(hetero_plugin={**SETTINGS, "mesh": "world"}, cpu=True)
    if how == "each machine":
        os.environ["LOCAL_RANK"] = "0"
        PartialState._shared_state["local_process_index"] = 0
        accelerator.project_configuration.save_on_each_node = True
        folder = folder / f"{rank}"
    model, optimizer = accelerator.prepare(*net_and_rule())
    assert (company_of(model).node is None) == (how == "gathered")
    accelerator.backward(model(torch.ones(4, 10)).pow(2).mean())
    optimizer.step()
    accelerator.save_model(model, folder, max_shard_size="4KB")
    accelerator.wait_for_everyone()
    model(torch.ones(4, 10)).sum().backward()  # calls of ranks are in step
    accelerator.free_memory()


def net_and_rule() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("how", ["read", "gathered", "each machine"])
def test_a_model_that_ranks_share_is_saved_in_the_files_of_stock_accelerate(
    how: str, tmp_path: Path
) -> None:
    model, optimizer = net_and_rule()
    model(torch.ones(4, 10)).pow(2).mean().backward()
    optimizer.step()
    Accelerator(cpu=True).save_model(model, tmp_path / "stock", max_shard_size="4KB")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}
    assert len(expected) > 3

    run_ranks(2, saved, tmp_path / "ours", how)

    for folder in ("0", "1") if how == "each machine" else (".",):
        files = (tmp_path / "ours" / folder).iterdir()
        assert {path.name: path.read_bytes() for path in files} == expected


def stepping_alone(rank: int, settings: dict[str, Any] | None) -> tuple[Values, int]:
    """Train with LocalSGD; None: by stock accelerate. Returns weights, and evictions."""
    started()
    accelerator: Any = Accelerator(cpu=True)
    if settings is not None:
        accelerator = HeteroAccelerator(hetero_plugin={**SETTINGS, **settings}, cpu=True)
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    dice = torch.Generator().manual_seed(rank)
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for _ in range(3):
            batch = torch.randn(4, 10, generator=dice)
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    accelerator.backward(model(torch.full((4, 10), float(rank))).pow(2).mean())  # averaged again
    optimizer.step()
    weights = {k: v.clone() for k, v in accelerator.unwrap_model(model).state_dict().items()}
    if settings is None:
        return weights, 0
    evictions = status(model).evictions
    accelerator.free_memory()
    assert not hasattr(model, "no_sync")
    return weights, evictions


def test_processes_step_alone_under_local_sgd_as_stock_ones_do() -> None:
    expected, found = (run_ranks(2, stepping_alone, settings) for settings in (None, {}))
    for (theirs, _), (mine, evictions) in zip(expected, found, strict=True):
        assert not differing(mine, theirs)
        assert evictions >= 3


def alone_under(rank: int, settings: dict[str, Any]) -> None:
    started()
    accelerator = HeteroAccelerator(hetero_plugin={**SETTINGS, **settings}, cpu=True)
    with LocalSGD(accelerator, accelerator.prepare(Net()), local_sgd_steps=2):
        pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"mesh": "world"}, "ranks share this model"), ({"precision": "bf16"}, "their masters")],
)
def test_steps_alone_are_refused_where_they_would_be_others(
    settings: dict[str, Any], said: str
) -> None:
    for each in outcomes(2, alone_under, settings):
        assert isinstance(each.error, ConfigError), each.text
        assert said in str(each.error) and "LocalSGD" in str(each.error)


def hooked(rank: int) -> None:
    started()
    kept = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    HeteroAccelerator(hetero_plugin=SETTINGS, cpu=True, kwargs_handlers=[kept])


def test_a_hook_of_torchs_between_ranks_is_refused() -> None:
    for each in outcomes(2, hooked):
        assert isinstance(each.error, ConfigError), each.text
        assert "comm_hook='bf16'" in str(each.error)


def sized(rank: int, way: str, **sizes: int) -> tuple[int, int]:
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    started()
    if way == "launched":
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        for name, size in sizes.items():
            os.environ[f"PARALLELISM_CONFIG_{name.upper()}"] = f"{size}"
        accelerator = HeteroAccelerator(hetero_plugin=SETTINGS, cpu=True)
    else:
        config = parallelism.ParallelismConfig(**sizes)
        accelerator = HeteroAccelerator(hetero_plugin=SETTINGS, cpu=True, parallelism_config=config)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(4, 10)).pow(2).mean())
    optimizer.step()
    comm = engine_of(model).setup.comm
    accelerator.free_memory()
    return comm.n_shares, comm.n_copies


@pytest.mark.campaign(seconds=8)
@pytest.mark.parametrize("way", ["given", "launched"])
def test_sizes_of_a_parallelism_config_are_the_mesh(way: str) -> None:
    run = partial(sized, way=way, dp_replicate_size=2, dp_shard_size=2)
    assert run_ranks(4, run) == [(2, 2)] * 4


def test_a_parallelism_config_with_other_axes_is_refused() -> None:
    for each in outcomes(2, partial(sized, way="given", sp_size=2)):
        assert isinstance(each.error, ConfigError), each.text
        assert "sp_size=2" in str(each.error)


def divided(rank: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Train a model whose tensors ranks divide, by accelerate; return its weights."""
    from accelerate.parallelism_config import ParallelismConfig

    started()
    axes = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
    accelerator = HeteroAccelerator(hetero_plugin=SETTINGS, cpu=True, parallelism_config=axes)
    model, plain = parallel_net(sizes["tp"])
    loader = DataLoader(data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, plain, loader)
    for (batch,) in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = {k: whole(v).clone() for k, v in model.state_dict().items()}
    n_seen = len(loader)
    accelerator.free_memory()
    return {"weights": weights, "n_seen": n_seen}


def parallel_net(n_tensor: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 6))
    n_ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks // n_tensor, n_tensor), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def divided_by_torch(rank: int, dp: int) -> dict[str, torch.Tensor]:
    """Train on the ranks of one tensor, with the batches of ``dp`` ranks a step."""
    model, optimizer = parallel_net(2)
    batches = [batch for (batch,) in DataLoader(data(), batch_size=4)]
    for first in range(0, len(batches), dp):
        for batch in batches[first : first + dp]:
            (model(batch).pow(2).mean() * (1 / dp)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {k: whole(v) for k, v in model.state_dict().items()}


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_a_tensor_get_the_same_batches(dp: int) -> None:
    """One mesh: each axis of accelerate's is ours."""
    pytest.importorskip("accelerate.parallelism_config")
    expected = run_ranks(2, divided_by_torch, dp)[0]
    sizes = {"dp_replicate": 1, "dp_shard": dp, "cp": 1, "tp": 2}

    for each in run_ranks(2 * dp, divided, sizes):
        assert each["n_seen"] == 4 * 2 * STEPS // 4 // dp
        assert not differing(each["weights"], expected)


# -- parts of sequences ----------------------------------------------------------------------------


def sequences() -> DataLoader[Any]:
    """Return words, the labels of a part of them, and positions: of whole sequences."""
    dice = torch.Generator().manual_seed(2)
    words = torch.randint(0, 64, (2 * STEPS, 17), generator=dice)
    labels = words[:, 1:].clone()
    labels[:, :5] = -100  # all that a part of the sequence has, but for one
    places = torch.arange(16).expand(len(words), -1).clone()
    return DataLoader(TensorDataset(words[:, :-1].clone(), labels, places), batch_size=2)


def llama_loss(model: Any, given: list[torch.Tensor]) -> torch.Tensor:
    words, labels, places = given
    found: torch.Tensor = model(
        input_ids=words, position_ids=places, labels=labels, shift_labels=labels, use_cache=False
    ).loss
    return found


def trained_llama(rank: int, way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train by accelerate, by a plain loop on the same ranks, or on whole sequences."""
    from accelerate.parallelism_config import ParallelismConfig

    started()
    model: Any = tiny_llama()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    n_ranks = torch.distributed.get_world_size()
    loader, mesh = sequences(), init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("cp",))
    accelerator = None
    if way == "accelerate":
        axes = ParallelismConfig(cp_size=2)
        accelerator = HeteroAccelerator(
            hetero_plugin={**SETTINGS, **settings}, cpu=True, parallelism_config=axes
        )
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    elif way == "torch":
        drop_masks(model)
    losses = []
    for given in loader:
        if accelerator is not None:
            with accelerator.maybe_context_parallel(
                buffers=given, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(given)
            ):
                loss = llama_loss(model, given)
                accelerator.backward(loss)
        elif way == "torch":
            with context_parallel(mesh, buffers=given, buffer_seq_dims=[1, 1, 1]):
                loss = llama_loss(model, given)
                loss.backward()
            averaged(model)
        else:
            loss = llama_loss(model, given)
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    found = {"losses": losses, "weights": {k: v.clone() for k, v in model.state_dict().items()}}
    if accelerator is not None:
        found["evictions"] = status(model).evictions
        found["ranks"] = status(model).ranks
        accelerator.free_memory()
    return found


@pytest.mark.slow  # transformers and accelerate are imported
def test_ranks_of_a_sequence_train_a_llama() -> None:
    """Bits of plain torch on the same ranks. With a head that leaves its logits to the loss, and
    on one rank with whole sequences, sums round otherwise."""
    pytest.importorskip("accelerate.parallelism_config")
    pytest.importorskip("transformers")
    plain = run_ranks(2, trained_llama, "torch", {})
    (whole_one,) = run_ranks(1, trained_llama, "whole", {})
    for settings in ({"hbm": 150_000}, {"hbm": 150_000, "fused_loss": True}):
        ours = run_ranks(2, trained_llama, "accelerate", settings)
        for mine, theirs in zip(ours, plain, strict=True):
            assert mine["evictions"] >= 3
            assert mine["ranks"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1}
            if "fused_loss" not in settings:
                assert mine["losses"] == theirs["losses"]
                assert not differing(mine["weights"], theirs["weights"])
        means = torch.tensor([each["losses"] for each in ours]).mean(0).tolist()
        assert means == pytest.approx(whole_one["losses"], rel=1e-5)
