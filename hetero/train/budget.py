"""The budget of a prepared model: what fits, and what is refused before it is tried (floor 2).

``hbm`` means everything on the device: buffers, activations, and frames in what is left.
Activations are not known before the first step, which therefore runs with the fewest frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hetero.config import Config, HostLimit, describe_limit
from hetero.device import Device
from hetero.errors import BudgetError, ConfigError, OutOfMemory
from hetero.train.blueprint import Blueprint
from hetero.train.check import pages, tables
from hetero.train.spill import Spill, draw_spill, draw_way, passing_bytes
from hetero.types import format_bytes

CUDA_SHARE = 0.95  # of free HBM, when no budget is given
CPU_FRAMES = 4  # this part of RAM is for frames, when no budget is given for them
CUDA_RESIDENT = 1.5  # a model is kept on the device when its states fit this many times


@dataclass(slots=True)
class Budget:
    """Bytes of HBM (None: no limit) and what of them is spoken for beside frames."""

    plan: Blueprint
    hbm: int | None
    buffer_bytes: int
    spill: Spill | None = None
    """What goes to disk, and the way there."""
    host_bytes: int = 0
    """Of RAM, for homes and what passes through to them."""
    activation_bytes: int = 0
    measured: bool = False

    @property
    def room(self) -> int:
        """Frames (granules) that fit beside the buffers, activations not counted."""
        return max(0, (self.hbm or 0) - self.buffer_bytes) // self.plan.granule_bytes

    @property
    def most_bytes(self) -> int:
        """HBM beside buffers."""
        return (self.hbm or 0) - self.buffer_bytes

    def frames_beside(self, activation_bytes: int, largest: str = "") -> int:
        """Return the frames that fit beside activations, or raise naming what would be enough.

        ``largest`` says which unit saves most.
        """
        plan, hbm = self.plan, self.hbm or 0
        left = hbm - self.buffer_bytes - activation_bytes
        if left < plan.least_bytes:
            total = activation_bytes + self.buffer_bytes + plan.least_bytes
            raise OutOfMemory(
                f"activations take {format_bytes(activation_bytes)} and buffers"
                f" {format_bytes(self.buffer_bytes)} of hbm={format_bytes(hbm)}; unit"
                f" {plan.widest_name!r} needs {format_bytes(plan.least_bytes)} of frames beside"
                f" them{'; ' * bool(largest)}{largest}",
                advice=f"raise hbm= to {total} bytes, lower the batch, or use activations='auto',"
                " micro_batch= or fused_loss=",
                tier="HBM",
                needed_bytes=total,
            )
        return left // plan.granule_bytes

    @property
    def spills(self) -> bool:
        """Whether any home lies on disk."""
        return self.spill is not None and bool(self.spill.on_disk)

    def holds_everything(self, activation_bytes: int) -> bool:
        """Whether parameters, gradients and states fit on the device beside the activations."""
        whole = self.plan.home_bytes + activation_bytes + self.buffer_bytes
        return whole <= (self.hbm or 0)


def decide(
    model: nn.Module,
    config: Config,
    device: Device,
    plan: Blueprint,
    extent_numel: int | None = None,
) -> tuple[Budget, str]:
    """Return the budget and the mode ("paged", "resident"); refuse what cannot fit."""
    hbm, total, free = config.hbm, device.total_bytes(), device.free_bytes()
    if hbm is not None and total is not None and hbm > total:
        raise ConfigError(
            f"hbm={format_bytes(hbm)} is more than the device has ({format_bytes(total)})",
            advice=f"hbm= takes at most {total} bytes",
        )
    if hbm is None and free is not None:
        hbm = int(CUDA_SHARE * free)
    on_cuda = device.is_cuda
    beside = sum(bytes_of(t) for t in (*model.buffers(), *(param for _, param in tables(model))))
    budget = Budget(plan, hbm, beside + plan.workspace_bytes(is_cuda=on_cuda))
    host = host_bytes(model, config, device.host_limit())
    # one memory, and homes that are not, or cannot be, what computes
    if hbm is None and (plan.is_coded or (config.nvme and plan.home_bytes > host)):
        budget.hbm = hbm = max(host // CPU_FRAMES, 2 * plan.least_bytes + budget.buffer_bytes)
        host = max(0, host - hbm)
    elif config.host is None and not on_cuda and hbm is not None:
        host = max(0, host - hbm)
    fits = hbm is None or (on_cuda and hbm >= CUDA_RESIDENT * plan.home_bytes)
    resident = fits and not plan.is_coded
    down = bool(config.nvme) and config.activations == "offload"
    if not resident:
        check_hbm(budget)
        if config.nvme:
            budget.spill = draw_spill(plan, host, config.nvme_bytes, extent_numel, pool=down)
    elif down:
        budget.spill = draw_way(plan, host, extent_numel)
    if not (resident and on_cuda):
        if budget.spill is None or resident:
            check_host(plan, host, nvme=bool(config.nvme))
        whole = plan.home_bytes + passing_bytes(plan)
        budget.host_bytes = whole if budget.spill is None else budget.spill.host_bytes
    return budget, "resident" if resident else "paged"


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a buffer, which may be sparse."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    at = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    inside = tensor.col_indices() if by_rows else tensor.row_indices()
    return at.nbytes + inside.nbytes + tensor.values().nbytes


def host_bytes(model: nn.Module, config: Config, limit: HostLimit) -> int:
    """Return the RAM for homes: the budget, or what this process may take."""
    held = sum(p.nbytes for _, p in pages(model) if p.device.type == "cpu")  # moved, not copied
    if config.host is None:
        return limit.n_bytes + held
    if config.host > limit.n_bytes + held:
        raise ConfigError(
            f"host={format_bytes(config.host)} is more than this process may take:"
            f" {describe_limit(limit)}",
            advice=f"host= takes at most {limit.n_bytes + held} bytes here",
        )
    return config.host


def check_hbm(budget: Budget) -> None:
    """Refuse a budget that the widest unit alone does not fit, naming the smallest that works."""
    plan, hbm = budget.plan, budget.hbm or 0
    least = plan.least_bytes + budget.buffer_bytes
    if least > hbm:
        raise BudgetError(
            f"unit {plan.widest_name!r} needs {format_bytes(least)} of HBM at once; hbm is"
            f" {format_bytes(hbm)}",
            advice=f"the smallest hbm= that works for the states is {least} bytes; activations"
            " come on top, or split the unit with units=",
            tier="HBM",
            needed_bytes=least,
        )


def check_host(plan: Blueprint, have: int, *, nvme: bool) -> None:
    """Refuse states that RAM cannot hold."""
    need = plan.home_bytes
    if need > have:
        advice = "raise host=, train fewer parameters, or use an optimizer with less state"
        if not nvme:
            advice = f"name a directory on a drive with nvme=, {advice}"
        raise BudgetError(
            f"HOST must hold {format_bytes(need)} of parameters, gradients and states;"
            f" {format_bytes(have)} are there, {need - have} bytes short",
            advice=advice,
            tier="HOST",
            needed_bytes=need,
        )
