"""Divides the HBM of a paged model: measure, divide, apply in every step (floor 2)."""

from __future__ import annotations

from functools import partial

from torch import nn

from hetero.device import Device
from hetero.memory.manager import ChunkManager
from hetero.plan.division import Division
from hetero.plan.hardware import find
from hetero.plan.weighing import Copies, Drive
from hetero.train.access.runtime import Runtime
from hetero.train.activations.forecast import Forecast, UnitKind
from hetero.train.activations.held import GraphFootprint
from hetero.train.activations.meter import Keeper, Meter, make_meter
from hetero.train.activations.policy import ActivationPolicies
from hetero.train.engine.evaluation import Evaluation
from hetero.train.engine.fitting import Fitting
from hetero.train.engine.frames import AgreedFrames, ArenaFrames
from hetero.train.engine.rehoming import Rehoming
from hetero.train.engine.room import Room
from hetero.train.engine.setup import Setup
from hetero.train.engine.tradeoff import Tradeoff
from hetero.train.engine.trained import Trained
from hetero.train.model.host_work import host_work
from hetero.types import Lane


class HbmDivision:
    """Joins the meter, the room and their policy: `Fitting` in training, else `Evaluation`."""

    def __init__(
        self,
        setup: Setup,
        trained: Trained,
        manager: ChunkManager,
        runtime: Runtime,
        activations: ActivationPolicies,
    ) -> None:
        self._setup = setup
        self._trained = trained
        self._ring = ring = trained.grads.ring
        self._runtime = runtime
        self._activations = activations
        self._trains = setup.inner is not None
        meter = self._make_meter(manager)
        self.rehoming = Rehoming(setup, manager, trained, meter)
        self.room = Room(
            setup.budget,
            setup.ledger,
            frames=self._frames(manager, meter),
            homes=self.rehoming,
            ring=ring,
            ram=setup.ram,
            meter=meter,
        )
        self.fitting = self._make_fitting(meter)
        activations.watch = self.fitting
        self._evaluation: Evaluation | None = None
        if not self._trains:
            evaluation = Evaluation(self.room, meter=meter, log=setup.log)
            self._evaluation = activations.forwards = evaluation
        ring.limit_bytes = 0  # until activations are measured

    def _frames(self, manager: ChunkManager, meter: Meter) -> ArenaFrames:
        """Return the frames of this rank, or those that ranks which gather agree upon."""
        setup = self._setup
        make = partial(AgreedFrames, setup.comm) if setup.store.is_gathered else ArenaFrames
        return make(manager, self._runtime.fetches, meter, setup.device.is_cuda)

    def _make_meter(self, manager: ChunkManager) -> Meter:
        setup, ring, runtime, trained = self._setup, self._ring, self._runtime, self._trained
        return make_meter(
            setup.device,
            runtime.saved.footprint,
            gradient_bytes=ring.most_bytes if self._trains else 0,
            traced=not is_compiled(setup.model) and not (self._trains and setup.device.same_ram),
            trains=self._trains,
            slack_bytes=setup.budget.slack_bytes,
            others=lambda: (
                manager.arena.n_bytes
                + setup.store.hbm_bytes.total()
                + setup.budget.buffer_bytes
                + trained.passage.n_bytes
            ),
            passing=ring.sources,
            has=lambda leaf: id(leaf) in runtime.pages.binding.index,
            ours=lambda: runtime.is_running,
            keeper=self._keeper,
            wrappers=setup.parts.kinds,
        )

    def _keeper(self) -> Keeper:
        """Return the object that makes room for new tensors, or refuses them."""
        return self.fitting if self._evaluation is None else self._evaluation

    def _make_fitting(self, meter: Meter) -> Fitting:
        setup, footprint = self._setup, self._runtime.saved.footprint
        plan, layout = setup.blueprint, setup.blueprint.layout
        forecast = forecast_of(setup, footprint, self._activations, device=setup.device)
        copies = copies_of(setup)
        return Fitting(
            self.room,
            meter=meter,
            forecast=forecast,
            footprint=footprint,
            choice=self._activations,
            tradeoff=Tradeoff(
                *(self.room, forecast, layout, plan.needs),
                copies=copies,
                pace=self._pace,
                drive=self._drive,
                early=setup.config.updates == "backward",
                passing=self.rehoming.passing,
                share=setup.tuning.activation_share,
            ),
            may_stay=self._may_stay,
            copies=copies,
            log=setup.log,
        )

    def _pace(self) -> float | None:
        stepper = self._trained.stepper
        return None if stepper is None else stepper.pace.seconds_per_numel

    def _drive(self) -> Drive:
        return Drive(self.rehoming.disk_bytes(), self._setup.store.pool.seconds_per_byte)

    @property
    def is_asked(self) -> bool:
        """Whether a model that fits the device may stay there, if nothing of it is on disk, and
        compute on its homes: alike on all ranks of a tensor."""
        setup = self._setup
        kept = setup.device.is_cuda or setup.blueprint.is_coded or setup.blueprint.is_shared
        return self._trains and not kept

    @property
    def _may_stay(self) -> bool:
        return self.is_asked and not self._setup.budget.spills

    # -- between two steps -----------------------------------------------------------------------

    def fits_whole(self, division: Division) -> bool:
        """Whether the whole model fits with a division's activations, and may stay."""
        return self._may_stay and self._setup.budget.holds_everything(division.moving_bytes)

    def apply(self, division: Division) -> None:
        """Apply a division, once; if a frame is held, the next call tries again."""
        if self._setup.budget.division is division:
            return
        self._ring.limit_bytes = min(self._ring.limit_bytes, division.ring_bytes)
        with host_work():
            self._ring.poll()  # before frames and homes take the room of gradients on their way
        self.rehoming.lower(division.on_hbm)
        if not division.passage_bytes:  # before frames are made in its place
            self.rehoming.let_pass(0)
        if self.room.apply(division):
            self.rehoming.raise_to(division.on_hbm)
            if division.passage_bytes:
                self.rehoming.let_pass(division.passage_bytes)

    def begin(self) -> None:
        """A step begins."""
        self.rehoming.passing.count()
        self.fitting.meter.restart()
        self.fitting.begin()  # training by another method calls no forward that begins it
        self._runtime.fetches.step_ends()

    def forward_ended(self) -> None:
        """A forward in inference ended: it is a step."""
        if self._evaluation is not None:
            self._evaluation.end()

    def activations_seen(self) -> int:
        """Return this step's peak of bytes outside frames and buffers, plus the useful ring's."""
        return self.fitting.meter.peak_bytes() + self._ring.useful_bytes


def forecast_of(
    setup: Setup,
    footprint: GraphFootprint,
    activations: ActivationPolicies,
    *,
    device: Device | None,
) -> Forecast:
    """Return the forecast of what units leave; their compute is measured by ``device``, if any."""
    plan = setup.blueprint
    buckets = plan.layout.buckets
    weights = [sum(buckets[b].n_bytes for b in needs) for needs in plan.needs]
    modules = (None if unit.module is None else type(unit.module) for unit in plan.units)
    return Forecast(
        device,
        footprint,
        names=[unit.name or "model" for unit in plan.units],
        kinds=[UnitKind(*kind) for kind in zip(modules, weights, strict=True)],
        may_recompute=activations.proofs.holds,
    )


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled, which dispatch modes would disturb."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def copies_of(setup: Setup) -> Copies:
    """Return how long copies take, over the link by the profile if one is named, else measured."""
    measured, profile = setup.device.copy_seconds, setup.config.profile
    link = measured if profile is None else find(profile).copy_seconds
    return Copies(partial(link, Lane.H2D), partial(link, Lane.D2H), partial(measured, Lane.D2D))
