"""The optimizer and the schedule of a run, from its options (floor 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero import optim
from hetero.recipes.options import TrainOptions

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
