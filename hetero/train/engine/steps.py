"""How a prepared model is stepped: by torch, or by updates of homes (floor 2).

[Note: where a step updates]  Paged buckets are updated at their HOST homes, resident ones where
they are. On a CPU both are the same arithmetic. On CUDA they are not known to be, so the choice is
made once, at prepare, and reported as the update place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from hetero.errors import BudgetError, StorageError, too_early
from hetero.memory.manager import PARAM
from hetero.memory.shown import refresh
from hetero.plan.division import Division
from hetero.train.engine.backward_updates import is_seen
from hetero.train.engine.paged import Paged
from hetero.train.engine.resident import Mastered, Resident
from hetero.train.engine.setup import Setup
from hetero.train.engine.step_room import (
    LOST,
    NO_ROOM,
    UNTOUCHED,
    NoStepRoom,
    StepRoom,
    no_room,
)
from hetero.train.model.parts import Parts
from hetero.train.update.arithmetic import Update
from hetero.train.update.masters import LossScaler
from hetero.train.update.optimizer import Optimizer
from hetero.train.update.rules import Group, Rule, kinds_of
from hetero.train.update.step import Stepper
from hetero.train.update.together import step_together
from hetero.train.update.whole_parts import check_placed

Clip = Callable[[], Any]
TOGETHER = "ranks have updated some of its parameters together, and failed"


class NoSteps:
    """The model is for inference."""

    scaler: LossScaler | None = None
    stepper: Stepper | None = None
    rule: Rule | None = None
    torn = ""
    """Why parameters are of two steps, if a step failed that cannot be made again."""

    def __init__(self, setup: Setup, residence: Paged | Resident) -> None:
        self.setup = setup
        self.residence = residence

    def make(self, optimizer: Optimizer, clip: Clip) -> Division | None:
        """Make a step; returns the division of HBM from here on, if there is one."""
        return None

    @property
    def skipped(self) -> bool:
        """Whether loss scaling skipped the last step; torch's steps are not scaled."""
        return False

    def follow(self, optimizer: Optimizer) -> None:
        """Let updates begin in backward; none does."""

    def take_copies(self) -> None:
        """Write home the user's writes to copies that stand for states."""
        if any(home.copies for home in self.setup.store.homes.values()):
            self.finish()
            self.setup.store.take_all()

    def finish(self) -> None:
        """Wait until every update is done; raises what one of them raised."""
        self.setup.saver.finish()
        if self.setup.store.pool.spills:  # else states are shown as they are
            self.setup.store.take_all(held=False)

    def come_home(self) -> None:
        """Finish all pending work; homes then hold the current values."""
        self.residence.quiesce()
        self.finish()

    def refuse_early(self, what: str) -> None:
        """Raise StateError while updates of a step that is not made yet have begun."""

    def void_early(self) -> bool:
        """Give up a step that will not be made; returns whether it had begun."""
        return False

    def adopt(self, param: torch.Tensor, state: dict[str, Any], group: Group) -> dict[str, Any]:
        """Return a state with torch's keys whose tensors are the homes' or copies.

        ``group`` has the settings of the parameter's group.
        """
        return {key: placed(value, param.device, group) for key, value in state.items()}


class TorchSteps(NoSteps):
    """The user's rule runs on plain parameters, as torch would run it."""

    rule: Rule

    def __init__(
        self, setup: Setup, residence: Paged | Resident, inner: torch.optim.Optimizer
    ) -> None:
        super().__init__(setup, residence)
        self.rule = Rule(inner)
        counts = setup.device.memory.allocated_bytes() is not None
        self._room = StepRoom(setup, self.rule) if counts else NoStepRoom()

    def make(self, optimizer: Optimizer, clip: Clip) -> None:
        self.setup.saver.finish()  # the save reads the very bytes that are trained
        self.take_copies()
        setup = self.setup
        if setup.parts.kinds:
            params = (param for group in optimizer.param_groups for param in group["params"])
            check_placed(self.rule, params, setup.name_of, setup.parts.is_placed)
        groups, states = optimizer.param_groups, optimizer.known_state
        try:
            with self._room.kept(groups, states):
                clip()
                self.rule.step_in_place(groups, states)
        finally:
            self.torn = self._room.torn


