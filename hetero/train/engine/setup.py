"""The set-up of `prepare` before parameters move: settings, budget, tiers, threads (floor 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from hetero.config import Config
from hetero.device import Device, return_large_blocks, trim_heap
from hetero.device.comm import Comm, Company
from hetero.errors import ConfigError, DivergenceError
from hetero.events import EventLog
from hetero.io import Folder, spill_folder
from hetero.jobs import Worker, thread_budget
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, Segment
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.parcel import ParcelStore
from hetero.memory.places import HomePlaces
from hetero.train.access.hooks import Hooks
from hetero.train.activations.offload import MIN_BYTES, Offload
from hetero.train.engine.alike import check_device
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.budget import Budget, decide
from hetero.train.engine.check import pages
from hetero.train.engine.handover import Handover
from hetero.train.engine.snapshot import Saver
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients.clip import OWN_NORMS, Norms
from hetero.train.model.parts import Parts, PlainTensors
from hetero.train.update.masters import Masters
from hetero.train.update.passage import N_SLOTS
from hetero.types import Kind, Lane, Tier, noop

WARM_STEPS = 3  # steps in which states appear and the heap has to settle


@dataclass(slots=True)
class StepStats:
    """Traffic and misses of the last whole step; without an optimizer, of the last forward."""

    n_bytes: Counter[Lane] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Setup:
    """The parts of a prepared model that every residence uses."""

    model: nn.Module
    inner: torch.optim.Optimizer | None
    config: Config
    device: Device
    blueprint: Blueprint
    tuning: Tuning
    params: list[nn.Parameter]
    log: EventLog
    comm: Comm
    budget: Budget
    ledger: Ledger
    store: HomeStore
    offload: Offload
    masters: Masters
    worker: Worker
    handover: Handover
    unclaimed: Unclaimed
    parts: Parts = field(default_factory=PlainTensors)
    hooks: Hooks = field(default_factory=Hooks)
    saver: Saver = field(default_factory=Saver)
    ends: ExitStack = field(default_factory=ExitStack)
    """What ends with the release."""
    company: Company | None = None
    """All ranks of a pipeline, of whose stages this one has its own; None without one."""
    norms: Norms = OWN_NORMS
    """Of the gradients of all stages."""
    before_step: Callable[[Mapping[str, str]], None] = noop
    """Takes what ranks have to have done alike before a step, by name; collective, where they
    divide tensors."""
    steps: int = 0
    stats: StepStats = field(default_factory=StepStats)
    index: dict[int, int] = field(init=False)
    """Position of every parameter, by its id."""

    def __post_init__(self) -> None:
        self.index = {id(param): i for i, param in enumerate(self.params)}

    def joins(self, company: Company | None, norms: Norms, *leave: Callable[[], object]) -> None:
        """Note the ranks of a pipeline, the norms of their gradients, and how to leave others."""
        self.company, self.norms = company, norms
        for each in leave:
            self.ends.callback(each)

    @property
    def everyone(self) -> Company:
        """All ranks that have a part of the model."""
        return self.comm.everyone if self.company is None else self.company

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.blueprint.layout.buckets

    @property
    def has_masters(self) -> bool:
        """Whether working weights of this model have fp32 masters."""
        return any(bucket.has_master for bucket in self.buckets)

    def bucket(self, param: torch.Tensor) -> Bucket:
        """Return the bucket that a parameter is in."""
        return self.buckets[self.blueprint.layout.home[self.index[id(param)]][0]]

    def segment(self, param: torch.Tensor) -> Segment:
        """Return the place of a parameter in its bucket."""
        return self.blueprint.layout.home[self.index[id(param)]][1]

    def name_of(self, param: torch.Tensor) -> str:
        """Return the name of a parameter."""
        return self.segment(param).spec.name

    def named_params(self) -> list[tuple[str, nn.Parameter]]:
        return [(self.segment(param).spec.name, param) for param in self.params]

    def ram(self) -> int:
        """Return the bytes of RAM that may still be taken."""
        return free_ram(self.device, self.comm, self.budget.hbm)

    def count(self) -> None:
        """A step is made; what it moved, the residence notes if it moves anything."""
        self.steps += 1
        self.stats = StepStats()
        if self.steps <= WARM_STEPS and not self.device.is_cuda:
            trim_heap()

    def move_in(self) -> None:
        """Copy every parameter to its home; undone by `Handover.move_out` and `close`."""
        stages_bytes = self.blueprint.stages_bytes
        if stages_bytes:  # before homes: nothing tells how much more may be page-locked
            self.ledger.charge(Tier.HOST, Kind.POOL, stages_bytes, "stages of copies")
            self.device.open_stages(stages_bytes, self.config.pinned)
        self.ledger.charge(Tier.HBM, Kind.BUFFER, self.budget.buffer_bytes, "buffers")
        place = self.device.torch_device
        try:
            self.handover.move_in(self.store, self.masters, place, self.config.weights)
        except BaseException as error:
            with suppress(DivergenceError):  # this rank's own error matters more
                self.store.open_shares(failed=error)
            raise
        self.store.open_shares()

    def rewrite(self) -> None:
        """Rewrite modules as settings ask: a fused loss, tiles."""
        if self.config.fused_loss:
            self.hooks.fuse_loss(self.model)
        if self.config.tile and not self.hooks.tile(self.blueprint.units, self.config.tile):
            raise ConfigError(
                f"tile={self.config.tile}: no unit of this {type(self.model).__name__} has an MLP"
                " that is recognised by the name of its class",
                advice="call hetero.tile(module, size=...) on position-wise modules before prepare",
            )

    def close(self) -> None:
        """Give back files, threads, and the memory of offloaded activations."""
        self.offload.close()
        self.store.close()
        self.device.close_stages()


def set_up(
    model: nn.Module,
    inner: torch.optim.Optimizer | None,
    config: Config,
    device: Device,
    blueprint: Blueprint,
    tuning: Tuning,
    comm: Comm,
    parts: Parts,
) -> Setup:
    """Divide the memory and open the tiers; nothing of the model is touched."""
    for folder in open_folders(config, device, tuning):  # validate nvme= even if nothing spills
        folder.close()
    budget = decide(
        *(model, config, device, blueprint, tuning.extent_numel),
        comm=comm,
        may_rise=tuning.may_rise(device) and inner is not None,
    )
    comm = nearest(comm, budget, blueprint)
    if comm.node is not None:
        budget.without_sums()
    if comm.size > 1 and comm.node is None:
        told = comm.agree(str(budget.hbm).encode(), "bytes of HBM")
        budget.lower_to(min(map(int, told)))
    check_device(device, comm)
    comm.open_gathers(device)
    budgets = {Tier.HBM: budget.hbm, Tier.HOST: config.host, Tier.NVME: config.nvme_bytes}
    log = EventLog(device.clock, tuning.n_events)
    ledger = Ledger(budgets, log)
    store = open_store(budget, config, device, tuning, ledger, log, comm)
    store.places.on_hbm.update(homes.bucket for homes in budget.on_hbm)
    unclaimed = Unclaimed(budget, ledger, store.tier)
    ledger.to_come = unclaimed.bytes_on
    params = [param for _, param in pages(model)]
    masters = Masters(config.precision, blueprint.layout, store)
    # masters on a CUDA device are updated in order of its stream, and not by threads
    has_masters = any(bucket.has_master for bucket in blueprint.layout.buckets)
    streams = budget.stays and device.is_cuda and has_masters
    worker = tuning.worker or Worker(
        0 if streams else thread_budget(comm.n_local), n_carriers=N_SLOTS if device.is_cuda else 0
    )
    worker.clock, worker.keeps_denormals = device.clock, device.is_cuda
    return Setup(
        *(model, inner, config, device, blueprint, tuning, params, log),
        *(comm, budget, ledger, store),
        offload=make_offload(budget, config, device, ledger, store, log, comm, unclaimed),
        masters=masters,
        worker=worker,
        handover=Handover(model, params, blueprint.layout, parts),
        unclaimed=unclaimed,
        parts=parts,
    )


def nearest(comm: Comm, budget: Budget, blueprint: Blueprint) -> Comm:
    """Return what joins the ranks from here on: memory that they share, unless weights of any rank
    lie on disk, where no other rank reads them."""
    kinds = {kind for kind, _ in budget.spill.on_disk} if budget.spill is not None else set()
    row = b"disk" if Kind.PARAM in kinds else b""
    if any(comm.agree(row, "where weights lie")):
        return comm
    return comm.nearer(blueprint.layout)


def open_folders(config: Config, device: Device, tuning: Tuning) -> list[Folder]:
    """Return the directories of the disk tier; none for a device without bytes."""
    paths = config.nvme if device.has_bytes else ()
    return [spill_folder(path, tuning.io) for path in paths]


def open_store(
    budget: Budget,
    config: Config,
    device: Device,
    tuning: Tuning,
    ledger: Ledger,
    log: EventLog,
    comm: Comm,
) -> HomeStore:
    """Return the store of homes, with files for those that HOST does not hold."""
    spill = budget.spill
    if spill is None:
        return HomeStore(device, ledger, places=HomePlaces(stays=budget.stays), comm=comm)
    return_large_blocks()
    ledger.charge(Tier.HOST, Kind.POOL, spill.pool_bytes, "memory for homes on disk")
    pool = tuning.open_pool(
        open_folders(config, device, tuning),
        spill.disk_bytes,
        pool_bytes=spill.pool_bytes,
        extent_numel=spill.extent_numel,
        ledger=ledger,
        log=log,
        n_threads=tuning.io_threads,
        checked=tuning.checked,
    )
    places = HomePlaces(stays=budget.stays, on_disk=spill.on_disk)
    return HomeStore(device, ledger, places=places, pool=pool, comm=comm)


def make_offload(
    budget: Budget,
    config: Config,
    device: Device,
    ledger: Ledger,
    store: HomeStore,
    log: EventLog,
    comm: Comm,
    unclaimed: Unclaimed,
) -> Offload:
    """Return the offload of activations, in chunks like those of parameters or larger ones."""
    required = config.activations == "offload"
    chunk_bytes = 4 * budget.plan.layout.chunk_numel
    least = MIN_BYTES if budget.stays and not required else min(MIN_BYTES, chunk_bytes)
    parcels = ParcelStore(
        device,
        Link(device, log),  # counted by itself: `StepStats` is of parameters
        ledger,
        least_bytes=chunk_bytes,
        pool=store.pool,
        ram=partial(free_ram, device, comm, budget.hbm),
        reserved=unclaimed.bytes_on,
        counts_on=required,
    )
    return Offload(parcels, device, required=required, min_bytes=least)


def free_ram(device: Device, comm: Comm, budget_bytes: int | None) -> int:
    """Return the bytes of RAM that this rank may still take while all of its machine do so.

    Where a CUDA device's memory is RAM, what its budget of ``budget_bytes`` has, and torch's
    allocator has not taken yet, is the device's. A number, and no `Budget`, which has modules:
    [Note: out of gc's sight].
    """
    free, hbm = device.host_limit().n_bytes // comm.n_local, 0
    if device.is_cuda and device.shares_ram:
        hbm = max(0, (budget_bytes or 0) - device.memory.reserved_bytes())
    return max(0, free - hbm)


class Unclaimed:
    """The bytes of HOST or NVME that homes will take there and have not yet.

    Homes that moved up to HBM are among them: they come down before activations grow, and would not
    fit if activations of the step before had their place. It refers to no module: [Note: out of
    gc's sight].

    Args:
        host: the tier of homes that have no other place.
    """

    def __init__(self, budget: Budget, ledger: Ledger, host: Tier) -> None:
        self.awaits_sums: Callable[[], bool] = never
        """Whether gradients will add up in fp32, which takes `Budget.sums_bytes` more."""
        self._ledger = ledger
        self._host = host
        self._whole = {Tier.HOST: budget.host_bytes, Tier.NVME: budget.disk_bytes}
        self._sums_bytes = budget.sums_bytes

    def bytes_on(self, below: Tier) -> int:
        """Return those of a tier."""
        whole, tier = self._whole.get(below, 0), below
        if below is Tier.HOST:
            tier = self._host
            whole += self._sums_bytes if self._sums_bytes and self.awaits_sums() else 0
        taken = self._ledger.used(tier) - self._ledger.used(tier, Kind.ACTIVATION)
        return max(0, whole - taken)


def never() -> bool:
    return False
