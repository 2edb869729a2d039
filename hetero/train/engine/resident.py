"""The residence of a model whose parameters stay where they compute (floor 2).

Its homes are the parameters themselves. Without masters torch steps them; with masters, homes are
updated as those of pages are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from hetero.device import CpuDevice
from hetero.jobs import Job
from hetero.memory.layout import Bucket
from hetero.memory.link import Link
from hetero.train.access.expected import Visit
from hetero.train.access.hooks import before_node
from hetero.train.activations.allocator import AllocatedBytes, DeviceBytes
from hetero.train.activations.policy import ActivationPolicies, Enter
from hetero.train.activations.saved import NoViews, SavedTensors
from hetero.train.engine.foresight import Foresight, NoForesight
from hetero.train.engine.setup import Setup
from hetero.train.engine.trained import Trained
from hetero.train.engine.written import WrittenWeights
from hetero.train.update.arithmetic import Update
from hetero.train.update.rules import Group


def make_activations(
    setup: Setup,
    saved: SavedTensors,
    enter: Enter,
    leave: Callable[[int, bool], None],
) -> ActivationPolicies:
    """Return the policies of units' activations."""
    saved.lower(setup.offload)
    return ActivationPolicies(
        setup.blueprint.units,
        setup.config.activations,
        setup.config.micro_batch,
        place=setup.device.torch_device,
        saved=saved,
        offload=setup.offload,
        enter=enter,
        leave=leave,
        before_node=before_node,
        trains=setup.inner is not None,
        meets=setup.comm.n_context > 1,
        gathers=setup.store.is_gathered,
        slices=setup.tuning.slices,
    )


def refuse_excess(setup: Setup, spoil: Callable[[], None]) -> None:
    """Raise OutOfMemory if offloaded activations passed a budget; ``spoil`` forgets the step."""
    error = setup.offload.store.refusal()
    if error is not None:
        spoil()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and the program's, with its tensors


class Before(Protocol):
    """The residence that a model had while it was paged, until everything fitted."""

    activations: ActivationPolicies
    trained: Trained

    def close(self) -> None:
        """Refuse graphs of the model that are left."""


