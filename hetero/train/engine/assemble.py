"""From a plain model and its optimizer to an engine, or back if that fails (floor 2)."""

from __future__ import annotations

import torch
from torch import nn

from hetero import interrupts
from hetero.config import Config
from hetero.device import Device
from hetero.device.comm import ALONE_COMM, Comm
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.broken import Broken
from hetero.train.engine.engine import Engine, move_out
from hetero.train.engine.paged import Paged
from hetero.train.engine.resident import Mastered, Resident
from hetero.train.engine.setup import Setup, set_up
from hetero.train.engine.tuning import Tuning
from hetero.train.model.parts import Parts, PlainTensors


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    device: Device,
    blueprint: Blueprint,
    tuning: Tuning | None = None,
    comm: Comm = ALONE_COMM,
    parts: Parts | None = None,
) -> Engine:
    """Move the parameters to their homes and attach everything; undone on any failure."""
    setup = set_up(
        *(model, optimizer, config, device, blueprint, tuning or Tuning(), comm),
        parts or PlainTensors(),
    )
    interrupts.hold(setup)
    residence: Paged | Resident | None = None
    try:
        setup.move_in()
        broken = Broken(model)
        residence = residence_of(setup, broken)
        residence.attach()
        setup.rewrite()
        return Engine(setup, residence, broken)
    except BaseException:
        move_out(setup, residence, failed=True)
        setup.close()
        interrupts.let_go(setup)
        raise


def residence_of(setup: Setup, broken: Broken) -> Paged | Resident:
    """Return the residence of a model's parameters."""
    if not setup.budget.stays:
        return Paged(setup, broken)
    return Mastered(setup) if setup.has_masters else Resident(setup)
