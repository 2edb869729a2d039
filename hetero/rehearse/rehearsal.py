"""A rehearsal: the library trains a model without bytes, and tells how that went (floor 4).

Engine, manager, planner and ledger are those of a real run. Below them is a device made of numbers
(`hetero.dry`), and above them a model on the meta device, whose operations advance a virtual clock
by the times of a hardware profile.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.config import Config
from hetero.dry import DryDevice
from hetero.errors import BudgetError
from hetero.events import What
from hetero.internals import backward_of_inputs, backward_of_weights, run_backward
from hetero.parallel.mesh import TENSOR
from hetero.plan.hardware import sha256
from hetero.plan.machine import MachineProfile
from hetero.plan.network import sum_seconds
from hetero.plan.pipeline import WHOLE_BATCH, Pass
from hetero.plan.placement import BucketHomes
from hetero.plan.weighing import UnitStep
from hetero.rehearse.clock import Costs, OpClock
from hetero.rehearse.disk import DryDisk, open_dry_pool
from hetero.rehearse.failures import explaining
from hetero.rehearse.kernels import AsOn
from hetero.rehearse.made import Made
from hetero.rehearse.mirror import mirrored, ranks_of
from hetero.rehearse.repeats import Repeats
from hetero.rehearse.stand_in import (
    device_for,
    disk_seconds,
    touched_by_update,
    update_seconds,
)
from hetero.rehearse.staying import DryBytes, Staying
from hetero.rehearse.twin import twin_of
from hetero.rehearse.worker import DryWorker
from hetero.report.profile import ceilings, meta_of, rated_write_bytes
from hetero.report.run import Meta, Run
from hetero.train.activations.meter import LiveBytes
from hetero.train.engine.assemble import assemble
from hetero.train.engine.blueprint import Blueprint, draw
from hetero.train.engine.engine import Engine
from hetero.train.engine.paged import Paged
from hetero.train.engine.tuning import Tuning
from hetero.train.update.masters import working_dtypes
from hetero.train.update.passage import N_SLOTS
from hetero.types import Kind, Tier

MOST_STEPS = 8  # until every step is as the one before it
TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)
LEAST_STEPS = 3  # of a run whose steps are alike: the first has no plan, the second begins with it

Loss = Callable[[Any], torch.Tensor]


@contextmanager
def set_apart() -> Iterator[None]:
    """Look for garbage among what is made inside the block alone.

    Where a budget is passed, graphs in cycles are let go of first: to walk all of torch's objects
    for them takes longer than to rehearse a small model. What others froze stays so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A training step of a model without bytes, on a machine; each rehearsal is of a twin."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss: Loss
    config: Config
    profile: MachineProfile
    depth: int | None = None
    """Accesses to look ahead; None: as many as frames allow."""
    activation_share: float | None = None
    """Of the HBM that activations and homes share; None: the best one."""
    homes_on_hbm: bool | None = None
    """Whether homes may be on HBM; None: on CUDA they may."""
    order: Sequence[Pass] = WHOLE_BATCH
    """What a step does: forwards and backwards of micro-batches, each of a batch as given. Passes
    of several turns are those of the models in a list."""
    exchange_once: bool = False
    """Whether ranks exchange gradients after the last backward of a step only."""
    costs: Costs = field(default_factory=Costs)
    """Of operations, shared with scenes that are made of this one."""
    made: Made = field(default_factory=Made)
    """Results of updates, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedStep:
    """Measurements of one step; after two that are equal, the third is equal, too."""

    seconds: float
    mode: str
    frames: int
    activation_bytes: int
    lane_bytes: tuple[tuple[str, int], ...]
    counts: tuple[tuple[str, int], ...]
    operations: int
    """Of the model, views among them."""
    pass_seconds: tuple[float, ...] = field(compare=False, default=())
    """Of each forward and backward, waits for weights and gradients among them."""
    flops: float = 0.0
    """Of matrix products, what is computed again among them."""
    summed_bytes: int = 0
    """That ranks which divide tensors added up."""
    summed_seconds: float = field(compare=False, default=0.0)
    is_decided: bool
    """Whether the next one has nothing to try for a proof, and no choice to make."""

    def is_like(self, other: RehearsedStep) -> bool:
        """Whether they differ by rounding at most."""
        near = abs(self.seconds - other.seconds) <= 1e-9 + 1e-6 * self.seconds
        return near and replace(self, seconds=0.0) == replace(other, seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """How it went."""

    steps: tuple[RehearsedStep, ...]
    peaks: dict[Tier, int]
    """The most bytes that were ever charged to a tier."""
    kinds: dict[tuple[Tier, Kind], int]
    """The same by kind; their peaks may be at different times."""
    blueprint: Blueprint
    policies: dict[str, str]
    """By unit."""
    units: tuple[UnitStep, ...]
    """Of a step, in the order of forward; none of a model that stays."""
    homes: tuple[BucketHomes, ...]
    """That may be on HBM, the most useful first."""
    working_bytes: int
    """At the peak, apart from bytes that units leave."""
    end_bytes: int
    """After the last unit's forward, apart from bytes that units leave."""
    buffer_bytes: int
    run: Run
    locked_bytes: int = 0
    """Page-locked in all, since the beginning."""
    error: BudgetError | None = None
    """That ended it, if one did."""

    @property
    def step_seconds(self) -> float:
        """Of a step that is like the one before it."""
        return self.steps[-1].seconds if self.steps else 0.0


