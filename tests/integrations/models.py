"""What tests of accelerate and of Lightning train."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    """Blocks between an embedding and the head that it is tied to."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        wide = (
            nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(blocks)
        )
        self.embed = nn.Embedding(32, 24)
        self.blocks = nn.ModuleList(wide)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
