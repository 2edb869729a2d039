"""Parts of unlike sizes, where ranks do not divide a tensor: the bits of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hetero
from hetero.testing.ranks import run_ranks
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import Trained, difference, found_in, torch_clip

WIDTH = 8
TIGHT: dict[str, Any] = {"device": "cpu:sim", "hbm": 1400, "chunk_bytes": 64}


class Uneven(nn.Module):
    """Two layers of which two ranks have parts of 4 and 3, and of 3 and 2, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.wide, self.last = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        out: torch.Tensor = y + self.last(torch.relu(self.wide(y)))
        return out


def trained(optimizer: str, clip: float | None, is_paged: bool) -> tuple[Trained, int]:
    torch.manual_seed(0)
    model: Any = Uneven()
    cut = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"up": cut, "wide": cut})
    stepped: Any = OPTIMIZERS[optimizer](model.parameters())
    if is_paged:
        model, stepped = hetero.prepare(model, stepped, **TIGHT)
    losses, norms = [], []
    for step in range(5):
        source = torch.Generator().manual_seed(step)
        loss = model(torch.randn(3, WIDTH, generator=source)).pow(2).mean()
        loss.backward()
        if clip is not None and is_paged:
            norms.append(float(stepped.clip_grad_norm_(clip)))
        elif clip is not None:
            norms.append(float(torch_clip(list(model.parameters()), clip)))
        stepped.step()
        stepped.zero_grad()
        losses.append(float(loss.detach()))
    evictions = hetero.status(model).evictions if is_paged else 0
    if is_paged:
        _, stepped = hetero.release(model, stepped)
    found = found_in(model, stepped)
    found.losses, found.norms = losses, norms
    return found, evictions


def compared(rank: int, optimizer: str, clip: float | None) -> tuple[list[str], int]:
    (expected, _), (found, evictions) = (trained(optimizer, clip, paged) for paged in (False, True))
    return difference(found, expected), evictions


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parts_of_unlike_sizes_train_as_in_torch(optimizer: str, clip: float | None) -> None:
    for odd, evictions in run_ranks(2, compared, optimizer, clip):
        assert not odd
        assert evictions >= 3
