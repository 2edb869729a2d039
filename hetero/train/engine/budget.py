"""The budget of a prepared model; what does not fit is refused before it is tried (floor 2).

``hbm`` means everything on the device: buffers, activations, and frames in the rest.
Activations are not known before the first step, which therefore runs with the fewest frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from hetero.config import Config, HostLimit, describe_limit
from hetero.device import Device
from hetero.device.comm import ALONE_COMM, Comm
from hetero.errors import BudgetError, ConfigError, OutOfMemory
from hetero.plan.division import Division, Hbm
from hetero.plan.placement import BucketHomes
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.check import pages, tables
from hetero.train.engine.hbm_homes import first_homes, movable_homes, total_bytes
from hetero.train.engine.spill import Spill, draw_spill, draw_way, passing_bytes
from hetero.train.gradients.crossing import workspace_for
from hetero.train.gradients.device_sums import SumSpace
from hetero.types import Tier, format_bytes

CUDA_SHARE = 0.95  # of free HBM, when no budget is given
CPU_FRAMES = 4  # 1/4 of RAM is for frames, when no budget is given for them
NO_SUMS = SumSpace()
SETTING = "activations='auto', "
CUDA_RESIDENT = 1.5  # a model is kept on the device when its states fit this many times


@dataclass(slots=True)
class Budget:
    """Bytes of HBM (None: no limit), and how they are divided."""

    plan: Blueprint
    hbm: int | None
    buffer_bytes: int
    spill: Spill | None = None
    """Homes on disk, and the pool they pass through."""
    host_bytes: int = 0
    """RAM for homes and for transfers to them, while gradients do not add up."""
    sums_bytes: int = 0
    """RAM that gradients take besides once they do; 0 if `host_bytes` counts it."""
    on_hbm: tuple[BucketHomes, ...] = ()
    """Homes of a paged model that lie on HBM, and stay there: HOST does not hold them."""
    stays: bool = False
    """Whether parameters stay where they compute, from the beginning."""
    ram_bytes: int | None = None
    """RAM for homes, as measured; None if it was given, or homes lie elsewhere too."""
    slack_bytes: int = 0
    """Of the device, that a given budget leaves to others."""
    sums: SumSpace = NO_SUMS
    """For sums over ranks at homes on the device; a part of the buffers."""
    division: Division | None = None
    """How HBM is divided since the last step; None before activations were measured."""
    divisible: Hbm = field(init=False)
    """The sizes by which HBM is divided."""

    def __post_init__(self) -> None:
        plan = self.plan
        useful = sum(bucket.granules for bucket in plan.layout.buckets)
        self.divisible = Hbm(
            *(self.hbm or 0, self.buffer_bytes, plan.least_bytes, plan.granule_bytes),
            useful_frames=useful + plan.least_bytes // plan.granule_bytes,
            units=plan.frames_of_units(),
        )

    def fix(self, on_hbm: tuple[BucketHomes, ...]) -> None:
        """Give homes that HOST does not hold a place on HBM; the rest of it is divided."""
        self.on_hbm = on_hbm
        rest = self.divisible.total_bytes - total_bytes(on_hbm)
        there = {homes.bucket for homes in on_hbm}
        units = tuple({b: n for b, n in u.items() if b not in there} for u in self.divisible.units)
        self.divisible = replace(self.divisible, total_bytes=rest, units=units)

    def without_sums(self) -> None:
        """Give up the room for sums over ranks: others read homes where they lie, in RAM."""
        self.buffer_bytes -= self.sums.n_bytes
        self.sums = NO_SUMS
        self.divisible = replace(self.divisible, buffer_bytes=self.buffer_bytes)

    def lower_to(self, hbm: int) -> None:
        """Use no more HBM than a rank that has less: frames decide in which order all gather."""
        self.hbm = hbm
        self.divisible = replace(self.divisible, total_bytes=hbm)

    @property
    def activation_bytes(self) -> int:
        """Of HBM, for activations and gradients on their way down; 0 before they were measured."""
        return 0 if self.division is None else self.division.moving_bytes

    def refusal(
        self,
        activation_bytes: int,
        *,
        where: str = "",
        known: str = "",
        held_bytes: int = 0,
        is_whole: bool = True,
        is_auto: bool = False,
    ) -> OutOfMemory:
        """Return the error for activations that take too much.

        Args:
            where: which unit passed the budget.
            known: which unit saves most.
            held_bytes: of frames that cannot be given up.
            is_whole: whether a whole step was measured, or its beginning.
            is_auto: whether units were free to give way already.
        """
        plan, hbm = self.plan, self.hbm or 0
        frames = max(plan.least_bytes, held_bytes)
        total = activation_bytes + self.buffer_bytes + frames + total_bytes(self.on_hbm)
        return OutOfMemory(
            f"activations take {format_bytes(activation_bytes)}{where} and buffers"
            f" {format_bytes(self.buffer_bytes)} of hbm={format_bytes(hbm)}; unit"
            f" {plan.widest_name!r} needs {format_bytes(frames)} of frames beside them"
            f"{'; ' * bool(known)}{known}",
            advice=f"raise hbm= to {'' if is_whole else 'at least '}{total} bytes, lower the batch,"
            f" or use {'' if is_auto else SETTING}micro_batch= or fused_loss=",
            tier="HBM",
            needed_bytes=total,
        )

    @property
    def disk_bytes(self) -> int:
        """Disk that homes take."""
        return 0 if self.spill is None else self.spill.disk_bytes

    @property
    def spills(self) -> bool:
        """Whether any home lies on disk."""
        return self.spill is not None and bool(self.spill.on_disk)

    def sums_check(self) -> Callable[[], None]:
        """Return a check that raises BudgetError if RAM does not hold gradients summed in fp32.

        Where `host=` is given, its ledger refuses them. It refers to no module: see [Note: out of
        gc's sight].
        """
        need = self.plan.home_bytes - total_bytes(self.on_hbm) + self.sums_bytes
        return partial(check_sums, need, self.ram_bytes)

    def holds_everything(self, activation_bytes: int) -> bool:
        """Whether parameters, gradients and states fit on the device with the activations."""
        whole = self.plan.home_bytes + activation_bytes + self.buffer_bytes
        return whole <= (self.hbm or 0)


STAYS, PAGES = b"stays", b"pages"
"""What the ranks of a tensor tell each other of their parameters."""


class Memory(NamedTuple):
    """Bytes that a run may use; ``hbm`` is None on a CPU that nothing limits."""

    hbm: int | None
    host: int
    ram: int | None = None
    """Of which hbm= takes its part, and leaves ``host``; None: it leaves host= alone."""


def decide(
    model: nn.Module,
    config: Config,
    device: Device,
    plan: Blueprint,
    extent_numel: int | None = None,
    *,
    comm: Comm = ALONE_COMM,
    may_rise: bool = False,
) -> Budget:
    """Divide the memory before anything is allocated: all ranks divide theirs alike.

    ``may_rise``: whether homes may be on HBM.
    Raises ConfigError for a budget larger than the machine; BudgetError, naming the smallest one
    that works, for one that is too small.
    """
    tensors = (*model.buffers(), *(param for _, param in tables(model)))
    sums = NO_SUMS
    if plan.is_shared and may_rise:
        rising = {homes.bucket for homes in movable_homes(plan, is_cuda=device.is_cuda)}
        risen = (bucket for bucket in plan.layout.buckets if bucket.id in rising)
        sums = workspace_for(risen, config.sum_group)
    buffers = sum(map(bytes_of, tensors)) + plan.workspace_bytes(is_cuda=device.is_cuda)
    buffers += sums.n_bytes
    memory, stays = agreed_memory(model, config, device, plan, buffers, comm)
    slack = max(0, (free_hbm(model, device) or 0) - (memory.hbm or 0))
    budget = Budget(plan, memory.hbm, buffers, stays=stays, slack_bytes=slack, sums=sums)
    with weighing_hbm(memory, plan.least_bytes + buffers):
        place_homes(budget, memory, config, device, extent_numel)
    return budget


def place_homes(
    budget: Budget, memory: Memory, config: Config, device: Device, extent_numel: int | None
) -> None:
    """Decide which homes are on HBM, in RAM and on disk; BudgetError if they find no room."""
    plan, stays = budget.plan, budget.stays
    way = bool(config.nvme) and config.activations == "offload"
    if not stays:
        check_hbm(budget)
        if device.is_cuda and not device.same_ram and not plan.is_shared:
            budget.fix(needed_on_hbm(plan, budget.divisible, memory, config, extent_numel))
        if config.nvme:
            up = frozenset(homes.bucket for homes in budget.on_hbm)
            budget.spill = draw_spill(
                *(plan, memory.host, config.nvme_bytes, extent_numel), pool=way, on_hbm=up
            )
    elif way:
        budget.spill = draw_way(plan, memory.host, extent_numel)
    if not (stays and device.is_cuda):  # homes lie in RAM, or pass through it
        if budget.spill is None or stays:
            check_host(plan, memory.host, nvme=bool(config.nvme), on_hbm=budget.on_hbm)
            budget.ram_bytes = memory.host if config.host is None else None
        whole = plan.home_bytes + passing_bytes(plan) - total_bytes(budget.on_hbm)
        budget.host_bytes = whole if budget.spill is None else budget.spill.host_bytes
        if budget.spill is None and not plan.is_shared:  # else homes have room for sums at once
            budget.sums_bytes = widened_bytes(plan, apart=budget.on_hbm)


def needed_on_hbm(
    plan: Blueprint, hbm: Hbm, memory: Memory, config: Config, extent_numel: int | None
) -> tuple[BucketHomes, ...]:
    """Return the homes that are on HBM for good, since HOST and a disk do not hold them all."""
    movable = movable_homes(plan, is_cuda=True)
    if not config.nvme:
        return first_homes(movable, hbm, plan.home_bytes + passing_bytes(plan) - memory.host)
    found: tuple[BucketHomes, ...] = ()
    while True:
        up = frozenset(homes.bucket for homes in found)
        try:
            draw_spill(plan, memory.host, config.nvme_bytes, extent_numel, on_hbm=up)
        except BudgetError as error:
            short = error.needed_bytes - (config.nvme_bytes or 0)
            more = first_homes(movable, hbm, total_bytes(found) + short)
            if error.tier != Tier.NVME.name or len(more) == len(found):
                return found  # the same error tells the user
            found = more
        else:
            return found


def agreed_memory(
    model: nn.Module,
    config: Config,
    device: Device,
    plan: Blueprint,
    buffer_bytes: int,
    comm: Comm,
) -> tuple[Memory, bool]:
    """Return the bytes of HBM and of RAM, and whether the parameters stay where they compute.

    Those of one rank of a tensor stay if all ranks' do: a page's gradient is brought to its place
    when it arrives, another one's when the optimizer steps, and ranks do that together.
    """
    memory = available(model, config, device, plan, buffer_bytes, comm.n_local)
    stays = stays_resident(plan, memory.hbm, is_cuda=device.is_cuda)
    if not plan.is_shared:
        told = comm.everyone.agree(STAYS if stays else PAGES, "whether parameters stay")
        if stays and PAGES in told:
            memory = available(
                *(model, config, device, plan, buffer_bytes, comm.n_local), pages=True
            )
            stays = False
    rows = comm.agree(str(memory.host).encode(), "bytes of RAM")
    return memory._replace(host=min(map(int, rows))), stays


def available(
    model: nn.Module,
    config: Config,
    device: Device,
    plan: Blueprint,
    buffer_bytes: int,
    n_local: int = 1,
    *,
    pages: bool = False,
) -> Memory:
    """Return the bytes of HBM and of RAM: as configured, else as measured.

    ``pages``: whether parameters are paged however much there is.
    """
    hbm = hbm_bytes(model, config, device)
    host = host_bytes(model, config, device.host_limit(), n_local)
    pages = pages or plan.is_coded or plan.is_shared
    if hbm is None and (pages or (config.nvme and plan.home_bytes > host)):
        # the CPU cannot compute on these homes as they lie: set frames aside in its RAM
        hbm = max(host // CPU_FRAMES, 2 * plan.least_bytes + buffer_bytes)
        return Memory(hbm, max(0, host - hbm))
    if hbm is None or not device.shares_ram:
        return Memory(hbm, host)
    # one RAM: each of its bytes is counted once
    ram = ram_bytes(model, device.host_limit(), n_local)
    if config.hbm is None and (
        config.host is not None or pages or not stays_resident(plan, hbm, is_cuda=device.is_cuda)
    ):
        homes = plan.home_bytes + passing_bytes(plan) if config.host is None else host
        left, least = ram - homes, 2 * plan.least_bytes + buffer_bytes
        hbm = min(hbm, max(left if left >= least else ram // CPU_FRAMES, least))
    if config.host is not None:
        return Memory(hbm, host)
    return Memory(hbm, max(0, ram - hbm), None if config.hbm is None else ram)


@contextmanager
def weighing_hbm(memory: Memory, least_bytes: int) -> Iterator[None]:
    """Where hbm= left too little RAM, advise to lower it, if more than the ``least_bytes`` stay."""
    try:
        yield
    except BudgetError as error:
        most = (memory.ram or 0) - error.needed_bytes
        if error.tier == Tier.HOST.name and most >= least_bytes:
            error.advice = (
                "lower hbm=, which is RAM here and leaves the rest of it to HOST, to at most"
                f" {most} bytes"
            )
        raise


def ram_bytes(model: nn.Module, limit: HostLimit, n_local: int) -> int:
    """Return as much RAM as this process may take where ``n_local`` ranks divide it."""
    held = sum(p.nbytes for _, p in pages(model) if p.device.type == "cpu")  # moved, not copied
    return limit.n_bytes // n_local + held


def hbm_bytes(model: nn.Module, config: Config, device: Device) -> int | None:
    """Return the HBM that may be used; ConfigError for more than the device has."""
    total = device.memory.total_bytes()
    if config.hbm is not None and total is not None and config.hbm > total:
        raise ConfigError(
            f"hbm={format_bytes(config.hbm)} is more than the device has ({format_bytes(total)})",
            advice=f"hbm= takes at most {total} bytes",
        )
    free = device.memory.free_bytes()
    ours = None if free is None else free + device.memory.reserved_bytes()
    if config.hbm is not None and ours is not None and config.hbm > ours:
        raise ConfigError(
            f"hbm={format_bytes(config.hbm)} is more than this process may take:"
            f" {format_bytes(ours)}; other processes, and the driver, use the rest of the device",
            advice=f"end other processes on the device, or set hbm= to at most {ours} bytes",
        )
    return free_hbm(model, device) if config.hbm is None else config.hbm


def free_hbm(model: nn.Module, device: Device) -> int | None:
    """Return the HBM that a model may use if no other process takes any; None if HBM is RAM."""
    free = device.memory.free_bytes()
    if free is None:
        return None
    place = device.torch_device
    here = sum(p.nbytes for _, p in pages(model) if p.device == place and not p.is_meta)
    return int(CUDA_SHARE * (free + here))


def stays_resident(plan: Blueprint, hbm: int | None, *, is_cuda: bool) -> bool:
    """Whether the parameters stay where they compute."""
    return not (plan.is_coded or plan.is_shared) and (
        hbm is None or (is_cuda and hbm >= CUDA_RESIDENT * plan.home_bytes)
    )


def paging_bytes(plan: Blueprint) -> int:
    """Return the largest budget of HBM under which a model on CUDA is paged."""
    return int(CUDA_RESIDENT * plan.home_bytes) - 1


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


def host_bytes(model: nn.Module, config: Config, limit: HostLimit, n_local: int) -> int:
    """Return the RAM for homes: the budget, or `ram_bytes`."""
    most = ram_bytes(model, limit, n_local)
    for name, asked in (("host", config.host), ("pinned", config.pinned)):
        if asked is not None and asked > most:
            raise ConfigError(
                f"{name}={format_bytes(asked)} is more than this process may take:"
                f" {describe_limit(limit)}",
                advice=f"{name}= takes at most {most} bytes here",
            )
    return most if config.host is None else config.host


def check_hbm(budget: Budget) -> None:
    """Refuse a budget too small for the widest unit alone, naming the smallest that works."""
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


def widened_bytes(plan: Blueprint, *, apart: Sequence[BucketHomes]) -> int:
    """Return the bytes by which gradients grow that become fp32, those of some homes left out."""
    there = {homes.bucket for homes in apart}
    return sum(
        bucket.share_numel * (torch.float32.itemsize - bucket.dtype.itemsize)
        for bucket in plan.layout.buckets
        if bucket.trainable and bucket.has_master and bucket.id not in there
    )


def check_sums(need: int, have: int | None) -> None:
    """Refuse sums of gradients that RAM cannot hold."""
    if have is not None and need > have:
        raise BudgetError(
            f"gradients of several backward passes are summed in fp32: HOST must then hold"
            f" {format_bytes(need)} of parameters, gradients and states; {format_bytes(have)} are"
            " there",
            advice="make each step of one backward pass, train fewer parameters, or name a"
            " directory on a drive with nvme=",
            tier="HOST",
            needed_bytes=need,
        )


def check_host(
    plan: Blueprint, have: int, *, nvme: bool, on_hbm: Sequence[BucketHomes] = ()
) -> None:
    """Refuse states that RAM cannot hold, apart from those on HBM."""
    need = plan.home_bytes + plan.stages_bytes - total_bytes(on_hbm)
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
