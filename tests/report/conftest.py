"""One recorded run for all tests of the report: paged, on the simulated device, in three tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hetero
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.report.measure import Measured, measure
from hetero.report.profile import profile
from hetero.report.run import Run

BUDGETS = {"hbm": "1MiB", "host": "3MiB"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of five steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(GPTConfig(width=64, layers=6, heads=2, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    spill = tmp_path_factory.mktemp("spill")
    model, optimizer = hetero.prepare(
        model, optimizer, device="cpu:sim", nvme=spill, activations="auto", **BUDGETS
    )
    found = tmp_path_factory.mktemp("run")
    with profile(model, found):
        for _ in range(5):
            one_step(model, optimizer)
    hetero.release(model, optimizer)
    return found


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, 255, (2, 17))
    found = model(tokens[:, :-1], tokens[:, 1:])
    (found[1] if isinstance(found, tuple) else found).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="session")
def run(folder: Path) -> Run:
    return Run.load(folder)


@pytest.fixture(scope="session")
def measured(run: Run) -> Measured:
    return measure(run)
