"""One side of a memory wall: python -m tests.faults.wall SIDE WALL WEIGHTS DISK (run in a child).

SIDE is "plain" or "hetero", WALL one of `WALLS`. Prints one line of JSON: the digest of the
weights after the last step, and for hetero what was where.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

import hetero
from hetero.weights import Weights

WIDTH, STEPS, BATCH = 2048, 2, 4


class Wall(NamedTuple):
    """A model, and the memory that it does not fit."""

    layers: int
    limit_bytes: int
    """Of the kernel: budgets, and Python with torch."""
    hbm: str
    host: str

    @property
    def state_bytes(self) -> int:
        """Parameter, gradient and two moments."""
        return 16 * self.layers * (WIDTH * WIDTH + WIDTH)


WALLS = {
    "small": Wall(6, 400 * 2**20, "48MiB", "48MiB"),
    "large": Wall(24, 512 * 2**20, "96MiB", "112MiB"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def build(wall: Wall) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(wall.layers)))


def trained(side: str, name: str, weights: str, disk: str) -> dict[str, Any]:
    """Train one side; return the digest of its weights, and for hetero what was where."""
    wall = WALLS[name]
    budgets = {"hbm": wall.hbm, "host": wall.host, "nvme": disk}
    settings = {"device": "cpu", **budgets, "weights": weights}
    if side == "hetero":
        with hetero.empty_init():
            model = build(wall)
    else:
        model = build(wall)
        load(model, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if side == "hetero":
        model, optimizer = hetero.prepare(model, optimizer, **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        model(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = {"digest": digest(model)}
    if side == "hetero":
        status = hetero.status(model)
        found |= {"tiers": status.tiers, "read": status.read_bytes, "write": status.write_bytes}
    return found


def load(model: nn.Module, weights: str) -> None:
    """Copy the weights into the model, piece by piece."""
    with Weights(weights) as source, torch.no_grad():
        for name, param in model.named_parameters():
            for start, values in source.pieces(name, 2**20):
                param.view(-1)[start : start + values.numel()].copy_(values)


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.clone().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(trained(*sys.argv[1:])))
