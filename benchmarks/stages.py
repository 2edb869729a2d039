"""Pipelines: how evenly models are cut, and what a small budget costs a rank's stages."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

from benchmarks.engine import (
    STEPS,
    UNIT_BYTES,
    UNITS,
    WIDTH,
    Figure,
    Figures,
    modelled_model,
    virtual,
)
from benchmarks.micro_batches import order_of
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.parallel.anatomy import Anatomy, Call, examine, result_of
from hetero.parallel.splitting import call_of
from hetero.parallel.stages import cut_model
from hetero.plan.presets import PRESETS
from hetero.rehearse.models import META, from_config
from hetero.rehearse.named import machine
from hetero.rehearse.split import MachineClock
from hetero.status import status

PROFILE, POSITIONS = "h100-sxm", 4096
CUTS = {"llama-3-8b": (2, 4), "llama-3-70b": (2, 4)}
"""Ranks of a pipeline, by model."""
COARSE = {"llama-3-8b": (8,), "llama-3-70b": (8,)}
"""With stages of so few halves of blocks that one more or less is much: the best cut is shown."""


def split(device: str | None = None) -> Figures:
    """How much longer than the mean the slowest stage takes, as rehearsed, all units counted."""
    rows: list[Figure] = []
    detail: dict[str, Any] = {"profile": PROFILE, "positions": POSITIONS, "dtype": "bf16"}
    for name, sizes in CUTS.items():
        found = anatomy_of(name)
        cuts = {n: cut_model(found, range(n), is_timed=True) for n in (*sizes, *COARSE[name])}
        detail |= {f"{name}, {n} stages": str(cut).splitlines() for n, cut in cuts.items()}
        for n in sizes:
            rows.append(Figure(f"{name}, {n} stages", cuts[n].imbalance, "ratio", "<=", 0.05))
    return Figures(rows, detail)


def anatomy_of(name: str) -> Anatomy:
    model: nn.Module = from_config(PRESETS[name], plain=False).to(torch.bfloat16)
    tokens = torch.empty(1, POSITIONS, dtype=torch.long, device=META)

    def loss(output: Any) -> torch.Tensor:
        return F.cross_entropy(result_of(output).float().flatten(0, 1), tokens.flatten())

    clock = MachineClock(machine(Config.load(profile=PROFILE)))
    return examine(model, Call((tokens,), call_of(model)), clock, loss)


# -- a rank's steps ------------------------------------------------------------------------------

RANKS, MICRO_BATCHES = 2, 8
QUARTER = UNITS * UNIT_BYTES
"""Of weights, gradients and two moments; activations have to fit in it too."""
RATIOS = (0.5, 1.0)
"""Of a unit's transfer and its forward: at more, the link has more to move than compute hides."""


def pipeline_step(device: str | None = None) -> Figures:
    """A rank's step of a pipeline within a quarter of its states / with all weights standing."""
    rows: list[Figure] = []
    detail: dict[str, Any] = {"units": UNITS, "micro-batches": MICRO_BATCHES, "clock": "virtual"}
    for kind in ("ScheduleGPipe", "Schedule1F1B"):
        orders = [order_of(getattr(schedules, kind), [rank], RANKS, RANKS) for rank in range(RANKS)]
        for ratio in RATIOS:
            pairs = [(ran(order, ratio, QUARTER), ran(order, ratio)) for order in orders]
            worst = max(within["seconds"] / standing["seconds"] for within, standing in pairs)
            name = f"{kind.removeprefix('Schedule')}, transfer {ratio:g}x compute"
            rows.append(Figure(name, worst, "ratio", "<=", 1.10))
            detail[name] = [{"within": within, "standing": standing} for within, standing in pairs]
    return Figures(rows, detail)


def ran(order: list[Any], ratio: float, hbm: int = 1 << 30) -> dict[str, Any]:
    """Make steps in an order of passes; return the seconds of one, and what it moved."""
    rate = UNIT_BYTES / ratio
    device = SimDevice(seed=1, h2d_bytes_per_second=rate, d2h_bytes_per_second=rate)
    model, _ = modelled_model(device, 1.0)
    config = Config.load(device=device, hbm=hbm, chunk_bytes=4096)
    model, optimizer = prepare_tuned(
        *(model, torch.optim.AdamW(model.parameters()), config), virtual()
    )
    seconds = []
    for _ in range(STEPS):
        start = device.now()
        passes(model, order)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(device.now() - start)
    seen = status(model)
    found = {"seconds": statistics.median(seconds[2:]), "fetches": seen.fetches}
    return {**found, "misses": seen.misses, "evictions": seen.evictions}


def passes(model: nn.Module, order: list[Any]) -> None:
    """Make the passes of a schedule's actions; micro-batches go back in the order they came."""
    waiting: list[torch.Tensor] = []
    for action in order:
        if action.computation_type.name == "FORWARD":
            waiting.append(model(torch.randn(2, WIDTH, requires_grad=True)).sum())
        elif action.computation_type.name == "FULL_BACKWARD":
            waiting.pop(0).backward()