class HomeSteps(NoSteps):
    """Updates run on homes: closed by `make`, carried out while the next forward computes."""

    residence: Paged | Mastered
    stepper: Stepper

    def __init__(self, setup: Setup, residence: Paged | Mastered, stepper: Stepper) -> None:
        super().__init__(setup, residence)
        self.stepper = stepper
        self.rule = stepper.drafts.rule
        self.scaler = stepper.scaler
        inner = setup.inner
        self._sized_for = set(map(sizing, inner.param_groups if inner else ()))
        self._finished = True  # whether all updates that were begun were waited for
        self._begun = False  # whether those of the present step were

    @property
    def skipped(self) -> bool:
        """Whether loss scaling skipped the last step."""
        return self.stepper.skipped

    # -- a step ----------------------------------------------------------------------------------

    def make(self, optimizer: Optimizer, clip: Clip) -> Division | None:
        """Close a step and begin its updates; returns the division of HBM from here on."""
        self._begun = False
        try:
            return self._make(optimizer, clip)
        except (torch.OutOfMemoryError, BudgetError) as error:
            found = error.__cause__ if isinstance(error, BudgetError) else error
            if not isinstance(found, torch.OutOfMemoryError):
                raise
            if self._begun:
                self.torn = NO_ROOM
            raise no_room(self.setup, found, LOST if self._begun else UNTOUCHED) from error

    def _make(self, optimizer: Optimizer, clip: Clip) -> Division | None:
        residence, stepper = self.residence, self.stepper
        if residence.updates_in_place:
            self.setup.saver.finish()  # the save reads the very bytes that are trained
        self.take_copies()
        # 1. gradients and written parameters come home; norm, clip and settings are closed
        residence.quiesce()
        division = residence.divide(optimizer.param_groups)  # if it raises, nothing is updated
        new: set[str] = set()
        if isinstance(residence, Paged) and division is not None and not stepper.early:
            new = self._place(residence, division, optimizer)
        seen = self._seen(optimizer)
        updates = stepper.close(optimizer.param_groups, optimizer.known_state, clip)
        if not stepper.skipped:
            self._sized_for |= new  # their states are counted from now on
        begun = self._seal()
        # 2. versions move as they would in place
        touched = [index for update in (*begun, *updates) for index in update.touched]
        if touched:
            torch.autograd.graph.increment_version([self.setup.params[i] for i in touched])
            residence.stepped((*begun, *updates))
        # 3. homes are handed to their updates, in the order in which they are needed next
        of_bucket = {update.bucket.id: update for update in updates}
        ordered = residence.in_order(update.bucket for update in updates)
        if any(update.together for update in updates):  # ranks may expect different forwards
            ordered = sorted(ordered, key=lambda bucket: bucket.id)
        updates = [of_bucket[bucket.id] for bucket in ordered]
        residence.announce(begun, updates)
        self._hand_over_all(updates, seen, stepper.drafts.turns(optimizer.param_groups))
        if begun:
            self._hurry()
        return division

    def _place(self, residence: Paged, division: Division, optimizer: Optimizer) -> set[str]:
        """Move homes before their updates, of which none has begun. If settings ask for states for
        which HBM was not divided, homes come down, and these are made in RAM; returns such
        settings."""
        new = set(map(sizing, optimizer.param_groups)) - self._sized_for
        if new:
            residence.come_down()
        else:
            residence.place(division)
        return new

    def _hurry(self) -> None:
        """Let updates that began in the order of backward go on in that of the next forward.

        A pool keeps to the order in which requests were announced.
        """
        if not self.setup.store.pool.spills:
            order = self.residence.in_order(self.setup.buckets)
            jobs = (self.residence.update_of(bucket.id) for bucket in order)
            self.setup.worker.hurry(job for job in jobs if job is not None)

    def _hand_over_all(
        self, updates: list[Update], seen: Container[int], turn: Mapping[int, int]
    ) -> None:
        """Begin all updates, and do those of ``seen`` buckets; raise errors after that.

        ``turn``: of parameters' steps that ranks make together, by their indices.
        """
        self._finished, self._begun = False, bool(updates)
        works = [work for update in updates for work in update.together]
        works.sort(key=lambda work: turn[work.row.segment.index])
        for bucket_id in {work.bucket.id for work in works}:
            self.residence.let_write(self.setup.buckets[bucket_id])
            self.setup.saver.wait_for(bucket_id)
        if works:
            self.torn = TOGETHER  # until all are stepped
            step_together(self.setup.store, works)
            self.torn = ""
        errors: list[StorageError | KeyboardInterrupt] = []
        for update in updates:
            try:
                self._hand_over(update, seen=update.bucket.id in seen)
            except (StorageError, KeyboardInterrupt) as error:
                errors.append(error)
        if errors:
            self.setup.count()
            raise errors[0]

    def _hand_over(self, update: Update, *, seen: bool) -> None:
        """Begin a bucket's update; wait if it must be done when `step` returns."""
        bucket, store = update.bucket, self.setup.store
        after = self.setup.saver.jobs_before(bucket.id)
        at_once = seen or update.on_device
        self.residence.let_write(bucket)
        job = self.stepper.begin(update, at_once=at_once, after=after)
        self.residence.hand_over(bucket, job)
        if update.fresh or at_once:
            job.wait()
            self.setup.device.touched(update.touched_bytes)
            for name, home in store.of_bucket(bucket.id):
                home.rewritten()
                if name != PARAM:  # whose copies showed the new values as the update ended
                    refresh(home)
        self.residence.updated(bucket)

    def _seen(self, optimizer: Optimizer) -> set[int]:
        """Return the buckets whose updates the user's code would see."""
        buckets = self.setup.buckets
        if self.residence.updates_in_place or self.setup.tuning.update_on_device:
            return {bucket.id for bucket in buckets}
        self.stepper.finish()  # its updates' references to states look like a user's
        return {b.id for b in buckets if b.trainable and is_seen(self.setup, b, optimizer)}

    def follow(self, optimizer: Optimizer) -> None:
        if isinstance(self.residence, Paged):
            self.residence.follow(optimizer)

    def _seal(self) -> list[Update]:
        """The step is made: return its updates that began early."""
        self.residence.seal()
        return self.stepper.seal()

    def void_early(self) -> bool:
        began = bool(self.stepper.early)
        if began:
            self._seal()
        return began

    def refuse_early(self, what: str) -> None:
        if self.stepper.early:
            raise too_early(what)

    # -- pending work ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until every update is done, at no cost if all are; raises an error of theirs."""
        self.setup.saver.finish()  # the caller may write to states: let a save read them first
        if not self._finished:
            self.stepper.finish()
            self.residence.updates_done()
            self._finished = True
        super().finish()

    def come_home(self) -> None:
        if self.stepper.surfaced:
            self.setup.worker.close()  # an update failed, as was reported: give back the rest
            self.residence.trained.grads.abandon()
            self.residence.abandon()
        else:
            super().come_home()

    def adopt(self, param: torch.Tensor, state: dict[str, Any], group: Group) -> dict[str, Any]:
        parts = self.setup.parts
        if parts.inside(param) is not None:
            state = {k: own_state(parts, param, v) for k, v in state.items()}
        return self.stepper.drafts.states.adopt(self.setup.segment(param), state, own=True)


def sizing(group: Group) -> str:
    """Return the part of settings that decides which states there are. A learning rate does not: a
    schedule may begin at 0."""
    return kinds_of({key: value for key, value in group.items() if key != "lr"})


def own_state(parts: Parts, param: torch.Tensor, value: Any) -> Any:
    """Return what a state of a parameter that is a part has inside; numbers are as they are."""
    is_number = not isinstance(value, torch.Tensor) or value.dim() == 0
    return value if is_number else parts.value(param, value)


def placed(value: Any, place: torch.device, group: Group) -> Any:
    """Return a state's value as torch keeps it for a parameter on ``place``.

    Numbers lie there only if the group's settings ask for kernels that read them there.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and not (group.get("fused") or group.get("capturable")):
        return value.detach().clone()
    return value.detach().to(place, copy=True)