def rehearse(scene: Scene) -> Rehearsal:
    """Train until steps are alike, or until a budget is passed.

    Raises BudgetError if that is known before the first step, and ConfigError for a model that
    computes by its numbers or that its batch does not suit.
    """
    device = device_for(scene.config, scene.profile)
    comm = mirrored(scene.config, device, scene.profile)
    scene = replace(scene, **twin_of(scene.model, scene.optimizer)._asdict())
    config = replace(scene.config, device=device, profile=None)
    disk = DryDisk(device, partial(disk_seconds, scene.profile)) if config.nvme else None
    shares = comm.n_shares, comm.n_copies
    blueprint = draw(scene.model, scene.optimizer, config, device, *shares)
    ranks = ranks_of(scene.config.mesh, scene.profile)
    here = ranks.n_here / ranks.n_shares  # its part of a bucket is updated on each machine
    touched = touched_by_update(blueprint)
    worker = DryWorker(
        device,
        lambda n: update_seconds(scene.profile, blueprint, round(n * here)),
        disk,
        ram_seconds=lambda n: n * touched / scene.profile.host.dram_bytes_per_second.value,
        n_carriers=N_SLOTS if device.is_cuda else 0,
        made=scene.made,
    )
    counted = DryBytes(device.memory.total_bytes())
    repeats = Repeats(device)
    tuning = Tuning(
        worker=worker,
        slices=repeats,
        counted=counted if device.is_cuda else None,
        depth=scene.depth,
        activation_share=scene.activation_share,
        homes_on_hbm=scene.homes_on_hbm,
        n_events=None,  # shares are of whole steps, and a step with a disk may have any number
    )
    if disk is not None:
        tuning.open_pool = partial(open_dry_pool, disk)
    engine = assemble(scene.model, scene.optimizer, config, device, blueprint, tuning, comm)
    device.ram_used = lambda: comm.n_local * engine.setup.ledger.used(Tier.HOST)
    repeats.log, repeats.offload = engine.setup.log, engine.setup.offload
    counted.charged = partial(engine.setup.ledger.used, Tier.HBM)
    # the engine's ledger has no activations of a model that stays
    staying = None if paged_of(engine) is not None else Staying(engine, counted)
    steps: list[RehearsedStep] = []
    error = None
    with AsOn(is_cuda=device.is_cuda):
        try:
            while not is_settled(steps) and len(steps) < MOST_STEPS:
                counting = nullcontext() if staying is None else staying.live
                with counting, explaining(type(scene.model).__name__):
                    steps.append(one_step(scene, engine, device, staying))
        except BudgetError as found:
            error = found
        finally:
            engine.residence.close()  # a plan keeps the twin, and torch its own functions
    ended = outcome(engine, scene.profile, steps, error, staying)
    return replace(ended, locked_bytes=device.newly_locked_bytes if device.is_cuda else 0)


class PlainStep(NamedTuple):
    """A step of the model without hetero, all of it on one device."""

    peak_bytes: int
    phase: str
    """In which the peak is."""
    seconds: float
    flops: float
    """Of matrix products, those that the model's own checkpoints compute again included."""