class Resident:
    """Parameters are plain, and torch steps them."""

    name = "resident"
    updates_in_place = True
    trained: Trained | None = None

    def __init__(self, setup: Setup, before: Before | None = None) -> None:
        self.setup = setup
        self.before = before
        self._saved = SavedTensors(NoViews(), parts=setup.parts)
        self.activations = make_activations(setup, self._saved, _enters, _leaves)
        self.foresight = foresight_for(setup, self.activations, self._saved)
        if before is not None:
            self.activations.policies.update(before.activations.policies)
            self.activations.proofs.adopt(before.activations.proofs)

    def attach(self) -> None:
        """Apply the policies of units' activations."""
        setup = self.setup
        setup.handover.give_back_grads()
        if self.activations.shapes:
            setup.hooks.shape(setup.model, setup.blueprint.units, self.activations)
        if self.activations.offloads:
            setup.hooks.save_through(setup.model, self._saved)
        self.foresight.attach()

    def detach(self) -> None:
        """Stop taking gradients and writes."""

    def close(self) -> None:
        """Refuse graphs that are left of the time when the model was paged."""
        self.foresight.close()
        if self.before is not None:
            self.before.close()

    # -- a step ----------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Bring gradients home, and note writes to parameters."""

    def bound_at_home(self) -> Sequence[int]:
        """Return none: all of them may be."""
        return ()

    def divide(self, groups: Sequence[Group]) -> None:
        """HBM is not divided: everything fits."""

    def seal(self) -> None:
        """The step of early updates is made; there are none."""

    def stepped(self, updates: Iterable[Update]) -> None:
        """A step has moved versions of parameters."""

    def announce(self, begun: Sequence[Update], updates: Sequence[Update]) -> None:
        """Announce requests of updates; no home lies on disk."""

    def in_order(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Return buckets as they come: nothing is fetched."""
        return list(buckets)

    def let_write(self, bucket: Bucket) -> None:
        """Wait until no copy reads a home; none does."""

    def hand_over(self, bucket: Bucket, job: Job) -> None:
        """Leave a home to its update."""

    def updated(self, bucket: Bucket) -> None:
        """The update of a bucket is done."""

    def updates_done(self) -> None:
        """All updates of the step are done."""

    def expect(self, visits: Iterable[Visit]) -> None:
        """Passes of the first step are known; nothing is fetched for them."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a block whose passes are no part of a step."""
        return nullcontext()

    def step_made(self) -> None:
        """A step is made: what it took is known."""
        self.foresight.step_made()

    @property
    def is_decided(self) -> bool:
        """Whether the next step has nothing to try, and no choice to make."""
        return self.foresight.is_decided

    def spoil(self) -> None:
        """Forget the measurements of a step that came to nothing."""

    # -- homes and frames ------------------------------------------------------------------------

    def at_home(self) -> AbstractContextManager[Any]:
        """Let a state dict read and write the homes inside."""
        return nullcontext()

    def settle(self, bucket_id: int) -> None:
        """Bring a home up to date; it is the parameter itself."""

    def update_of(self, bucket_id: int) -> Job | None:
        """Return a bucket's update that is under way; none outlasts its step."""
        return None

    def here(self) -> set[int]:
        """Return the buckets that are on the device."""
        return {bucket.id for bucket in self.setup.buckets}

    def schedule(self) -> None:
        """Return the schedule: nothing moves."""

    def loaded(self) -> None:
        """Homes were written: show the new values; homes are the parameters themselves."""

    def restate(self) -> None:
        """Log the replicas in frames; there are none."""

    def abandon(self) -> None:
        """Give up all pending work after an update has failed."""


class Mastered(Resident):
    """Parameters are working weights, whose masters are updated where they are."""

    trained: Trained

    def __init__(self, setup: Setup, before: Before | None = None) -> None:
        super().__init__(setup, before)
        # everything is in one memory
        place = CpuDevice(setup.device.torch_device, setup.device.clock)
        self.trained = trained = (
            Trained.on(setup, place, Link(place, setup.log), early=False)
            if before is None
            else before.trained
        )
        self.weights = WrittenWeights(
            setup.params,
            setup.blueprint.layout,
            setup.masters,
            trained.grads,
            trained.scaling,
            setup.parts,
        )

    def attach(self) -> None:
        trained = self.trained
        self.setup.handover.give_back_grads(trained.grads.take_over)
        trained.hear_all(self.weights.gradient_arrived, trained.grads.arriving)
        self.weights.attach()
        super().attach()

    def quiesce(self) -> None:
        self.weights.quiesce()

    def updated(self, bucket: Bucket) -> None:
        self.weights.updated(bucket)
        self.trained.grads.release(bucket)

    def updates_done(self) -> None:
        for bucket in self.setup.buckets:
            self.trained.grads.release(bucket)

    def loaded(self) -> None:
        for bucket in self.setup.buckets:
            self.weights.updated(bucket)

    def at_home(self) -> AbstractContextManager[Any]:
        return self.weights.at_home()


def foresight_for(
    setup: Setup, activations: ActivationPolicies, saved: SavedTensors
) -> Foresight | NoForesight:
    """Return what watches a model that stays, if anything counts the bytes of its device."""
    counted: DeviceBytes | None = setup.tuning.counted
    if counted is None and setup.device.memory.allocated_bytes() is not None:
        counted = AllocatedBytes(setup.device)
    return NoForesight() if counted is None else Foresight(setup, activations, saved, counted)


def _enters(unit: int, *, tries: bool = False) -> bool:
    return False


def _leaves(unit: int, pushed: bool) -> None: ...
