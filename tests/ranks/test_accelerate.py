"""An Accelerator whose processes share one model gives the numbers of one that accumulates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState

from hetero.integrations.accelerate import HeteroAccelerator
from hetero.testing.ranks import run_ranks
from tests.ranks.models import Net

STEPS = 6
SETTINGS: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}


def data() -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(4 * 2 * STEPS, 10, generator=dice))


def shared(rank: int, folder: Path) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="2")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState._shared_state.clear()  # of the process that this one was forked from
    AcceleratorState._reset_state()
    GradientState._reset_state()
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
