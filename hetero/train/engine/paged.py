"""The residence of a model whose parameters are pages (floor 2).

A unit's parameters are fetched into frames before it computes and evicted after it; homes are in
RAM or on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from hetero import interrupts
from hetero.errors import too_early
from hetero.events import What
from hetero.jobs import Job
from hetero.memory.codec import Workspace
from hetero.memory.frame import FrameMap
from hetero.memory.homecopy import HomeEvents
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.memory.link import Link
from hetero.memory.manager import PARAM, ChunkManager
from hetero.plan.division import Division, Hbm
from hetero.plan.planner import Planner
from hetero.plan.schedule import Schedule, Shape
from hetero.plan.trace import Trace
from hetero.train.access.cursor import Cursor
from hetero.train.access.early import EarlyUpdates, NoEarlyUpdates
from hetero.train.access.expected import Visit, expected
from hetero.train.access.runtime import Runtime
from hetero.train.access.step_events import StepEvents
from hetero.train.engine.alike import gradients_of, members_of, settings_of, states_of
from hetero.train.engine.backward_updates import BackwardUpdates
from hetero.train.engine.broken import Broken
from hetero.train.engine.budget import PAGES, STAYS
from hetero.train.engine.dividing import HbmDivision
from hetero.train.engine.fitting import Fitting
from hetero.train.engine.handover import kept
from hetero.train.engine.read_ahead import ReadAhead
from hetero.train.engine.resident import Mastered, Resident, make_activations, refuse_excess
from hetero.train.engine.rollcall import agreed_division
from hetero.train.engine.setup import Setup, StepStats
from hetero.train.engine.trained import Trained
from hetero.train.engine.tuning import Tuning
from hetero.train.model.graph import ask_unless_gone, unless_gone
from hetero.train.update.arithmetic import Update
from hetero.train.update.optimizer import Optimizer
from hetero.train.update.rules import Group
from hetero.types import Tier


class Paged:
    """Parameters page; gradients, updates and activations follow.

    The runtime's events come through weak references: see [Note: out of gc's sight].
    """

    name = "paged"
    updates_in_place = False
    hbm: HbmDivision
    fitting: Fitting

    def __init__(self, setup: Setup, broken: Broken) -> None:
        self.setup = setup
        self.broken = broken
        self.link = Link(setup.device, setup.log)
        trains = setup.inner is not None
        is_early = trains and setup.config.updates == "backward"
        self.may_be_early = is_early and not setup.tuning.update_on_device
        self.trained = Trained.on(
            *(setup, setup.device, self.link),
            early=self.may_be_early,
            growing=ask_unless_gone(self, growing, nullcontext()),
            lifting=ask_unless_gone(self, lifting, nullcontext()),
            before_sums=ask_unless_gone(self, lambda paged: paged.hbm.rehoming.make_way(), None),
        )
        self.manager = manager = make_manager(
            setup,
            self.link,
            self.trained,
            next_use=lambda b: runtime.fetches.active.next_use(b),
            more=ask_unless_gone(self, lambda paged: paged.hbm.room.from_homes(), 0),
            growing=ask_unless_gone(self, growing, nullcontext()),
        )
        self.backward_updates = BackwardUpdates(setup, self.trained, manager)
        early = self.backward_updates.follow() if self.may_be_early else NoEarlyUpdates()
        events = StepEvents(
            before_use=unless_gone(self._before_use, None),
            before_load=setup.saver.finish,
            backward_begins=unless_gone(self._backward_begins, None),
            backward_ended=ask_unless_gone(self, lambda paged: paged.fitting.meter.rests(), None),
            forward_ended=unless_gone(self._forward_ended, None),
            spare=ask_unless_gone(self, lambda paged: paged.hbm.room.spare(), 0),
            resume=ask_unless_gone(self, lambda paged: paged.hbm.room.resume(), None),
        )
        self.runtime = runtime = make_runtime(setup, self.trained, manager, events, early)
        self.activations = make_activations(setup, runtime.saved, runtime.enter, runtime.leave)
        self.hbm = hbm = HbmDivision(setup, self.trained, self.manager, runtime, self.activations)
        self.frames, self.fitting = hbm.room.frames, hbm.fitting
        self._ahead = ReadAhead(setup.store.pool, setup.budget)

    # -- attaching -------------------------------------------------------------------------------

    def attach(self) -> None:
        """Make the parameters pages, and hook the model."""
        setup = self.setup
        self.runtime.guard()
        backward = self.runtime.backward
        self.trained.hear_all(backward.gradient_arrived, backward.gradient_arriving)
        self.runtime.pages.binding.page_all()
        setup.handover.give_back_grads(self.trained.grads.take_over)
        setup.hooks.watch(
            setup.model, setup.blueprint.units, self.runtime, self.activations, self.fitting.meter
        )
        self.fitting.meter.prepared()

    def follow(self, optimizer: Optimizer) -> None:
        """Take the optimizer that the user steps: its states move with their homes."""
        self.backward_updates.optimizer = self.hbm.rehoming.optimizer = optimizer

    def detach(self) -> None:
        """Bring everything home; parameters are pages still."""
        self.setup.hooks.rest()
        self.trained.grads.reset()
        self.hbm.rehoming.passing.close()
        self.manager.close()

    def close(self) -> None:
        """Refuse graphs of the model that are left, and restore torch's own functions."""
        self.runtime.close()

    # -- a step ----------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Bring gradients and written parameters home."""
        self.runtime.quiesce()

    def divide(self, groups: Sequence[Group]) -> Division:
        """Return how HBM is divided from here on; raises OutOfMemory.

        Ranks compare what they are about to step, by an optimizer's ``groups``.
        """
        if self.setup.comm.size == 1:
            self.hbm.rehoming.passing.judge()
            return self.fitting.divide()
        for bucket in self.setup.buckets:  # others may change their shares after the roll call
            self.manager.let_write(bucket.id)
        setup, gathers = self.setup, self.setup.store.is_gathered
        self.trained.grads.check_exchanged()
        named = setup.named_params()
        facts = {**settings_of(groups), **members_of(groups, named)}
        facts.update(gradients_of(named, setup.parts))
        optimizer = self.backward_updates.optimizer
        if optimizer is not None and setup.config.updates == "step":
            facts.update(states_of(named, optimizer.known_state))
        divide = self._divide
        division = agreed_division(setup.comm, divide, setup.log, is_common=gathers, facts=facts)
        self.activations.policies.update(division.policies)
        return division

    def _divide(self) -> Division:
        """Return this rank's division; OutOfMemory also if what was sent down passed a budget."""
        refuse_excess(self.setup, self.spoil)
        return self.fitting.divide()

    def place(self, division: Division) -> None:
        """Apply a division before the updates of its step: they are made where homes are from now
        on, and states that a first step makes appear where there is room for them."""
        if not self.hbm.fits_whole(division):
            self.frames.shed()
            self.hbm.apply(division)

    def come_down(self) -> None:
        """Let homes leave HBM, but for those that the user's code holds."""
        self.hbm.rehoming.come_down()

    def seal(self) -> None:
        """The step of early updates is made."""
        self.manager.seal()
        self.runtime.early.step_ended()

    def stepped(self, updates: Iterable[Update]) -> None:
        """A step has moved versions of parameters."""
        self.runtime.pages.stepped(update.bucket.id for update in updates)

    def in_order(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Return buckets in the order in which the next forward needs them, if it is known."""
        order = self.runtime.fetches.train.order()
        return sorted(buckets, key=lambda bucket: order.get(bucket.id, len(order)))

    def announce(self, begun: Sequence[Update], updates: Sequence[Update]) -> None:
        """Announce the updates' requests to the pool; those of ``begun`` ones are known there."""
        self._ahead.announce(begun, updates)

    def let_write(self, bucket: Bucket) -> None:
        """Wait until no copy reads a home: its update may begin."""
        self.manager.let_write(bucket.id)

    def hand_over(self, bucket: Bucket, job: Job) -> None:
        """Leave a home to its update."""
        self.manager.hand_over(bucket.id, job)

    def updated(self, bucket: Bucket) -> None:
        """The update of a bucket is done."""

    def updates_done(self) -> None:
        """All updates of the step are done."""
        for bucket in self.setup.buckets:
            self.manager.home(bucket.id)
            self.trained.grads.release(bucket)

    def expect(self, visits: Iterable[Visit]) -> None:
        """Passes of the first step are known before it begins."""
        blueprint = self.setup.blueprint
        self.runtime.fetches.expect(expected(visits, blueprint.units, blueprint.needs))

    def aside(self) -> AbstractContextManager[None]:
        """Return a block whose passes are no part of a step."""
        return self.runtime.fetches.train.aside()

    def step_made(self) -> None:
        """A step is made: `border` follows."""

    @property
    def is_decided(self) -> bool:
        """Whether the next step has nothing to try, and no choice to make."""
        return self.fitting.is_decided

    def spoil(self) -> None:
        """Forget the measurements of a step that came to nothing."""
        self.fitting.spoil()

    def _before_use(self) -> None:
        """The model is called: Ctrl-C waits again, even if the user has changed that."""
        interrupts.hold(self.setup)
        self.broken.refuse()
        stepper = self.trained.stepper
        if stepper is not None and stepper.early:
            raise too_early("the model is used again")

    def _backward_begins(self) -> None:
        stepper = self.trained.stepper
        if stepper is not None:
            stepper.backward_begins()
        self.hbm.room.resume()
        self.fitting.meter.computes()
        self._ahead.backward_begins()

    def _forward_ended(self) -> None:
        """A forward of a model without an optimizer is a step."""
        if self.setup.inner is None:
            self.setup.count()
            self._take_stats()
            self.hbm.forward_ended()

    # -- between two steps -----------------------------------------------------------------------

    def border(self, division: Division) -> bool:
        """Apply a division of HBM, if it is not yet, and prefetch; returns True, to go on with
        `stay`, if all fits."""
        setup = self.setup
        setup.hooks.mend()
        self._take_stats()
        self.frames.shed()
        setup.store.pool.told = False
        if not self.activations.offloads:
            setup.offload.shrink()
        fits = self.hbm.fits_whole(division)
        stays = fits and not self.manager.arena.held  # else the next border tries again
        if stays:
            self.hbm.rehoming.lower(())
            stays = not setup.store.places.on_hbm
        if self.hbm.is_asked:  # the ranks of a tensor stay together
            row = STAYS if stays else PAGES
            told = setup.comm.everyone.agree(row, "whether parameters stay")
            if PAGES not in told:
                return True
            fits = fits and not stays
        if not fits:
            self.hbm.apply(division)
        self.hbm.begin()
        return False

    def stay(self, division: Division) -> Resident:
        """Make the homes the parameters, after all updates; returns the residence from here on."""
        setup = self.setup
        self.detach()
        for index, (bucket, segment) in enumerate(setup.blueprint.layout.home):
            home = setup.store.homes[PARAM, bucket]
            setup.parts.plain(setup.params[index], home.view(segment))
        self.hbm.room.charge(division)
        setup.log.now(What.DECISION, tier=Tier.HBM, why="everything fits: the model stays")
        if setup.has_masters:
            return Mastered(setup, self)
        for param in setup.params:  # torch steps the parameters themselves
            kept(param, setup.parts)
        return Resident(setup, self)

    def _take_stats(self) -> None:
        """Note the traffic of the step that ended."""
        counts, n_bytes = self.manager.counts, self.link.n_bytes
        self.setup.stats = stats = StepStats(Counter(n_bytes), Counter(counts))
        counts.clear()
        n_bytes.clear()
        stats.n_bytes.update(self.setup.store.pool.take_counts())

    # -- homes and frames ------------------------------------------------------------------------

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Let a state dict read and write the homes inside."""
        with self.runtime.changing(), self.runtime.state_dicts.open():
            yield

    def settle(self, bucket_id: int) -> None:
        """Bring a home up to date."""
        self.manager.flush_and_wait(bucket_id)

    def bound_at_home(self) -> Sequence[int]:
        """Return the buckets whose homes may be written unseen now."""
        return self.manager.bound_at_home()

    def update_of(self, bucket_id: int) -> Job | None:
        """Return a bucket's update that is under way, if there is one."""
        work: Job | None = self.manager.copies[bucket_id].update
        return work

    def here(self) -> set[int]:
        """Return the buckets that are on the device."""
        return set(self.manager.replicas)

    def schedule(self) -> Schedule | None:
        """Return the schedule of a step, or of the forward in use, if there is one."""
        fetches = self.runtime.fetches
        return (fetches.active if self.setup.inner is None else fetches.train).schedule

    def loaded(self) -> None:
        """Homes were written: show the new values."""
        for bucket in self.setup.buckets:
            self.manager.refresh(bucket.id)
        self.runtime.pages.stepped(bucket.id for bucket in self.setup.buckets)

    def restate(self) -> None:
        """Log the replicas in frames, for a log that begins here."""
        self.manager.arena.restate()

    def abandon(self) -> None:
        """Give up all pending work after an update has failed."""
        self.manager.abandon()


def growing(paged: Paged, n_bytes: int) -> AbstractContextManager[None]:
    """Make room on HBM for a new home, and let the caller make it inside."""
    paged.hbm.room.make_room(n_bytes)
    return paged.hbm.rehoming.growing()


def lifting(paged: Paged, n_bytes: int) -> AbstractContextManager[None]:
    """Make room on HBM for a copy of a gradient at home, inside."""
    return paged.hbm.room.lifted(n_bytes)


def make_manager(
    setup: Setup,
    link: Link,
    trained: Trained,
    *,
    next_use: Callable[[int], float],
    more: Callable[[], int],
    growing: Callable[[int], AbstractContextManager[None]],
) -> ChunkManager:
    """Return the manager of parameters; it refers to no module."""
    plan, device = setup.blueprint, setup.device
    hbm = setup.budget.divisible
    room, every = hbm.frames(0), sum(bucket.granules for bucket in plan.layout.buckets)
    decoding = plan.decoding(is_cuda=device.is_cuda)
    return ChunkManager(
        plan.layout,
        device=device,
        ledger=setup.ledger,
        link=link,
        store=setup.store,
        events=HomeEvents(
            writing=setup.saver.wait_for,
            overwriting=setup.masters.overwriting,
            written=partial(count_write, setup.params, setup.masters.reset),
            wrote=setup.masters.wrote,
            saving=setup.saver.has_yet_to_read,
            updated=trained.grads.release,
        ),
        limit=hbm.fewest_frames,
        # A CUDA arena cannot grow in place: it leaves room for activations not yet measured, and
        # holds what a graph of gradients needs at once.
        ceiling=most_frames(hbm, every) if device.is_cuda else room,
        next_use=setup.tuning.victim or next_use,
        more=more,
        growing=growing,
        workspace=None if decoding is None else Workspace.on(device, *decoding),
        comm=setup.comm,
    )


def count_write(
    params: Sequence[nn.Parameter], reset: Callable[[Segment], None], segment: Segment
) -> None:
    """A parameter was written through a state dict: its master follows, and its version tells."""
    reset(segment)
    torch.autograd.graph.increment_version(params[segment.index])


def most_frames(hbm: Hbm, every: int) -> int:
    """Return the frames of a first step: of ``every`` bucket if they leave half of HBM."""
    room = hbm.frames(0)
    return min(room, max(2 * hbm.fewest_frames, min(every, room // 2)))


def make_runtime(
    setup: Setup,
    trained: Trained,
    manager: ChunkManager,
    events: StepEvents,
    early: EarlyUpdates | NoEarlyUpdates,
) -> Runtime:
    """Return the runtime that asks for parameters; it refers to no module."""
    plan = setup.blueprint
    planned = partial(plan_for, layout=plan.layout, manager=manager, tuning=setup.tuning)
    trains = setup.inner is not None
    return Runtime(
        setup.params,
        plan.layout,
        plan.needs,
        device=setup.device,
        manager=manager,
        grads=trained.grads,
        masters=setup.masters,
        train=Cursor(partial(planned, training=trains)),
        evaluate=Cursor(partial(planned, training=False)),
        stepped=trains,
        events=events,
        early=early,
        scaling=trained.scaling,
        parts=setup.parts,
    )


def plan_for(
    trace: Trace, *, layout: Layout, manager: ChunkManager, tuning: Tuning, training: bool
) -> Schedule:
    """Plan a step, or a forward, from its trace, for the present frames."""
    limit = manager.arena.frames.limit
    shapes = {b.id: Shape(b.granules, training and b.trainable) for b in layout.buckets}
    if tuning.schedule is not None:
        return tuning.schedule(trace, shapes, limit)
    return Planner(trace, shapes, FrameMap(limit), limit, tuning.depth).build()
