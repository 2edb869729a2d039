"""A small model of equal units whose homes may lie on HBM, and runs of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import Device, SimDevice
from hetero.jobs import Slice, Worker
from hetero.train.engine.engine import Engine
from hetero.train.engine.paged import Paged
from hetero.train.engine.tuning import Tuning
from tests.equivalence.harness import raw

UNITS, WIDTH = 6, 48
UNIT = WIDTH * (WIDTH + 1)  # parameters
EACH = UNIT * 16  # bytes of a unit's homes in training
SOME = 3 * EACH + 6 * 4 * UNIT
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Blocks(nn.Module):
    """Units of equal size, of which some of the homes fit on HBM."""

    def __init__(self, block: type[nn.Linear] = nn.Linear, units: int = UNITS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(WIDTH, WIDTH) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class OneMatrix(nn.Module):
    """A unit of one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Run:
    """A prepared model of blocks, and what its steps need."""

    def __init__(
        self,
        device: Device,
        hbm: int = SOME,
        *,
        homes_on_hbm: bool | None,
        passing: float | None = None,
        worker: Worker | None = None,
        pause: Slice | None = None,
        block: type[nn.Linear] = nn.Linear,
        units: int = UNITS,
        **settings: Any,
    ) -> None:
        torch.manual_seed(5)
        model = Blocks(block, units)
        settings = {"activations": "keep", "chunk_bytes": 4096, **settings}
        config = Config.load(device=device, hbm=hbm, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tuning = Tuning(homes_on_hbm=homes_on_hbm, passing=passing, worker=worker, pause=pause)
        self.model, self.optimizer = prepare_tuned(model, optimizer, config, tuning)
        self.most = 0
        """Buckets with homes on HBM, at most."""

    @property
    def engine(self) -> Engine:
        return engine_of(self.model)

    @property
    def on_hbm(self) -> frozenset[int]:
        residence = self.engine.residence
        return residence.hbm.rehoming.on_hbm if isinstance(residence, Paged) else frozenset()

    def backward(self, number: int, rows: int = 2) -> None:
        setup = self.engine.setup
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
        x = x.to(DTYPES[setup.config.precision]).to(setup.device.torch_device)
        hetero.backward(self.model(x).float().square().sum())

    def step(
        self, number: int, rows: int = 2, *, parts: int = 1, clip: float | None = None
    ) -> None:
        for part in range(parts):
            self.backward(10 * number + part, rows)
        if clip is not None:
            self.optimizer.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.most = max(self.most, len(self.on_hbm))

    def bits(self) -> bytes:
        """Return weights, masters and states, bit for bit."""
        state = self.optimizer.state_dict()
        found = [*self.model.state_dict().values()]
        for kept in state["state"].values():
            found += [torch.as_tensor(kept[k]) for k in sorted(kept)]
        found += state.get("masters", {}).values()
        return b"".join(raw(v.detach().cpu().clone()).numpy().tobytes() for v in found)


def sim_run(hbm: int, *, homes_on_hbm: bool = True, **settings: Any) -> Run:
    device = SimDevice(seed=1, checked=True)
    return Run(device, hbm, homes_on_hbm=homes_on_hbm, **settings)


def pair(hbm: int, train: Callable[[Run], None], **settings: Any) -> Run:
    """Train with homes on HBM and without; every bit must be the same."""
    with_homes, without = sim_run(hbm, **settings), sim_run(hbm, homes_on_hbm=False, **settings)
    for run in (with_homes, without):
        train(run)
    assert with_homes.bits() == without.bits()
    assert not without.on_hbm
    return with_homes


def check_save_under_way(run: Run, again: Run, folder: Path) -> None:
    """Save while the next step is made; another run that loads it is where the save began."""
    expected = run.bits()
    save = hetero.save_checkpoint(folder / "c", run.model, run.optimizer, asynchronous=True)
    run.step(6)
    save.wait()
    hetero.load_checkpoint(folder / "c", again.model, again.optimizer)
    assert again.bits() == expected
    again.step(6)
    assert again.bits() == run.bits()
