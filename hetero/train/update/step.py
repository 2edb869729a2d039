"""Closing steps, and carrying them out while the next forward computes (floor 2).

`close` does what makes a step exact: gradients home, norm, clip, finiteness, and the settings of
the groups as they are now. The rest is work on homes, one job a bucket, for the worker. An
error in one surfaces wherever a thread waits for that bucket, and in the next `close`; the jobs
after it give up with the same error, so nothing hangs. An error of a disk is not the end: the step
stays pending, every wait tries again, and no reader sees parameters of two steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from hetero.errors import StorageError, too_early
from hetero.events import EventLog, What
from hetero.jobs import Job, Portable, Slice, Worker
from hetero.memory.layout import Bucket
from hetero.train.gradients.clip import norms_of
from hetero.train.gradients.slot import GradSlot, NormWay
from hetero.train.gradients.store import GradStore, LossScaling
from hetero.train.update.arithmetic import Update
from hetero.train.update.draft import Drafts, Settings
from hetero.train.update.masters import LossScaler
from hetero.train.update.pace import UpdatePace
from hetero.train.update.rules import Group, State, same
from hetero.types import Lane

FINITE = b"+"


class Early(NamedTuple):
    """A bucket's update that was begun before its step (see [Note: early updates])."""

    update: Update
    job: Job
    slots: tuple[GradSlot, ...]
    """The gradients that it reads."""
    settings: Mapping[int, Settings]
    """By which it computes, by the parameters' indices."""


