"""The budgets of a run, from its options (floor 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from hetero.api import engine_of
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import ConfigError
from hetero.io import make_folder
from hetero.parallel.mesh import TENSOR, device_mesh, sizes_of
from hetero.recipes.folders import RUNS
from hetero.recipes.options import TrainOptions, is_unlimited
from hetero.rehearse.plan import plan

STATES_PER_BUDGET = 4  # the demo's hbm is this part of parameters, gradients and the two moments
STATES_PER_HOST = 2  # and its host is this part; the disk has the rest
QUARTER, HALF = "a quarter of the states", "half of the states"
NEEDED = "what a rehearsal of this batch needs"
SPARE = 1 / 32  # of a rehearsed need, which knows no kernel's workspace
ANY_CPU, ANY_GPU = "laptop-4c-avx2-ddr4", "rtx4090"  # profiles: bytes are those of any machine


class Settled(NamedTuple):
    """The settings of a run, and what is known of its budgets before it begins."""

    config: Config
    why: Mapping[str, str] = MappingProxyType({})
    """By the name of a budget that was not given."""
    step_write_bytes: int | None = None
    """To disk in a step, as rehearsed; None: unknown."""


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


def settings_for(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, options: TrainOptions
) -> Settled:
    """Return the settings of a run.

    The demo's defaults show every tier: HBM for a quarter of the states, RAM for half, a disk for
    the rest (several ranks use no disk), and more where a rehearsal of this batch needs more;
    without CUDA the device is simulated.
    """
    if not options.is_demo:
        return Settled(config)
    if config.device is None:
        found = open_device(None)
        config = dataclasses.replace(config, device="cpu:sim" if found.name == "cpu" else found)
    if is_unlimited(options):
        return Settled(config)
    given = config
    if config.hbm is None:
        config = dataclasses.replace(config, hbm=states_of(model) // STATES_PER_BUDGET)
    if config.mesh is not None:  # ranks keep no homes on disk
        return Settled(config, {"hbm": QUARTER} if given.hbm is None else {})
    if config.host is None:
        config = dataclasses.replace(config, host=states_of(model) // STATES_PER_HOST)
    if not config.nvme:
        make_folder(RUNS, mode=0o777).close()
        config = dataclasses.replace(config, nvme=(RUNS,))
    if given.hbm is not None and given.host is not None:
        return Settled(config)
    return rehearsed(model, optimizer, given, config, options)


def rehearsed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Config,
    config: Config,
    options: TrainOptions,
) -> Settled:
    """Return settings whose default budgets hold this batch, as a rehearsal of its steps says."""
    name = getattr(config.device, "name", config.device)  # as cuda:1
    kind = "cuda" if name.startswith("cuda") else name
    profile = config.profile or (ANY_GPU if kind == "cuda" else ANY_CPU)
    tried = dataclasses.replace(config, device=kind, profile=profile)
    tokens = torch.zeros(options.batch, options.seq, dtype=torch.long)
    batch = {"tokens": tokens, "targets": tokens}
    found = plan(model, batch, optimizer=optimizer, config=tried, estimates=False)
    short = {row.tier: row.needed_bytes for row in found.shortfalls}
    why = {"hbm": QUARTER, "host": HALF}
    for name in why:
        needed = short.get(name.upper())
        if needed is not None and getattr(given, name) is None:
            config = Config.load(config, **{name: int(needed * (1 + SPARE))})
            why[name] = NEEDED
    kept = {name: said for name, said in why.items() if getattr(given, name) is None}
    return Settled(config, kept, found.disk_write_bytes)


class Size(NamedTuple):
    """What a model consists of."""

    parameters: int
    state_bytes: int
    """Of weights, gradients, masters and what the optimizer keeps."""


def size_of(model: nn.Module) -> Size:
    """Return the size of a prepared model, as its recordings and their reports say it."""
    setup = engine_of(model).setup
    numels = [param.numel() for param in setup.params]
    return Size(sum(numels), setup.blueprint.state_bytes(numels))


def states_of(model: nn.Module) -> int:
    """Return the bytes of parameters, and of the gradients and two moments of those that train:
    of a model that is not prepared yet, to choose budgets."""
    sizes = ((p.numel() * p.element_size(), p.requires_grad) for p in model.parameters())
    return sum(4 * n_bytes if trains else n_bytes for n_bytes, trains in sizes)
