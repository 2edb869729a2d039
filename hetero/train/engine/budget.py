"""The budget of a prepared model: what fits, and what is refused before it is tried (floor 2).

``hbm`` means everything on the device: buffers, activations, and frames in what is left.
Activations are not known before the first step, which therefore runs with the fewest frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from hetero.config import Config, HostLimit, describe_limit
from hetero.device import Device
from hetero.errors import BudgetError, ConfigError, OutOfMemory
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.check import pages, tables
from hetero.train.engine.spill import Spill, draw_spill, draw_way, passing_bytes
from hetero.train.model.host_work import host_work
from hetero.types import format_bytes

CUDA_SHARE = 0.95  # of free HBM, when no budget is given
CPU_FRAMES = 4  # this part of RAM is for frames, when no budget is given for them
CUDA_RESIDENT = 1.5  # a model is kept on the device when its states fit this many times
WORTH = 8  # frames get no less than this part of HBM more at once: they are filled and planned anew


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
    stays: bool = False
    """Whether parameters stay where they compute, from the beginning."""

    @property
    def room(self) -> int:
        """Frames (granules) that fit beside the buffers, activations not counted."""
        return max(0, (self.hbm or 0) - self.buffer_bytes) // self.plan.granule_bytes

    @property
    def most_bytes(self) -> int:
        """HBM beside buffers."""
        return (self.hbm or 0) - self.buffer_bytes

    @property
    def room_bytes(self) -> int:
        """HBM beside buffers and the fewest frames."""
        return self.most_bytes - self.plan.least_bytes

    def frames_beside(self, activation_bytes: int) -> int:
        """Return the frames that fit beside activations, or raise naming what would be enough."""
        if activation_bytes > self.room_bytes:
            raise self.refusal(activation_bytes)
        return (self.most_bytes - activation_bytes) // self.plan.granule_bytes

    def refusal(
        self,
        activation_bytes: int,
        *,
        where: str = "",
        known: str = "",
        held_bytes: int = 0,
        is_whole: bool = True,
    ) -> OutOfMemory:
        """Return the error of activations that take too much.

        Args:
            where: which unit passed the budget.
            known: which unit saves most.
            held_bytes: of frames that cannot be given up.
            is_whole: whether a whole step was measured, or its beginning.
        """
        plan, hbm = self.plan, self.hbm or 0
        frames = max(plan.least_bytes, held_bytes)
        total = activation_bytes + self.buffer_bytes + frames
        return OutOfMemory(
            f"activations take {format_bytes(activation_bytes)}{where} and buffers"
            f" {format_bytes(self.buffer_bytes)} of hbm={format_bytes(hbm)}; unit"
            f" {plan.widest_name!r} needs {format_bytes(frames)} of frames beside them"
            f"{'; ' * bool(known)}{known}",
            advice=f"raise hbm= to {'' if is_whole else 'at least '}{total} bytes, lower the batch,"
            " or use activations='auto', micro_batch= or fused_loss=",
            tier="HBM",
            needed_bytes=total,
        )

    @property
    def disk_bytes(self) -> int:
        """Of disk, for homes."""
        return 0 if self.spill is None else self.spill.disk_bytes

    @property
    def spills(self) -> bool:
        """Whether any home lies on disk."""
        return self.spill is not None and bool(self.spill.on_disk)

    def holds_everything(self, activation_bytes: int) -> bool:
        """Whether parameters, gradients and states fit on the device beside the activations."""
        whole = self.plan.home_bytes + activation_bytes + self.buffer_bytes
        return whole <= (self.hbm or 0)


class Frames(Protocol):
    """The frames that parameters lie in."""

    @property
    def limit(self) -> int:
        """How many there are, apart from the others or not."""

    def resize(self, limit: int) -> bool:
        """Have so many; False, and nothing changed, while a replica is held."""

    def lower(self, limit: int) -> bool:
        """Give up those from ``limit`` on; False where something that is held lies there."""

    def vacate(self) -> int:
        """Give up all that is not held, for now; returns the bytes of the others."""

    def shed(self) -> None:
        """Give up those apart from the others that are not held."""


class Excess(NamedTuple):
    """What passed the budget goes on, where HBM is simulated, for as long as it is measured."""

    where: str = ""
    held_bytes: int = 0
    """Of frames, when it did."""
    most_bytes: int = 0
    """That RAM holds meanwhile."""


class Beside:
    """What HBM has beside buffers and frames; frames give way to what is alive there.

    Args:
        ram: returns the bytes of RAM that may still be taken.
    """

    def __init__(self, budget: Budget, frames: Frames, ram: Callable[[], int]) -> None:
        self.excess: Excess | None = None
        self._budget = budget
        self._frames = frames
        self._ram = ram
        self._due: int | None = None  # frames there are to be, as soon as nothing above is held

    @property
    def n_bytes(self) -> int:
        """Beside the frames that there are now."""
        return self._budget.most_bytes - self._frames.limit * self._budget.plan.granule_bytes

    @property
    def fewest(self) -> int:
        """Frames that there have to be."""
        return self._budget.plan.least_bytes // self._budget.plan.granule_bytes

    def is_worth(self, n_bytes: int) -> bool:
        """Whether frames can have a good deal more than they have, beside ``n_bytes``."""
        least = max(self._budget.most_bytes // WORTH, self._budget.plan.least_bytes)
        return self.n_bytes - n_bytes > least

    def fits(self, n_bytes: int) -> bool:
        """Whether there may be ``n_bytes``; frames are given up for them."""
        if self.excess is not None:
            return n_bytes <= self.excess.most_bytes
        if n_bytes <= self.n_bytes:
            return True
        most, granule = self._budget.most_bytes, self._budget.plan.granule_bytes
        limit = max(self.fewest, (most - n_bytes) // granule)
        with host_work():  # who leaves may be coded, on HOST
            if self.lower(limit) and n_bytes <= self.n_bytes:
                return True
            # the unit that computes stands above: it keeps its frames until it is done
            if n_bytes > most - self._held_bytes():
                return False
        self._due = limit
        return True

    def go_on(self, n_bytes: int, where: str = "") -> bool:
        """Measure what does not fit to its end: what would be enough is known only there.

        Returns False where RAM does not hold more.
        """
        if self.excess is not None:
            return False
        with host_work():
            self.excess = Excess(where, self._held_bytes(), n_bytes + self._ram() // 2)
        return True

    def forget(self) -> None:
        """What passed, and what should have given way to it, is over: HBM is divided anew."""
        self.excess = self._due = None

    def settle(self) -> None:
        """A unit begins: give up the frames that were in use when they should have been."""
        if self._due is not None and self.lower(self._due):
            self._due = None

    def lower(self, limit: int) -> bool:
        """Have no more than ``limit`` frames; False where one above is held."""
        return limit >= self._frames.limit or self._frames.lower(limit)

    def _held_bytes(self) -> int:
        """Give up the frames that are not held; returns the bytes of the others, the fewest at
        least."""
        return max(self._frames.vacate(), self._budget.plan.least_bytes)


class Memory(NamedTuple):
    """Bytes that a run may use; ``hbm`` is None on a CPU that nothing limits."""

    hbm: int | None
    host: int


def decide(
    model: nn.Module,
    config: Config,
    device: Device,
    plan: Blueprint,
    extent_numel: int | None = None,
) -> Budget:
    """Divide the memory before anything is allocated.

    Raises ConfigError for a budget larger than the machine; BudgetError, naming the smallest one
    that works, for one that is too small.
    """
    tensors = (*model.buffers(), *(param for _, param in tables(model)))
    buffers = sum(map(bytes_of, tensors)) + plan.workspace_bytes(is_cuda=device.is_cuda)
    memory = available(model, config, device, plan, buffers)
    stays = stays_resident(plan, memory.hbm, is_cuda=device.is_cuda)
    budget = Budget(plan, memory.hbm, buffers, stays=stays)
    way = bool(config.nvme) and config.activations == "offload"
    if not stays:
        check_hbm(budget)
        if config.nvme:
            budget.spill = draw_spill(plan, memory.host, config.nvme_bytes, extent_numel, pool=way)
    elif way:
        budget.spill = draw_way(plan, memory.host, extent_numel)
    if not (stays and device.is_cuda):  # homes lie in RAM, or pass through it
        if budget.spill is None or stays:
            check_host(plan, memory.host, nvme=bool(config.nvme))
        whole = plan.home_bytes + passing_bytes(plan)
        budget.host_bytes = whole if budget.spill is None else budget.spill.host_bytes
    return budget


def available(
    model: nn.Module, config: Config, device: Device, plan: Blueprint, buffer_bytes: int
) -> Memory:
    """Return the bytes of HBM and of RAM: as configured, else as measured."""
    hbm, host = hbm_bytes(config, device), host_bytes(model, config, device.host_limit())
    if hbm is None and (plan.is_coded or (config.nvme and plan.home_bytes > host)):
        # homes are in the RAM that computes, and cannot be what computes: set frames aside in it
        hbm = max(host // CPU_FRAMES, 2 * plan.least_bytes + buffer_bytes)
        return Memory(hbm, max(0, host - hbm))
    if hbm is not None and config.host is None and not device.is_cuda:
        host = max(0, host - hbm)
    return Memory(hbm, host)


def hbm_bytes(config: Config, device: Device) -> int | None:
    """Return the HBM that may be used, which may not be more than there is."""
    total, free = device.total_bytes(), device.free_bytes()
    if config.hbm is not None and total is not None and config.hbm > total:
        raise ConfigError(
            f"hbm={format_bytes(config.hbm)} is more than the device has ({format_bytes(total)})",
            advice=f"hbm= takes at most {total} bytes",
        )
    return int(CUDA_SHARE * free) if config.hbm is None and free is not None else config.hbm


def stays_resident(plan: Blueprint, hbm: int | None, *, is_cuda: bool) -> bool:
    """Whether the parameters stay where they compute."""
    return not plan.is_coded and (
        hbm is None or (is_cuda and hbm >= CUDA_RESIDENT * plan.home_bytes)
    )


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
