"""How much longer sequences are that ranks divide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.engine import Figure, Figures, adamw
from hetero.api import prepare, release
from hetero.device import SimDevice
from hetero.errors import BudgetError
from hetero.functional.loss import linear_cross_entropy
from hetero.parallel.context import WAYS, ZIGZAG, context_parallel
from hetero.recipes.gpt import Block, GPTConfig
from hetero.status import status
from hetero.testing.ranks import run_ranks

SHAPE = GPTConfig(width=32, layers=4, heads=4, vocab=64, checkpoint_blocks=False)
BUDGET_BYTES = 2 * 2**20
STEPS = 3
GRID = 8
"""Positions; lengths are multiples of it, which four ranks cut in a zigzag."""
REACH = {2: 1.9, 4: 3.7}
"""By ranks: the longest sequence, over that of one."""


class Decoder(nn.Module):
    """Blocks without positions: a table of them would grow with the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SHAPE.vocab, SHAPE.width)
        self.blocks = nn.Sequential(*(Block(SHAPE) for _ in range(SHAPE.layers)))
        self.head = nn.Linear(SHAPE.width, SHAPE.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(self.blocks(self.tokens(tokens)), self.head.weight, labels)


def longest(device: str | None = None) -> Figures:
    """The longest sequence in a fixed budget of each of 2 and 4 ranks, over that of one."""
    alone = largest(partial(fits, 1, ZIGZAG), 512)
    found = {(1, "alone"): alone}
    for n_ranks in REACH:
        for how in WAYS:
            found[n_ranks, how] = largest(partial(fits, n_ranks, how), n_ranks * alone)
    rows = [
        Figure(f"{n_ranks} ranks, {how}: length / one rank's", length / alone, "", ">=", least)
        for (n_ranks, how), length in found.items()
        if (least := REACH.get(n_ranks)) is not None
    ]
    detail = {f"{n_ranks} {how}": length for (n_ranks, how), length in found.items()}
    return Figures(rows, {"hbm_bytes": BUDGET_BYTES, "positions": detail})


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest multiple of `GRID` that fits, near a guess."""
    low, high = 0, guess // GRID
    while fits(high * GRID):
        low, high = high, high + max(1, high // 8)
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * GRID) else (low, middle)
    return low * GRID


def fits(n_ranks: int, how: str, length: int) -> bool:
    """Whether a few steps pass on all ranks."""
    return all(run_ranks(n_ranks, _passes, how, length))


def _passes(rank: int, how: str, length: int) -> bool:
    torch.manual_seed(0)
    model: Any = Decoder()
    n_ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("cp",))
    settings: dict[str, Any] = {"device": SimDevice(), "hbm": BUDGET_BYTES}
    model, optimizer = prepare(
        model, adamw(model), mesh={"cp": n_ranks}, activations="recompute", **settings
    )
    try:
        for step in range(STEPS):
            dice = torch.Generator().manual_seed(step)
            words = torch.randint(0, SHAPE.vocab, (1, length + 1), generator=dice)
            given = [words[:, :-1].clone(), words[:, 1:].clone()]
            with context_parallel(mesh, how, buffers=given, buffer_seq_dims=[1, 1]):
                model(*given).backward()
            optimizer.step()
            optimizer.zero_grad()
    except BudgetError:
        return False
    within = (status(model).tiers["HBM"]["peak"] or 0) <= BUDGET_BYTES
    release(model, optimizer)
    return within