class Stepper:
    """The steps of one prepared model and its optimizer."""

    def __init__(
        self,
        drafts: Drafts,
        grads: GradStore,
        worker: Worker,
        *,
        log: EventLog,
        scaler: LossScaler | None,
        pace: UpdatePace,
        pause: Slice | None = None,
    ) -> None:
        self._log = log
        self.drafts = drafts
        self.scaler = scaler
        self.skipped = False
        self.surfaced = False  # whether the caller was told of an update that failed
        self._grads = grads
        self._worker = worker
        self._pause = pause
        self._jobs: list[Job] = []
        self.pace = pace
        self.early: dict[int, Early] = {}  # by bucket: updates of the step that is not made yet
        self._settings: dict[int, Settings] | None = None  # of groups, at the first of them
        self._failed: BaseException | None = None
        if scaler is not None:
            grads.scaling, grads.norm_way = LossScaling(is_required=True), NormWay(2.0)

    @property
    def scale(self) -> float:
        """The factor of the next loss; 1 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Run the backward pass of a loss that was multiplied by ``scale`` inside."""
        if self.scaler is None:
            yield
            return
        grads = self._grads
        around = grads.scaling
        grads.flush_pending()  # those of a pass around this one, by its own scale
        grads.take_plain()
        grads.scaling = LossScaling(1.0 / scale, is_required=True, is_under_way=True)
        try:
            yield
        finally:
            grads.flush_pending()  # the end of a pass does this, but it may have failed
            grads.scaling = around

    def close(
        self,
        groups: Sequence[Group],
        states: defaultdict[torch.Tensor, State],
        clip: Callable[[], Any] | None = None,
    ) -> list[Update]:
        """Return every bucket's update; none when loss scaling skips the step.

        Those that were begun early are under way; `seal` makes them part of the step.
        """
        self.finish()
        self._grads.finish()
        begun = self.check_early(groups)
        self.skipped = False
        if self.scaler is not None:
            norms = self._norms()
            self.skipped = not all(math.isfinite(n) for n in norms)
            if norms:
                self.scaler.update(finite=not self.skipped)
        if self.skipped:
            return []
        if clip is not None:
            clip()
        return self.drafts.close(groups, states, begun)

    def _norms(self) -> list[float]:
        """Return norms that are finite if all gradients are, on all ranks of a tensor alike."""
        grads = self._grads
        found = [param for param in grads.params if grads.parts.grad(param) is not None]
        if not grads.parts.kinds:
            return norms_of(found)
        with torch.no_grad():
            parts = grads.parts
            norms = parts.norms(found, 2.0, grads.was_cut)
            total = float(parts.total(norms, 2.0)) if found else 0.0
        # of a parameter that ranks do not divide each has a gradient of its own
        told = grads.homes.store.comm.everyone.agree(
            FINITE if math.isfinite(total) else b"", "whether gradients are finite"
        )
        return [total if all(told) else math.inf] if found else []

    def begin(self, update: Update, *, at_once: bool, after: Sequence[Job] = ()) -> Job:
        """Give a bucket's update to the worker, or make a job that its first waiter does."""
        job = self._job(update, after)
        self._grads.lend(update.bucket, job, update.scaled)
        self._jobs.append(job)
        if not (at_once or update.fresh):
            self._worker.submit(job)
        return job

    def open_early(
        self,
        bucket: Bucket,
        groups: Sequence[Group],
        states: defaultdict[torch.Tensor, State],
        before: Sequence[Job],
    ) -> Early | None:
        """Return a bucket's update that waits for ``before``; None if its step must check first."""
        if self._settings is None:
            self._settings = self.drafts.settings(groups)
        settings = self._settings
        slots = self._grads.landed(bucket)
        update = self.drafts.open(bucket, slots, settings, states) if slots else None
        if slots is None or update is None:
            return None
        job = self._job(update, before)
        self._grads.lend(bucket, job, ())
        self._grads.early.begin(bucket)
        self.early[bucket.id] = Early(update, job, tuple(slots), settings)
        return self.early[bucket.id]

    def check_early(self, groups: Sequence[Group]) -> list[int]:
        """Return the parameters whose updates were begun; StateError if the step differs by now."""
        now = self.drafts.settings(groups) if self.early else {}
        begun: list[int] = []
        for early in self.early.values():
            for slot in early.slots:
                index, name = slot.segment.index, slot.segment.spec.name
                group = now.get(index)
                if group is None or not same(group.group, early.settings[index].group):
                    raise too_early(f"settings of the group of {name!r} changed")
                if self._grads.shown(slot.segment) is not slot or slot.is_changed:
                    raise too_early(f"the gradient of {name!r} was changed or taken away")
                begun.append(index)
        return begun

    def backward_begins(self) -> None:
        """Forget the settings of a step that was skipped: this one may have others."""
        if not self.early:
            self._settings = None

    def seal(self) -> list[Update]:
        """Return the updates that were begun early: the step that they belong to is made."""
        self._settings = None
        updates = [early.update for early in self.early.values()]
        self._jobs.extend(early.job for early in self.early.values())
        self.early.clear()
        self._grads.early.seal()
        return updates

    def _job(self, update: Update, after: Sequence[Job]) -> Job:
        run = self._run
        slices = [partial(run, work) for work in update.slices]
        portable = [
            Portable(partial(run, each.here), partial(run, each.carried), each.numel)
            for each in update.portable
        ]
        finish = partial(_all, [*update.finishes, self.drafts.param(update.bucket).changes.end])
        after = [*after, *self._grads.adding(update.bucket)]
        numel = 0 if update.on_device else update.bucket.numel  # whose time is the device's
        job = self._worker.job(slices, numel, portable=portable, finish=finish, after=after)
        job.then = partial(self._note, update.bucket, numel, bool(portable))
        return job

    def _note(self, bucket: Bucket, numel: int, passes: bool, job: Job) -> None:
        if job.began is not None and job.ended is not None:
            self.pace.note(job.began, job.ended, numel, passes=passes)
            self._log.add(
                *(What.UPDATE, job.began, job.ended),
                lane=Lane.UPDATE,
                bucket=bucket.id,
                n_bytes=bucket.n_bytes,
                why="step",
            )

    def _run(self, work: Slice) -> None:
        if self._failed is not None:
            raise self._failed
        if self._pause is not None:
            self._pause()
        try:
            work()
        except (StorageError, KeyboardInterrupt):
            raise  # the step stays pending: its work is tried again
        except BaseException as error:
            self._failed = error
            raise

    def finish(self) -> None:
        """Wait for every update of the last step; raises the first error of any, ever.

        A StorageError leaves the step pending until the next call.
        """
        try:
            while self._jobs:
                if self._jobs[0].done:
                    self._jobs[0].wait()  # raises what it raised
                else:
                    with self._log.standing("update"):
                        self._jobs[0].wait()
                del self._jobs[0]
            self.pace.close()
            if self._failed is not None:
                raise self._failed
        except (StorageError, KeyboardInterrupt):
            raise
        except BaseException:
            self.surfaced = True
            raise


def _all(work: Sequence[Slice]) -> None:
    for part in work:
        part()
