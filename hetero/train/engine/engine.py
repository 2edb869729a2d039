"""The engine of one prepared model: what `prepare` builds and `release` takes apart (floor 2).

[Note: where a step updates]  Paged buckets are updated at their HOST homes, resident ones where
they are. On a CPU both are the same arithmetic. On CUDA they are not known to be, so the choice is
made once, at prepare, and reported as the update place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from hetero import interrupts
from hetero.config import Config
from hetero.cores import Cores
from hetero.device import CpuDevice, Device, return_large_blocks, trim_heap
from hetero.errors import BudgetError, ConfigError, StateError, StorageError, too_early
from hetero.events import EventLog, What
from hetero.io import Folder, spill_folder
from hetero.jobs import Job, Worker, thread_budget
from hetero.memory.codec import Workspace
from hetero.memory.frame import FrameMap
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.manager import PARAM, ChunkManager
from hetero.memory.parcel import ParcelStore
from hetero.memory.pool import Request
from hetero.memory.slab import HomeStore
from hetero.plan.hardware import find
from hetero.plan.planner import Planner
from hetero.plan.schedule import Schedule, Shape
from hetero.plan.trace import Trace
from hetero.train.access.cursor import Cursor
from hetero.train.access.early import EarlyUpdates, NoEarlyUpdates
from hetero.train.access.hooks import Hooks, before_node
from hetero.train.access.runtime import Runtime
from hetero.train.access.step_events import StepEvents
from hetero.train.activations.forecast import Forecast, UnitKind
from hetero.train.activations.meter import Keeper, Meter, make_meter
from hetero.train.activations.offload import MIN_BYTES, Offload
from hetero.train.activations.policy import ActivationPolicies
from hetero.train.activations.saved import NoViews, SavedTensors
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.budget import decide
from hetero.train.engine.check import check_once, pageable, pages
from hetero.train.engine.evaluation import Evaluation
from hetero.train.engine.fitting import CopySeconds, Division, Fitting
from hetero.train.engine.handover import Origin
from hetero.train.engine.resident import Resident
from hetero.train.engine.snapshot import Saver, Saving
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients.flight import Flight
from hetero.train.gradients.store import GRAD, WIDE, GradStore, LazyGrad
from hetero.train.model.binding import plain
from hetero.train.model.graph import unless_gone
from hetero.train.model.host_work import host_work
from hetero.train.model.units import MARK
from hetero.train.update import kernel
from hetero.train.update.draft import Settings, Update, Updater
from hetero.train.update.masters import WORKING, LossScaler, Masters
from hetero.train.update.optimizer import Optimizer
from hetero.train.update.rules import Group, Rule
from hetero.train.update.step import Stepper
from hetero.types import Kind, Lane, Tier, format_bytes

NOT_STATES = (PARAM, GRAD, WIDE)  # homes that are looked after elsewhere
PASSING = (Kind.PARAM, Kind.GRAD)  # on disk, they go through the pool's memory in backward
WARM_STEPS = 3  # steps in which states appear and the heap has to settle


@dataclass(slots=True)
class StepStats:
    """Traffic and misses of the last whole step; without an optimizer, of the last forward."""

    n_bytes: Counter[Lane] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class Engine:
    """Everything of one prepared model; `mode` is "paged" or "resident"."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        device: Device,
        blueprint: Blueprint,
        tuning: Tuning | None = None,
    ) -> None:
        self.model = model
        self.inner = optimizer
        self.config = config
        self.device = device
        self.blueprint = blueprint
        self.tuning = tuning or Tuning()
        self.params = [param for _, param in pages(model)]
        self.hooks = Hooks()
        self.log = EventLog(device.clock)
        self._step_began = 0.0  # or the step before it ended, in seconds of the log's clock
        self.stats = StepStats()
        self.steps = 0
        self._again: list[Request] = []  # what the next step's updates will need from disk
        self._finished = True  # no update was begun since all of them were waited for
        self._told_early = False  # whether a release was refused between backward and step
        self._settings: dict[int, Settings] | None = None  # of groups, at this step's first update
        for folder in self._folders():  # validate nvme= even if nothing spills
            folder.close()
        self.budget, self.mode = decide(model, config, device, blueprint, self.tuning.extent_numel)
        self.optimizer: Optimizer | None = None
        self.saver = Saver()
        self.broken = ""  # why the model must not be used: a load that failed half-way
        self._barrier = Hooks()  # what refuses its forwards while it is broken
        self.stepper: Stepper | None = None
        self._index = {id(p): i for i, p in enumerate(self.params)}
        groups = [] if optimizer is None else optimizer.param_groups
        self._listed = {id(p): p for group in groups for p in group["params"]}  # by `prepare`
        self._admitted: list[int] = []  # ids of the parameters in the groups at the last step
        self.origin = Origin(model, self.params, blueprint.layout)

    # -- building --------------------------------------------------------------------------------

    def build(self) -> None:
        """Move the parameters to their homes and attach everything; undone on any failure."""
        interrupts.hold(self)
        self.ledger = Ledger(
            {
                Tier.HBM: self.budget.hbm,
                Tier.HOST: self.config.host,
                Tier.NVME: self.config.nvme_bytes,
            },
            self.log,
        )
        self.link = Link(self.device, self.log)
        self.store = self._make_store()
        self.offload = self._make_offload()
        layout = self.blueprint.layout
        self.masters = Masters(self.config.precision, layout, self.store)
        self.worker = self.tuning.worker or Worker(thread_budget())
        self.worker.clock = self.device.clock
        device = self.device.torch_device
        try:
            self.ledger.charge(Tier.HBM, Kind.BUFFER, self.budget.buffer_bytes, "buffers")
            self.origin.move_in(self.store, self.masters, device, self.config.weights)
            if self.mode == "resident":
                self.origin.give_back_grads()
            if self.mode == "paged":
                self._attach()
            elif self.has_masters:
                self._attach_resident()
            if self.mode == "resident":
                self._shape_resident()
            self._rewrite()
            if self.inner is not None:
                self._wrap_optimizer(self.inner)
            self.hooks.guard(self.model, self._state_dict_access, self._check_copy)
            if any(home.extents is not None for home in self.store.homes.values()):
                self.hooks.refuse_saving(self.model)
            self.store.before_use = unless_gone(self.finish, None)
            object.__setattr__(self.model, MARK, self)
            self._step_began = self.log.clock()
        except BaseException:
            self._move_out(failed=True)
            self.offload.close()
            self.store.close()
            interrupts.let_go(self)
            raise

    def _make_store(self) -> HomeStore:
        """Return the store of homes, with files for those that HOST does not hold."""
        resident, spill = self.mode == "resident", self.budget.spill
        if spill is None:
            return HomeStore(self.device, self.ledger, resident=resident)
        return_large_blocks()
        self.ledger.charge(Tier.HOST, Kind.POOL, spill.pool_bytes, "memory for homes on disk")
        pool = self.tuning.open_pool(
            self._folders(),
            spill.disk_bytes,
            pool_bytes=spill.pool_bytes,
            extent_numel=spill.extent_numel,
            ledger=self.ledger,
            log=self.log,
            n_threads=self.tuning.io_threads,
            checked=self.tuning.checked,
        )
        return HomeStore(
            self.device, self.ledger, resident=resident, pool=pool, on_disk=spill.holds
        )

    def _folders(self) -> list[Folder]:
        """Return the directories for what goes to disk; none where there are no bytes."""
        paths = self.config.nvme if self.device.has_bytes else ()
        return [spill_folder(path, self.tuning.io) for path in paths]

    def _make_offload(self) -> Offload:
        """Return what sends activations down, in chunks as parameters have them."""
        chunk_bytes = 4 * self.blueprint.layout.chunk_numel
        link = Link(self.device, self.log)  # counted by itself: `stats` is of parameters
        store = ParcelStore(
            self.device,
            link,
            self.ledger,
            chunk_bytes=chunk_bytes,
            pool=self.store.pool,
            reserved=unless_gone(self._to_come, 0),
            counts_on=self.config.activations == "offload",
        )
        return Offload(
            store,
            self.device,
            required=self.config.activations == "offload",
            min_bytes=min(MIN_BYTES, chunk_bytes),
        )

    def _to_come(self, below: Tier) -> int:
        """Return the bytes of HOST or NVME that homes will take and have not taken yet."""
        whole, spill = self.budget.host_bytes, self.budget.spill
        if below is Tier.NVME:
            whole = 0 if spill is None else spill.disk_bytes
        tier = self.store.tier if below is Tier.HOST else below
        taken = self.ledger.used(tier) - self.ledger.used(tier, Kind.ACTIVATION)
        return max(0, whole - taken)

    def _attach(self) -> None:
        """Make the parameters pages: frames, runtime, hooks."""
        layout, plan = self.blueprint.layout, self.blueprint
        room = self.budget.room
        least = plan.granules(plan.widest)
        # A CUDA arena cannot grow in place, so it leaves room for activations not yet measured.
        ceiling = room if not self.device.is_cuda else min(room, 2 * least)
        decoding = plan.decoding(is_cuda=self.device.is_cuda)
        self.manager = ChunkManager(
            layout,
            device=self.device,
            ledger=self.ledger,
            link=self.link,
            store=self.store,
            limit=least,
            ceiling=ceiling,
            next_use=self.tuning.victim or (lambda b: runtime.fetches.active.next_use(b)),
            workspace=None if decoding is None else Workspace.on(self.device, *decoding),
        )
        self.manager.overwriting = self.masters.overwriting
        self.manager.writing = self.saver.wait_for
        self.manager.home_written = self.masters.reset
        self._attach_grads(self.device)
        self.grads.flight.limit_bytes = 0  # until it is known what is left
        self.manager.claimed = self.grads.let_go
        planned = partial(plan_for, layout=layout, manager=self.manager, tuning=self.tuning)
        trains = self.inner is not None
        if self.inner is not None:
            self.stepper = self._make_stepper(self.inner)
        self.runtime = runtime = Runtime(
            self.params,
            layout,
            plan.needs,
            device=self.device,
            manager=self.manager,
            grads=self.grads,
            masters=self.masters,
            train=Cursor(partial(planned, training=trains)),
            evaluate=Cursor(partial(planned, training=False)),
            stepped=trains,
            events=StepEvents(
                before_use=unless_gone(self._before_use, None),
                before_load=self.saver.finish,
                backward_begins=unless_gone(self._backward_begins, None),
                forward_ended=unless_gone(self._after_evaluation, None),
                spare=unless_gone(self._spare, 0),
                resume=unless_gone(self._resume, None),
            ),
            early=self._early_updates() if self._may_be_early else NoEarlyUpdates(),
            scaling=self._scaling,
        )
        self.grads.on_arrival = runtime.backward.gradient_arrived
        runtime.pages.binding.page_all()
        self.origin.give_back_grads()
        self._shape(self.runtime.saved, self.runtime.enter, self.runtime.leave)
        self.fitting = self._make_fitting()
        self.activations.watch = self.fitting
        meter = self.fitting.meter
        if self.inner is None:
            self.activations.may_change = False  # no step comes that would end the measuring
            self._attach_evaluation(meter)
        self.hooks.watch(self.model, plan.units, self.runtime, self.activations, meter)
        self.device.reset_peak()

    def _spare(self) -> int:
        # CUDA's allocator would count them in a step's peak
        return 0 if self.device.is_cuda else self.fitting.spare()

    def _resume(self) -> None:
        self.fitting.resume()

    def _attach_evaluation(self, meter: Meter) -> None:
        """Let every forward be a step of its own: there are no others."""
        self.evaluation = Evaluation(
            self.budget,
            meter=meter,
            frames=self,
            charge=lambda n_bytes: self._charge(n_bytes, 0),
            ram=self._ram,
            log=self.log,
        )
        self.activations.evaluates = self.evaluation.begin
        self.activations.unit_begins = self.evaluation.settle

    def _shape(
        self,
        saved: SavedTensors,
        enter: Callable[[int], bool],
        leave: Callable[[int, bool], None],
    ) -> None:
        """Make the policy of what units leave for backward."""
        saved.lower(self.offload)
        self.activations = ActivationPolicies(
            self.blueprint.units,
            self.config.activations,
            self.config.micro_batch,
            place=self.device.torch_device,
            saved=saved,
            offload=self.offload,
            enter=enter,
            leave=leave,
            before_node=before_node,
        )

    def _make_fitting(self) -> Fitting:
        """Return what divides HBM between frames and activations."""
        layout, plan = self.blueprint.layout, self.blueprint
        footprint, flight = self.runtime.saved.footprint, self.grads.flight
        stepped = self.inner is not None
        meter = make_meter(
            self.device,
            footprint,
            gradient_bytes=flight.most_bytes if stepped else 0,
            traced=not _is_compiled(self.model) and not (stepped and self.device.same_ram),
            others=lambda: self.manager.arena_bytes + self.budget.buffer_bytes,
            passing=flight.sources,
            ours=lambda: self.runtime.is_running,
            keeper=self._keeper,
        )
        weights = [sum(layout.buckets[b].n_bytes for b in needs) for needs in plan.needs]
        modules = (None if unit.module is None else type(unit.module) for unit in plan.units)
        return Fitting(
            self.budget,
            self.ledger,
            meter=meter,
            forecast=Forecast(
                self.device,
                footprint,
                names=[unit.name or "model" for unit in plan.units],
                kinds=[UnitKind(*kind) for kind in zip(modules, weights, strict=True)],
                may_recompute=self.activations.may_recompute,
            ),
            footprint=footprint,
            ring=flight,
            frames=self,
            choice=self.activations,
            ram=self._ram,
            may_stay=self._may_stay,
            copy_seconds=self._copy_seconds(),
            log=self.log,
        )

    def _keeper(self) -> Keeper:
        """Return who makes room for what operations make, and refuses what has none."""
        return self.evaluation if self.inner is None else self.fitting

    def _ram(self) -> int:
        return self.device.host_limit().n_bytes

    def _copy_seconds(self) -> CopySeconds:
        """Return how long copies take: by the profile where one is named, else as measured."""
        if self.config.profile is None:
            return self.device.copy_seconds
        return find(self.config.profile).copy_seconds

    @property
    def _may_stay(self) -> bool:
        """Whether a model that fits the device is to stay there: its homes are what computes."""
        if self.device.is_cuda or self.blueprint.is_coded:
            return False
        return self.inner is not None and not self.budget.spills

    @property
    def limit(self) -> int:
        """How many frames there are."""
        return self.manager.limit

    def shed(self) -> None:
        """Give back frames apart from the others that are not held."""
        self.manager.shed()

    def resize(self, limit: int) -> bool:
        """Have so many frames, and plan for them; False while one is held."""
        if limit == self.manager.limit:
            return True
        if not self.manager.resize(limit):
            return False
        self.runtime.fetches.replan()
        return True

    def vacate(self) -> int:
        """Give up all frames that are not held for now; returns the bytes of the others."""
        return self.manager.vacate()

    def lower(self, limit: int) -> bool:
        """Give up frames, and plan for the others; False while one of them is held."""
        if self.device.is_cuda:  # whose memory has to be given back
            return self.resize(limit)
        if not self.manager.lower(limit):
            return False
        self.runtime.fetches.replan()
        schedule = self.runtime.fetches.active.schedule
        if schedule is not None:  # what stays would be in the way where the plan has others
            self.manager.clear_the_way({op.bucket: op.start for op in schedule.at(-1)})
        return True

    def _shape_resident(self, before: ActivationPolicies | None = None) -> None:
        """Let units whose parameters stay where they are leave what their policy says."""
        saved = SavedTensors(NoViews())
        self._shape(saved, _nothing_to_enter, _nothing_to_leave)
        if before is not None:
            self.activations.policies.update(before.policies)
            self.activations.proofs.update(before.proofs)
        if self.activations.shapes:
            self.hooks.shape(self.model, self.blueprint.units, self.activations)
        if self.activations.offloads:
            self.hooks.save_through(self.model, saved)

    def _rewrite(self) -> None:
        """Let modules compute otherwise, where settings ask for it."""
        if self.config.fused_loss:
            self.hooks.fuse_loss(self.model)
        if self.config.tile and not self.hooks.tile(self.blueprint.units, self.config.tile):
            raise ConfigError(
                f"tile={self.config.tile}: no unit of this {type(self.model).__name__} has an MLP"
                " that is recognised by the name of its class",
                advice="call hetero.tile(module, size=...) on position-wise modules before prepare",
            )

    @property
    def was_paged(self) -> bool:
        """Whether parameters are pages, or were so until everything fitted."""
        return hasattr(self, "fitting")

    @property
    def has_masters(self) -> bool:
        """Whether working weights of this model have fp32 masters."""
        return any(bucket.has_master for bucket in self.blueprint.layout.buckets)

    def _attach_grads(self, device: Device) -> None:
        """Take gradients as autograd makes them."""
        trainable = [b for b in self.blueprint.layout.buckets if b.trainable]
        flight = Flight(
            device,
            self.link,
            self.ledger,
            sizes_bytes=[s.spec.numel * b.dtype.itemsize for b in trainable for s in b.segments],
            most_bytes=max((b.n_bytes for b in trainable), default=0),
        )
        self.grads = GradStore(
            self.params,
            self.blueprint.layout,
            device=device,
            flight=flight,
            store=self.store,
            worker=self.worker,
            early=self._may_be_early,
        )
        coded = [p for p in self.params if not self._bucket(p).codec.exact]
        others = [p for p in self.params if self._bucket(p).codec.exact]
        self._hear_gradients(others)
        self.hooks.gradients(coded, self._refuse_gradient)

    def _hear_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Take gradients as they come; in 2 bytes, before autograd adds the next to one."""
        mastered = {self._index[id(p)]: p for p in params if self._bucket(p).has_master}
        self.hooks.before_gradients(mastered, self.grads.arriving)
        self.hooks.gradients(params, self.grads.arrived)

    def _refuse_gradient(self, param: nn.Parameter) -> None:
        """Raise StateError for the gradient of a weight that is at home in code."""
        raise StateError(
            f"parameter {self._segment(param).spec.name!r} was frozen when the model was prepared,"
            f" and is at home as {self._bucket(param).codec.name}: it cannot train",
            advice="release the model, thaw the parameter and prepare again; or name its module in"
            " keep_exact= and give it to the optimizer before hetero.prepare",
        )

    def _attach_resident(self) -> None:
        """Masters of parameters that stay where they are: everything is in one memory."""
        place = CpuDevice(self.device.torch_device)
        if self.device.is_cuda:  # the stream orders updates, not a thread
            self.worker = self.tuning.worker or Worker(0)
        self.link = Link(place, self.log)
        self._attach_grads(place)
        self._watch_resident()

    def _watch_resident(self) -> None:
        self.resident = Resident(self.params, self.blueprint.layout, self.masters, self.grads)
        self.grads.on_arrival = self.resident.gradient_arrived
        if self.stepper is not None:
            self.resident.scaling = self._scaling

    def _wrap_optimizer(self, inner: torch.optim.Optimizer) -> None:
        self.rule = Rule(inner)
        if self.mode == "resident" and self.has_masters:
            self.stepper = self._make_stepper(inner)
            self.resident.scaling = self._scaling
        self.optimizer = Optimizer(inner, self)
        for param, state in self.optimizer.state.items():
            self.optimizer.state[param] = self.adopt(param, state)
        inner.state = defaultdict(dict)
        self._inner_step = inner.__dict__.get("step")
        vars(inner)["step"] = MethodType(_forgotten, inner)

    def _make_stepper(self, inner: torch.optim.Optimizer) -> Stepper:
        updater = Updater(
            inner,
            self.params,
            self.blueprint.layout,
            grads=self.grads,
            store=self.store,
            masters=self.masters,
            native=kernel.load() if self.tuning.native else None,
            cores=Cores(self.worker.n_threads),
            stream_to=self.device.torch_device if self.tuning.update_on_device else None,
        )
        scaler = LossScaler() if self.config.precision == "fp16" else None
        return Stepper(
            updater,
            self.grads,
            self.worker,
            log=self.log,
            scaler=scaler,
            pause=self.tuning.pause,
        )

    # -- updates that begin in backward (see [Note: early updates]) ------------------------------

    @property
    def _may_be_early(self) -> bool:
        if self.mode != "paged" or self.inner is None or self.tuning.update_on_device:
            return False
        return self.config.updates == "backward"

    def _early_updates(self) -> EarlyUpdates:
        """Return what begins updates as backward leaves units."""
        buckets = self.blueprint.layout.buckets
        trained = [[b for b in need if buckets[b].trainable] for need in self.blueprint.needs]

        grads, begin_early = self.grads, unless_gone(self._begin_early, None)

        def complete(unit: int) -> bool:
            return all(grads.landed(buckets[b]) for b in trained[unit])

        def begin(unit: int) -> None:
            for bucket in trained[unit]:
                begin_early(buckets[bucket])

        return EarlyUpdates(self.blueprint.needs, complete=complete, begin=begin)

    def _begin_early(self, bucket: Bucket) -> None:
        """Begin a bucket's update before the step, where it is not seen and `step` has nothing to
        look at first."""
        if self.stepper is None or self.optimizer is None or self._is_seen(bucket):
            return
        if self.optimizer.states_are_held or not self.manager.may_hand_over(bucket.id):
            return
        if self._settings is None:
            self._settings = self.stepper.updater.settings(self.optimizer.param_groups)
        before = self.saver.jobs_before(bucket.id)
        with host_work():  # what an update makes, it makes on HOST
            early = self.stepper.open_early(
                bucket, self._settings, self.optimizer.known_state, before
            )
            if early is None:
                return
            self.manager.hand_over_early(bucket.id, early.job)
            if self.store.pool is not None:
                self.store.pool.ahead(early.update.requests)
            self.worker.submit(early.job)

    def void_early(self) -> None:
        """Give up a step that will not be made: what its early updates did stays, so that the model
        is of no use until it is loaded."""
        if self.stepper is not None and self.stepper.early:
            self._seal(self.stepper)
            self.broken = "some of its parameters were updated in a step that was not made"

    def _refuse_early(self, what: str) -> None:
        """Raise StateError while updates of a step that is not made yet have begun."""
        if self.stepper is not None and self.stepper.early:
            raise too_early(what)

    # -- training --------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer) -> None:
        """Update all parameters that have a gradient, now or during the next forward.

        Ctrl-C comes out when the step is made and counted, after its border.
        """
        if self.model.__dict__.get(MARK) is not self:
            raise StateError(
                "this optimizer was released with its model",
                advice="step the optimizer that hetero.release returned, or prepare both again",
            )
        interrupts.hold(self)
        log = self.log
        began, log.phase = log.clock(), "step"
        try:
            self._step(optimizer)
        finally:
            now = log.clock()
            log.add(What.PHASE, began, now, why="step")
            log.add(What.STEP, self._step_began, now)
            log.step, log.phase, self._step_began = log.step + 1, "between", now
        interrupts.point()

    def restate(self) -> None:
        """Begin the event log anew: what is where now is what it begins with."""
        self.log.clear()
        self._step_began = self.log.clock()
        self.ledger.restate()
        if self.mode == "paged":
            self.manager.restate()

    def _step(self, optimizer: Optimizer) -> None:
        self.refuse_broken()
        self._refuse_excess()
        self._admit_all(optimizer.param_groups)
        if self.mode != "paged":
            self.saver.finish()  # what is saved is what is trained
        self._take_copies()
        clip = self._clip if self.config.max_grad_norm is not None else None
        if self.stepper is None:
            if clip is not None:
                clip()
            self._step_in_place(optimizer)
            return
        # 1. gradients and written parameters come home; norm, clip and settings are closed
        (self.runtime if self.mode == "paged" else self.resident).quiesce()
        division = self.fitting.divide() if self.mode == "paged" else None  # or nothing is updated
        seen = self._seen(self.stepper)
        updates = self.stepper.close(optimizer.param_groups, optimizer.known_state, clip)
        begun = self._seal(self.stepper)
        # 2. versions move as they would in place
        touched = [index for update in (*begun, *updates) for index in update.touched]
        if touched:
            torch.autograd.graph.increment_version([self.params[i] for i in touched])
            if self.mode == "paged":
                self.runtime.pages.stepped(update.bucket.id for update in updates)
        # 3. homes are handed to their updates, in the order in which they are needed next
        updates = self._in_order(updates)
        self._announce(begun, updates)
        self._hand_over_all(self.stepper, updates, seen)
        self._border(division)

    def _refuse_excess(self) -> None:
        """Raise OutOfMemory where activations that went down passed a budget."""
        error = self.offload.store.refusal()
        if error is not None:
            if self.mode == "paged":
                self.fitting.spoil()
            raise error

    def _backward_begins(self) -> None:
        if self.stepper is None or not self.stepper.early:
            self._settings = None  # a step that was skipped may have left others
        self.fitting.resume()
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Have states read for the next step's first updates, where backward leaves the drive."""
        again, self._again = self._again, []
        spill = self.budget.spill
        rests = spill is not None and not any(kind in PASSING for kind, _ in spill.on_disk)
        if again and rests and self.store.pool is not None:
            self.store.pool.later(again)

    def _step_in_place(self, optimizer: Optimizer) -> None:
        """Run the user's rule on plain parameters, as torch would."""
        self.rule.step_in_place(optimizer.param_groups, optimizer.known_state)
        self._count()

    def _clip(self) -> None:
        if self.optimizer is not None and self.config.max_grad_norm is not None:
            self.optimizer.clip_grad_norm_(self.config.max_grad_norm)

    def _in_order(self, updates: list[Update]) -> list[Update]:
        if self.mode != "paged":
            return updates
        order = self.runtime.fetches.train.order()
        return sorted(updates, key=lambda update: order.get(update.bucket.id, len(order)))

    def _seal(self, stepper: Stepper) -> list[Update]:
        """The step is made: return the updates that it has begun already."""
        self._settings = None
        if self.mode == "paged":
            self.manager.seal()
            self.runtime.early.step_ended()
        return stepper.seal()

    def _announce(self, begun: list[Update], updates: list[Update]) -> None:
        """Tell the pool what updates need from disk; those ``begun`` have told it."""
        if self.store.pool is None:
            return
        early, requests = (
            [request for update in some for request in update.requests] for some in (begun, updates)
        )
        self.store.pool.ahead(requests)
        self._again = [request.again() for request in (*early, *requests)]

    def _hand_over_all(self, stepper: Stepper, updates: list[Update], seen: Container[int]) -> None:
        """Begin all updates, and do those of buckets that are ``seen``; then raise what a disk
        or a second Ctrl-C raised: a step is begun as a whole."""
        self._finished = False
        errors: list[StorageError | KeyboardInterrupt] = []
        for update in updates:
            try:
                self._hand_over(stepper, update, seen=update.bucket.id in seen)
            except (StorageError, KeyboardInterrupt) as error:
                errors.append(error)
        if errors:
            self._count()
            raise errors[0]

    def _seen(self, stepper: Stepper) -> set[int]:
        """Return the buckets whose updates would be watched, before updates refer to states."""
        if self.mode != "paged" or self.tuning.update_on_device:
            return {bucket.id for bucket in self.blueprint.layout.buckets}
        stepper.finish()  # as the updates of the last step do until they are done
        return {b.id for b in self.blueprint.layout.buckets if b.trainable and self._is_seen(b)}

    def _hand_over(self, stepper: Stepper, update: Update, *, seen: bool) -> None:
        """Begin a bucket's update; wait where it must be done when `step` returns."""
        after = self.saver.jobs_before(update.bucket.id)
        job = stepper.begin(update, at_once=seen, after=after)
        if self.mode == "paged":
            self.manager.hand_over(update.bucket.id, job)
        if update.fresh or seen:
            job.wait()
            for _, home in self.store.of_bucket(update.bucket.id):
                self.store.refresh(home)
        if self.mode != "paged":
            self.resident.updated(update.bucket)
            self.grads.let_go(update.bucket)

    def _take_copies(self) -> None:
        """Write home what was written to states through views of copies that stand for them."""
        if any(home.copies for home in self.store.homes.values()):
            self._finish()
            self.store.take_all()

    def save(self, saving: Saving) -> None:
        """From here on, homes change only after the save has read them."""
        self._refuse_early("the model is saved")
        self._take_copies()
        self.saver.begin(saving, self.store, paged=self.mode == "paged")

    def update_of(self, bucket_id: int) -> Job | None:
        """Return the update of a bucket that is under way, where there is one."""
        return self.manager.update_of(bucket_id) if self.mode == "paged" else None

    def begin_load(self, source: str) -> None:
        """From here on every use of the model is refused, until `end_load`."""
        self.end_load()
        self.broken = f"{source} was loaded in part"
        self._barrier.refuse_forwards(self.model, self.refuse_broken)

    @contextmanager
    def loads_itself(self) -> Iterator[None]:
        """Let the model's own methods of loading use its state dict before a load is complete."""
        said, self.broken = self.broken, ""
        try:
            yield
        finally:
            self.broken = said

    def end_load(self) -> None:
        """A load is complete: the model may be used."""
        self.broken = ""
        self._barrier.remove()

    def _before_use(self) -> None:
        """The model is called: Ctrl-C waits again where the user has changed that."""
        interrupts.hold(self)
        self.refuse_broken()
        self._refuse_early("the model is used again")

    def refuse_broken(self) -> None:
        """Raise StateError where a load failed half-way."""
        if self.broken:
            raise StateError(
                f"the model is of two checkpoints: {self.broken}",
                advice="load a whole checkpoint with hetero.load_checkpoint before going on",
            )

    def _is_seen(self, bucket: Bucket) -> bool:
        """Whether the user's code holds a state or a tensor of one, and would watch it change."""
        homes = (home for name, home in self.store.of_bucket(bucket.id) if name not in NOT_STATES)
        if any(home.held or home.objects_held or home.copies for home in homes):
            return True
        if self.optimizer is None:
            return False
        params = (self.params[segment.index] for segment in bucket.segments)
        return any(map(self.optimizer.state_is_held, params))

    def finish(self) -> None:
        """Wait until every update is done; raises what one of them raised.

        Who asks may look at states, and write to them: a save has read them by then. Once all is
        done, asking again costs nothing: loops over states ask for each parameter.
        """
        self._refuse_early("states are read")
        self._finish()

    def _finish(self) -> None:
        self.saver.finish()
        if self.stepper is not None and not self._finished:
            self.stepper.finish()
            for bucket in self.blueprint.layout.buckets:
                if self.mode == "paged":
                    self.manager.home(bucket.id)
                self.grads.let_go(bucket)
            self._finished = True
        if self.store.pool is not None:  # else states are shown as they are
            self.store.take_all(held=False)

    def _border(self, division: Division | None) -> None:
        """Between two steps: count, divide HBM by what was measured, begin to prefetch."""
        self._count()
        if division is None:
            return
        self.hooks.mend()
        self._take_stats()
        self.shed()
        if self.store.pool is not None:
            self.store.pool.told = False
        if self._fit(division):
            return
        self.fitting.meter.restart()
        self.fitting.begin()  # a model that trains by another method has no forward to begin one
        self.runtime.fetches.step_ends()

    def _take_stats(self) -> None:
        """Note what the step moved that is over."""
        counts, n_bytes = self.manager.counts, self.link.n_bytes
        self.stats = StepStats(Counter(n_bytes), Counter(counts))
        counts.clear()
        n_bytes.clear()
        if self.store.pool is not None:
            self.stats.n_bytes.update(self.store.pool.nvme.take_counts())

    def _count(self) -> None:
        self.steps += 1
        if self.steps <= WARM_STEPS and not self.device.is_cuda:
            trim_heap()

    def _fit(self, division: Division) -> bool:
        """Give frames what activations leave of the budget; True when the model became resident."""
        needed, ring, frames = division
        if not self.activations.offloads:
            self.offload.trim()
        if self._may_stay and self.budget.holds_everything(needed + ring):
            return self._become_resident(needed, ring)
        if self.resize(frames):  # a view may still be held: the next border tries again
            self._charge(needed, ring)
        return False

    def _charge(self, activation_bytes: int, ring_bytes: int) -> None:
        """Set aside what activations take; frames grow into it by `Fitting.spare` alone."""
        self.fitting.charge(activation_bytes, ring_bytes)
        self.manager.ceiling = self.manager.frames.limit

    def activations_seen(self) -> int:
        """Return the bytes besides frames and buffers that this step held at its peak, and those
        that its gradients may take on their way down."""
        return self.fitting.meter.peak_bytes() + self.grads.flight.useful_bytes

    def _become_resident(self, activation_bytes: int, ring_bytes: int) -> bool:
        """Everything fits beside the activations: the homes become the parameters themselves."""
        if self.manager.held:
            return False  # a view is still held: the next border tries again
        self.saver.finish()
        self.finish()
        self._unhook()
        for index, (bucket, segment) in enumerate(self.blueprint.layout.home):
            home = self.store.homes[PARAM, bucket]
            plain(self.params[index], home.segments[segment.position])
        self.fitting.charge(activation_bytes, ring_bytes)
        self.mode = "resident"
        if self.has_masters:
            self._hear_gradients(self.params)
            self._watch_resident()
        else:
            self.stepper = None  # torch steps the parameters themselves
            for param in self.params:
                if isinstance(param.grad, LazyGrad):
                    param.grad = param.grad.slot.keep()
        self._shape_resident(self.activations)
        self._rewrite()
        self.hooks.guard(self.model, self._state_dict_access, self._check_copy)
        self.log.now(What.DECISION, tier=Tier.HBM, why="everything fits: the model stays")
        return True

    def _after_evaluation(self) -> None:
        if self.inner is None:
            self._count()
            self._take_stats()
            self.evaluation.end()

    # -- what the optimizer asks -----------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the model's parameters in its own order."""
        return iter(self.params)

    def _admit_all(self, groups: Sequence[Group]) -> None:
        """Raise ConfigError where a user's change of the groups cannot be honoured."""
        params = [param for group in groups for param in group["params"]]
        ids = [id(param) for param in params]
        if ids == self._admitted:  # all of them the model's own, so that no other has such an id
            return
        for param in params:
            if id(param) not in self._listed and pageable(param):
                self.admit(param)
        check_once(self.model, groups)
        self._admitted = ids

    def admit(self, param: torch.Tensor) -> None:
        """Raise ConfigError for a parameter that is not of the prepared model, or needs a master
        that it was prepared without."""
        if id(param) not in self._index:
            raise ConfigError(
                f"a parameter of shape {list(param.shape)} is not of the prepared model",
                advice="prepare the model again with the larger module",
            )
        if self.config.precision not in WORKING:
            return
        segment, bucket = self._segment(param), self._bucket(param)
        if not bucket.codec.exact:
            return  # its gradient is refused where it comes
        if bucket.dtype is WORKING[self.config.precision] and not bucket.has_master:
            raise ConfigError(
                f"parameter {segment.spec.name!r} was frozen, and in no group, when the model was"
                " prepared: it has no fp32 master, and small updates of it would be lost",
                advice="give the optimizer all parameters that may thaw before hetero.prepare, or"
                " release the model and prepare it again",
            )

    def adopt(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with torch's keys whose tensors are the homes' or copies."""
        self.saver.finish()
        if self.stepper is not None:
            return self.stepper.updater.adopt(self._segment(param), state, own=True)
        return {k: _placed(v, param) for k, v in state.items()}

    def _bucket(self, param: torch.Tensor) -> Bucket:
        return self.blueprint.layout.buckets[self.blueprint.layout.home[self._index[id(param)]][0]]

    def _segment(self, param: torch.Tensor) -> Segment:
        return self.blueprint.layout.home[self._index[id(param)]][1]

    @property
    def scaler(self) -> LossScaler | None:
        """The dynamic loss scale, under precision="fp16"."""
        return None if self.stepper is None else self.stepper.scaler

    @property
    def skipped(self) -> bool:
        """Whether loss scaling skipped the last step."""
        return self.stepper is not None and self.stepper.skipped

    @property
    def _scaling(self) -> Stepper | None:
        return None if self.scaler is None else self.stepper

    def saved_masters(self) -> dict[int, torch.Tensor]:
        """Return what a state dict keeps of masters, by the parameter's id."""
        self.saver.finish()
        if self.has_masters:  # a weight that was written is its own master
            (self.runtime if self.mode == "paged" else self.resident).quiesce()
        saved = ((p, self.masters.saved(self._segment(p))) for p in self.params)
        return {id(p): low for p, low in saved if low is not None}

    def load_master(self, param: torch.Tensor, low: torch.Tensor) -> None:
        """Take back what a state dict kept of a parameter's master."""
        self.saver.finish()
        if self.mode == "paged":  # a write that is on its way would come home after this
            self.manager.settle(self.blueprint.layout.home[self._index[id(param)]][0])
        self.masters.load(self._segment(param), low)

    def _check_copy(self, n_bytes: int) -> None:
        """Refuse a copy in RAM for which there is no room, or of a model that must not be used."""
        self.refuse_broken()
        self._refuse_early("the model is copied")
        free, limit = self.ledger.free(Tier.HOST), self.device.host_limit().n_bytes
        room = limit if free is None else min(free, limit)
        if n_bytes > room:
            raise BudgetError(
                f"a copy of the model takes {format_bytes(n_bytes)} of HOST;"
                f" {format_bytes(room)} are there",
                advice="raise host=; or keep averages of your own on disk, one tensor of"
                " model.state_dict() at a time",
                tier="HOST",
                needed_bytes=n_bytes,
            )

    @contextmanager
    def _state_dict_access(self) -> Iterator[None]:
        self.refuse_broken()
        self._refuse_early("a state dict is made or loaded")
        if self.mode == "paged":
            with self.runtime.state_dicts.open():
                yield
        elif self.has_masters:
            with self.resident.at_home():
                yield
        else:
            yield

    # -- taking apart ----------------------------------------------------------------------------

    def release(self) -> None:
        """Give back a plain module and the plain optimizer with its states.

        Raises StorageError where a drive fails: nothing has changed then, and the next call tries
        again. Where a drive has failed before, since the last step, it is StateError: files and
        threads are gone, and what they held is lost.
        """
        if self.stepper is not None and self.stepper.early and not self._told_early:
            self._told_early = True
            self._refuse_early("the model is released (a second call gives back what there is)")
        self.void_early()
        pool = self.store.pool
        failed = pool is not None and pool.told
        try:
            self._come_home()
            states = self._plain_states()
            self.origin.fetch(self.store, self.masters)
        except StorageError as error:
            self.store.before_use = unless_gone(self.finish, None)
            if not failed:
                raise
            self._abandon()
            raise StateError(
                f"the model was released without its values, which a drive took along:"
                f" {error.args[0]}",
                advice="build the model and the optimizer anew and load the last checkpoint;"
                " parameters of this one are NaN",
            ) from error
        self._move_out()
        self.offload.close()
        self._detach(states)

    def _come_home(self) -> None:
        """Finish what is under way; homes then hold the current values."""
        self.saver.finish()
        if self.stepper is not None and self.stepper.surfaced:
            self.worker.close()  # an update failed, as was said: what there is, is given back
            self.grads.abandon()
            if self.mode == "paged":
                self.manager.abandon()
        elif self.mode == "paged" or self.has_masters:
            (self.runtime if self.mode == "paged" else self.resident).quiesce()
            self.finish()

    def _plain_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the states as torch keeps them, out of their homes."""
        self.store.before_use = _nothing  # all is done: what is read waits for nobody
        known = {} if self.optimizer is None else self.optimizer.known_state
        return {p: {k: _placed(v, p) for k, v in state.items()} for p, state in known.items()}

    def _abandon(self) -> None:
        """Take everything apart without a look at what drives hold; parameters become NaN."""
        self.hooks.remove()
        self.device.close()
        self.origin.give_up()
        self._detach({})

    def _detach(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Give the plain optimizer its states and its step again; files and threads go."""
        if hasattr(self, "runtime"):
            self.runtime.close()
        self.worker.close()
        if self.inner is not None:
            self.inner.__dict__.pop("step", None)
            if self._inner_step is not None:
                self.inner.__dict__["step"] = self._inner_step
            self.inner.state = defaultdict(dict, states)
        if self.optimizer is not None:
            self.optimizer.known_state = defaultdict(dict)
        self.store.close()
        self.model.__dict__.pop(MARK, None)
        interrupts.let_go(self)

    def _unhook(self) -> None:
        self.hooks.rest()
        self.grads.reset()
        self.manager.close()

    def _move_out(self, *, failed: bool = False) -> None:
        """Make every parameter plain again; see `Origin.move_out`."""
        if hasattr(self, "runtime"):
            if self.mode == "paged":
                self._unhook()
            self.runtime.close()
        self.hooks.remove()
        resident = self.mode == "resident"
        self.origin.move_out(self.store, self.masters, resident=resident, failed=failed)


def plan_for(
    trace: Trace, *, layout: Layout, manager: ChunkManager, tuning: Tuning, training: bool
) -> Schedule:
    """Plan a step, or a forward, like one that was traced, for the frames that there are."""
    limit = manager.frames.limit
    shapes = {b.id: Shape(b.granules, training and b.trainable) for b in layout.buckets}
    if tuning.schedule is not None:
        return tuning.schedule(trace, shapes, limit)
    return Planner(trace, shapes, FrameMap(limit), limit, tuning.depth).build()


def _nothing() -> None: ...


def _is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled, which dispatch modes would disturb."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def _nothing_to_enter(unit: int) -> bool:
    return False


def _nothing_to_leave(unit: int, pushed: bool) -> None: ...


def _forgotten(inner: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
    """Stand in for the step of an optimizer that was prepared."""
    raise StateError(
        f"this {type(inner).__name__} was given to hetero.prepare and does not step any more",
        advice="step the optimizer that prepare returned: model, optimizer = hetero.prepare(...)",
    )


vars(_forgotten)["_wrapped_by_lr_sched"] = True  # schedulers look for it


def _placed(value: Any, param: torch.Tensor) -> Any:
    """Return a state's value as torch keeps it: tensors of a parameter's shape on its device."""
    if not isinstance(value, torch.Tensor):
        return value
    return (
        value.detach().clone() if value.dim() == 0 else value.detach().to(param.device, copy=True)
    )