def plain_step(scene: Scene, blueprint: Blueprint) -> PlainStep:
    """Run the plain model forward and backward; its update is one pass over the bytes it touches.

    With weights of two bytes the optimizer has whole fp32 masters too.
    """
    device = device_for(scene.config, scene.profile)
    dtypes = working_dtypes(scene.model, scene.config.precision, scene.config.keep_fp32)
    model = twin_of(scene.model, dtypes=dtypes).model
    numel = kept = 0
    for bucket in blueprint.layout.buckets:
        if bucket.trainable:
            n = sum(segment.spec.numel for segment in bucket.segments)
            numel += n
            kept += n * (blueprint.costs[bucket.id].state + 4 * blueprint.has_master(bucket))
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    live = LiveBytes()
    with (
        AsOn(is_cuda=device.is_cuda),
        explaining(type(model).__name__),
        live,
        OpClock(device, scene.profile, costs=scene.costs) as clock,
    ):
        loss = scene.loss(model(*scene.args, **scene.kwargs))
        forward = live.peak
        run_backward(loss)
    update = scene.profile.memory_seconds(numel * touched_by_update(blueprint))
    return PlainStep(
        peak_bytes=held + kept + live.peak,
        phase="backward" if live.peak > forward else "forward",
        seconds=device.clock() + update,
        flops=clock.flops,
    )


def one_step(
    scene: Scene, engine: Engine, device: DryDevice, staying: Staying | None = None
) -> RehearsedStep:
    """Train one step and return its measurements."""
    began = device.clock()
    paged = isinstance(engine.residence, Paged)
    n_here = 1 if device.is_cuda else engine.setup.comm.n_local
    counted = paged and device.copies_here
    n_parts = int((scene.config.mesh or {}).get(TENSOR, 1))
    sums = partial(sum_seconds, scene.profile, n_parts)
    clocked = partial(OpClock, device, scene.profile, costs=scene.costs)
    with clocked(counted=counted, n_sharing=n_here, sum_seconds=sums) as clock:
        spent = [*passes(scene, engine, device, None if paged else staying)]
    if engine.optimizer is not None:
        with (
            scene.made if paged else clocked(),
            nullcontext() if staying is None else staying.during("step"),
        ):
            engine.optimizer.step()
        engine.optimizer.zero_grad()
    stats, residence = engine.setup.stats, engine.residence
    if isinstance(residence, Paged) and not device.is_cuda:
        accesses = stats.counts["hit"] + stats.counts["miss"]
        device.compute(accesses * scene.profile.host.access_seconds)
    return RehearsedStep(
        seconds=device.clock() - began,
        mode=residence.name,
        frames=residence.frames.limit if isinstance(residence, Paged) else 0,
        activation_bytes=engine.setup.budget.activation_bytes,
        lane_bytes=tuple(sorted((lane.value, n) for lane, n in stats.n_bytes.items())),
        counts=tuple(sorted(stats.counts.items())) if isinstance(residence, Paged) else (),
        operations=clock.operations,
        pass_seconds=tuple(spent),
        flops=clock.flops,
        summed_bytes=clock.summed_bytes,
        summed_seconds=clock.summed_seconds,
        is_decided=residence.is_decided,
    )


def passes(
    scene: Scene, engine: Engine, device: DryDevice, staying: Staying | None
) -> Iterator[float]:
    """Run the forwards and backwards of a step; yields how long each took."""
    losses: dict[tuple[int, int], torch.Tensor] = {}
    halves: dict[tuple[int, int], Any] = {}
    logged = not isinstance(engine.residence, Paged)
    several = any(each.turn for each in scene.order)
    models = [*scene.model.children()] if several else [scene.model]
    inboxes: dict[int, list[torch.Tensor]] = {e.turn: [] for e in scene.order if e.half}
    for turn, inbox in inboxes.items():
        vars(models[turn])["inbox"] = inbox
    for at, (batch, is_forward, turn, half) in enumerate(scene.order):
        began, name = device.clock(), "forward" if is_forward else "backward"
        alone = scene.exchange_once and at < len(scene.order) - 1
        with (
            engine.no_sync() if alone else nullcontext(),
            phase(engine, name, staying) if logged else nullcontext(),
        ):
            if is_forward:
                losses[batch, turn] = scene.loss(models[turn](*scene.args, **scene.kwargs))
            elif half == "I":  # inputs come, and go, in the order of micro-batches
                output, given = losses.pop((batch, turn)), inboxes[turn].pop(0)
                halves[batch, turn] = backward_of_inputs(output, given, models[turn])
                del output, given
            elif half == "W":
                backward_of_weights(models[turn], halves.pop((batch, turn)))
            elif scene.optimizer is not None:
                run_backward(losses.pop((batch, turn)))
                if inboxes.get(turn):
                    inboxes[turn].pop(0)
        yield device.clock() - began


