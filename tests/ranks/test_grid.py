"""Weights and activations that ranks divide along two or three axes: the whole model's numbers
within rounding, and, paged, the bits of the same parts unpaged."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hetero
from hetero.errors import ConfigError
from hetero.parallel.tensor import parallelize
from hetero.testing.ranks import run_ranks
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import (
    Trained,
    difference,
    found_in,
    tiny_llama,
    torch_clip,
    weights_of,
    whole,
)

WORDS, WIDTH, HEAD, TOKENS = 24, 16, 4, 6


class Attention(nn.Module):
    head_dim = HEAD

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        out: torch.Tensor = x + self.mlp["down"](F.gelu(self.mlp["up"](self.second(x))))
        return out


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tokens(words) + self.positions(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


@dataclass(frozen=True)
class GridRun:
    """What a run does."""

    dims: str
    optimizer: str = "adamw"
    passes: int = 1
    clip: float | None = 0.05
    dp: int = 1
    """Ranks with the same parts, and other batches."""


SIZES = {"1d": (2,), "2d": (2, 2), "2.5d": (2, 2, 2), "3d": (2, 2, 2)}
NAMES = {"1d": ("tp",), "2d": ("x", "y"), "2.5d": ("x", "y", "d"), "3d": ("i", "j", "k")}
TIGHT = {"device": "cpu:sim", "hbm": 50_000, "chunk_bytes": 512}


def ranks_of(run: GridRun) -> int:
    return run.dp * int(torch.tensor(SIZES[run.dims]).prod())


def model_of(dims: str, dp: int = 1) -> LM:
    torch.manual_seed(0)
    model, names = LM(), NAMES[dims]
    mesh = init_device_mesh("cpu", (dp, *SIZES[dims]), mesh_dim_names=("dp_shard", *names))
    parallelize(model, mesh[names], dims)
    return model


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(number)
    return (
        torch.randint(0, WORDS, (4, TOKENS), generator=source),
        torch.randint(0, WORDS, (4, TOKENS), generator=source),
    )


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    words, then = batch(number)
    return F.cross_entropy(model(words).flatten(0, 1), then.flatten())


# -- against the whole model ---------------------------------------------------------------------


def far(rank: int, dims: str) -> float:
    """Return how far outputs and gradients are from those of the whole model."""
    torch.manual_seed(0)
    plain, model = LM(), model_of(dims)
    for number in range(2):
        for each in (plain, model):
            loss_of(each, number).backward()
    off = [model(batch(0)[0]) - plain(batch(0)[0])]
    for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert param.grad is not None, name
        assert other.grad is not None, name
        assert other.grad.placements == other.placements, name
        off.append(whole(other.grad) - param.grad)
    return max(float(each.detach().abs().max()) for each in off)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("dims", ["2d", "2.5d", "3d"])
def test_divided_layers_compute_what_whole_ones_do(dims: str) -> None:
    """Gradients are near 1, and sums are of parts, in another order: some ulps of fp32."""
    for off in run_ranks(ranks_of(GridRun(dims)), far, dims):
        assert off < 2e-6
