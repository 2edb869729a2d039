"""A step under a budget of page-locked memory, on modelled machines."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from benchmarks.engine import Figure, Figures
from hetero.api import empty_init
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.rehearse.plan import plan

MACHINES = ("rtx4090", "h100-sxm")
BATCHES = (1, 4)
CONTEXT = 4096


def pinned(device: str | None = None) -> Figures:
    """A step of an 8B model with 512 MiB of page-locked memory, and with all it can use."""
    with empty_init():
        shape = GPTConfig(vocab=32000, width=4096, layers=32, heads=32, context=CONTEXT)
        model = GPT(shape)
    rows, detail = [], {}
    for machine, batch in product(MACHINES, BATCHES):
        seconds = [step_seconds(model, machine, batch, limit) for limit in ("512MiB", None)]
        name = f"512 MiB / all, batch {batch}, {machine} (modelled)"
        rows.append(Figure(name, seconds[0] / seconds[1], "x", "<=", 1.15))
        detail[name] = seconds
    return Figures(rows, detail)


def step_seconds(model: GPT, machine: str, batch: int, limit: str | None) -> float:
    """Return the modelled time of a step."""
    tokens = torch.zeros(batch, CONTEXT, dtype=torch.long)
    settings: dict[str, Any] = {
        "precision": "bf16",
        "hbm": "20GiB",
        "host": "200GiB",
        "pinned": limit,
    }
    return plan(model, tokens, profile=machine, **settings).step_seconds
