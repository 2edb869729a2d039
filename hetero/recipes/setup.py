"""Folders, optimizer, schedule and budgets of a run, from its options (floor 4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero import optim
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import BudgetError
from hetero.io import make_folder
from hetero.recipes.folders import RUNS
from hetero.recipes.options import TrainOptions, is_unlimited
from hetero.train.engine.blueprint import draw
from hetero.train.engine.spill import draw_spill

WARM_UP = 0.1  # of the steps
FLOOR = 0.1  # of the peak learning rate, where the cosine ends
MOMENTUM = 0.9
BETAS = {"betas": (0.9, 0.95)}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, BETAS),
    "adam": (torch.optim.Adam, BETAS),
    "sgd": (torch.optim.SGD, {"momentum": MOMENTUM}),
    "adafactor": (torch.optim.Adafactor, {}),
    "lion": (optim.Lion, {}),
    "adamw8bit": (optim.AdamW8bit, {}),
}
STATES_PER_BUDGET = 4  # the demo's hbm is this part of parameters, gradients and the two moments
STATES_PER_HOST = 2  # and its host is this part; the disk has the rest


# -- optimizer and schedule ----------------------------------------------------------------------


def optimizer_of(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    kind, more = OPTIMIZERS[options.optimizer]
    made: torch.optim.Optimizer = kind(
        params, lr=options.lr, weight_decay=options.weight_decay, **more
    )
    return made


def factor_of(options: TrainOptions, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at a step: a linear warm-up, then the schedule."""
    warm_up = max(1, int(WARM_UP * steps)) if options.warmup is None else options.warmup

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        if options.schedule == "constant":
            return 1.0
        if options.schedule == "linear":
            return 1 - done
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2

    return factor


# -- budgets -------------------------------------------------------------------------------------


def settings_for(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, options: TrainOptions
) -> Config:
    """Return the settings of a run.

    The demo's defaults show every tier: HBM for a quarter of the states, RAM for half, a disk for
    the rest (several ranks use no disk); without CUDA the device is simulated.
    """
    if not options.is_demo:
        return config
    if config.device is None:
        found = open_device(None)
        config = dataclasses.replace(config, device="cpu:sim" if found.name == "cpu" else found)
    if is_unlimited(options):
        return config
    if config.hbm is None:
        config = dataclasses.replace(config, hbm=states_of(model) // STATES_PER_BUDGET)
    if config.mesh is not None:  # ranks keep no homes on disk
        return config
    if config.host is None:
        config = dataclasses.replace(config, host=host_of(model, optimizer, config))
    if not config.nvme:
        make_folder(RUNS, mode=0o777).close()
        config = dataclasses.replace(config, nvme=(RUNS,))
    return config


def host_of(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> int:
    """Return the default RAM budget: half the states, so that the rest is on disk."""
    half = states_of(model) // STATES_PER_HOST
    try:
        draw_spill(draw(model, optimizer, config, open_device(config.device)), half, None)
    except BudgetError as error:  # a model too small for its own largest update
        return error.needed_bytes
    return half


def states_of(model: nn.Module) -> int:
    """Return the bytes of parameters, and of the gradients and two moments of those that train."""
    sizes = ((p.numel() * p.element_size(), p.requires_grad) for p in model.parameters())
    return sum(4 * n_bytes if trains else n_bytes for n_bytes, trains in sizes)
