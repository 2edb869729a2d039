"""Folders, optimizer, schedule and budgets of a run, from its options (floor 4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero import optim
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import BudgetError, ConfigError
from hetero.io import make_folder
from hetero.parallel.mesh import TENSOR, device_mesh, sizes_of
from hetero.recipes.options import TrainOptions, mesh_sizes
from hetero.recipes.record import free_folder
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
RUNS = "runs"  # folder in the working directory, for checkpoints and the demo's homes on disk
RECORDING = "run"  # folder for the recording, among a run's checkpoints


# -- folders -------------------------------------------------------------------------------------


def folder_of(options: TrainOptions) -> Path:
    """Return the folder of a run's checkpoints; without a name the next number in `RUNS`.

    Raises ConfigError if it holds those of another run, or with resume none.
    """
    if options.save_dir is None:
        numbers = [int(p.name) for p in Path(RUNS).glob("*") if p.name.isdigit()]
        saved = [n for n in numbers if has_checkpoint(Path(RUNS, str(n)))]
        number = max(saved, default=0) if options.resume else max(numbers, default=0) + 1
        folder = Path(RUNS, str(number))
    else:
        folder = Path(options.save_dir)
    there = has_checkpoint(folder)
    if options.resume and not there:
        raise ConfigError(
            f"{folder} holds no checkpoint to go on from",
            advice="start without --resume, or name the run's folder with --save-dir",
        )
    if there and not options.resume:
        raise ConfigError(
            f"{folder} holds the checkpoints of another run",
            advice="go on from them with --resume, or name another folder with --save-dir",
        )
    return folder


def has_checkpoint(folder: Path) -> bool:
    return any(p.name.removeprefix("step-").isdigit() for p in folder.glob("step-*"))


def record_folder(options: TrainOptions, folder: Path) -> Path | None:
    """Return where to record a run with checkpoints in ``folder``; None: do not record."""
    if options.record == "none":
        return None
    return free_folder(Path(options.record) if options.record else folder / RECORDING)


# -- the model -----------------------------------------------------------------------------------


def divided(model: nn.Module, config: Config, n_ranks: int) -> int:
    """Divide a model's layers over the axis "tp" of the mesh; returns how many ranks that are.

    Raises ConfigError for a model without values, or of other layers, or that they do not divide.
    """
    sizes = {} if config.mesh is None else sizes_of(config.mesh, n_ranks)
    if sizes.get(TENSOR, 1) == 1:
        return 1
    from hetero.parallel.recipe import parallelize  # other runs do not pay for the import

    empty = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if empty is not None:
        raise ConfigError(
            f"--mesh with {TENSOR}={sizes[TENSOR]}: {empty!r} is read from its file by prepare, and"
            " not in the model yet",
            advice="name a preset with --model; for other models write a loop: docs/tensor-parallel"
            ".md",
        )
    kind = open_device(config.device).torch_device.type
    parallelize(model, device_mesh(kind, sizes)[TENSOR])
    return sizes[TENSOR]


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


def settings_of(options: TrainOptions) -> Config:
    """Return the given settings; hbm="all" means no budget."""
    given = dict(options.settings)
    if is_unlimited(options):
        given["hbm"] = None
    if isinstance(given.get("mesh"), str) and "=" in given["mesh"]:  # of the command line
        given["mesh"] = mesh_sizes(given["mesh"])
    return Config.load(None, **given)


def is_unlimited(options: TrainOptions) -> bool:
    return options.settings.get("hbm") == "all"


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
