"""One side of the memory wall: python -m tests.faults.wall SIDE WEIGHTS DISK (run in a child).

SIDE is "plain" or "hetero". Prints one line of JSON: the digest of the weights after the last step,
and for hetero what was where.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from torch import nn

import hetero
from hetero.weights import Weights

WIDTH, LAYERS, STEPS, BATCH = 2048, 24, 2, 4
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
STATE_BYTES = 16 * PARAMETERS  # parameter, gradient and two moments
LIMIT_BYTES = STATE_BYTES // 3
HBM, HOST = "96MiB", "112MiB"  # beside them there is Python with torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def main(side: str, weights: str, disk: str) -> None:
    torch.set_num_threads(1)
    settings = {"device": "cpu", "hbm": HBM, "host": HOST, "nvme": disk, "weights": weights}
    if side == "hetero":
        with hetero.empty_init():
            model = build()
    else:
        model = build()
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
    print(json.dumps(found))


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
    main(*sys.argv[1:])