@contextmanager
def phase(engine: Engine, name: str, staying: Staying | None) -> Iterator[None]:
    """Log a phase of a model that stays, which the engine does not log."""
    engine.setup.log.phase = name
    counting = nullcontext() if staying is None else staying.during(name)
    with engine.setup.log.during(What.PHASE, why=name), counting:
        yield
    engine.setup.log.phase = "between"


def is_settled(steps: Sequence[RehearsedStep]) -> bool:
    """Whether the next step will be as the last one."""
    return len(steps) >= LEAST_STEPS and steps[-2].is_decided and steps[-1].is_like(steps[-2])


def paged_of(engine: Engine) -> Paged | None:
    """Return the residence of a model that is paged, or was until everything fitted."""
    residence = engine.residence
    before = residence if isinstance(residence, Paged) else residence.before
    return before if isinstance(before, Paged) else None


def outcome(
    engine: Engine,
    profile: MachineProfile,
    steps: Sequence[RehearsedStep],
    error: BudgetError | None,
    staying: Staying | None,
) -> Rehearsal:
    """Return how it went; the ledger does not know what ``staying`` counted on the device."""
    ledger = engine.setup.ledger
    names = engine.setup.blueprint.layout.unit_names
    policies = {
        names[unit]: str(policy) for unit, policy in engine.residence.activations.policies.items()
    }
    units: tuple[UnitStep, ...] = ()
    homes: tuple[BucketHomes, ...] = ()
    working = end = 0
    settled = max(0, len(steps) - 1)  # the last step is the one that is as all that follow
    meta = replace(meta_as_predicted(engine, profile), warmup=settled)
    run = Run.of(meta, engine.setup.log.drain())
    extra = 0 if staying is None else staying.live.peak
    paged = paged_of(engine)
    if paged is not None:
        forecast = paged.fitting.forecast
        seconds = forward_seconds(run, engine.setup.device.is_cuda)
        chosen, needs = engine.residence.activations.policies, engine.setup.blueprint.needs
        units = tuple(
            UnitStep(
                replace(forecast.use(unit), forward_seconds=seconds.get(unit, 0.0)),
                *(chosen[unit], needs[unit]),
            )
            for unit in forecast.rows
        )
        homes = (*engine.setup.budget.on_hbm, *paged.fitting.room.homes.homes)
        working = forecast.working_bytes(goes_down=False)
        end = forecast.behind_bytes(goes_down=False)
    return Rehearsal(
        steps=tuple(steps),
        peaks={t: ledger.peak(t) + extra * (t is Tier.HBM) for t in TIERS},
        kinds={
            **{(tier, kind): ledger.peak(tier, kind) for tier in TIERS for kind in Kind},
            **({} if staying is None else {(Tier.HBM, k): n for k, n in staying.most.items()}),
        },
        blueprint=engine.setup.blueprint,
        policies=policies,
        units=units,
        homes=homes,
        working_bytes=working,
        end_bytes=end,
        buffer_bytes=engine.setup.budget.buffer_bytes,
        run=run,
        error=error,
    )


def meta_as_predicted(engine: Engine, profile: MachineProfile) -> Meta:
    """Return the description of a run, without its events."""
    return replace(
        meta_of(engine),
        kind="predicted",
        profile=profile.name,
        profile_sha256=sha256(profile),
        ceilings=ceilings(profile),
        rated_write_bytes=rated_write_bytes(profile),
    )


def forward_seconds(run: Run, is_cuda: bool) -> dict[int, float]:
    """Return the compute time of units' forwards in the last step, without waits."""
    access, wait, move = What.ACCESS.value, What.WAIT.value, What.MOVE.value
    rows = [row for row in run.events if row.what == access and row.phase == "forward"]
    last = max((row.step for row in rows), default=0)
    unit_of = {row.seq: row.unit for row in rows if row.step == last}
    idle = (wait,) if is_cuda else (wait, move)  # a CPU launches the copies itself
    spent: Counter[int] = Counter()
    for row in run.events:
        if row.seq in unit_of:
            spent[row.unit] += row.dur_ns
        elif row.what in idle and row.cause in unit_of:
            spent[unit_of[row.cause]] -= row.dur_ns
    return {unit: max(0, n) / 1e9 for unit, n in spent.items()}
