"""An Accelerator whose processes share one model gives the numbers of one that accumulates."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState

from hetero import ConfigError
from hetero.api import engine_of
from hetero.integrations.accelerate import HeteroAccelerator
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import Net

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


def shared(rank: int, folder: Path) -> dict[str, Any]:
    started()
    accelerator = HeteroAccelerator(hetero_plugin={**SETTINGS, "mesh": "world"}, cpu=True)
    torch.manual_seed(rank)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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


def test_processes_share_a_model_that_accelerate_prepares(tmp_path: Path) -> None:
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

    for each in run_ranks(2, shared, tmp_path):
        assert each["norms"] == norms
        for name, value in model.state_dict().items():
            assert torch.equal(each["weights"][name], value), name


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


@pytest.mark.parametrize("way", ["given", "launched"])
def test_sizes_of_a_parallelism_config_are_the_mesh(way: str) -> None:
    run = partial(sized, way=way, dp_replicate_size=2, dp_shard_size=2)
    assert run_ranks(4, run) == [(2, 2)] * 4


def test_a_parallelism_config_with_other_axes_is_refused() -> None:
    for each in outcomes(2, partial(sized, way="given", tp_size=2)):
        assert isinstance(each.error, ConfigError), each.text
        assert "tp_size=2" in str(each.error)
