"""The runtime: serves the model's accesses from memory, along the plan (floor 2).

An access of a unit is the hot path of the library: fetch on demand first (correctness), then look
ahead (speed). Accesses of forward nest with module calls; those of backward follow each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetero.device import Device
from hetero.errors import StateError
from hetero.functional.head import has_memory
from hetero.internals import NO_TASK, graph_task, install, is_faking, tree_iter
from hetero.memory.layout import Layout
from hetero.memory.manager import ANY, ChunkManager, Positions
from hetero.modes import in_own_mode, own_mode
from hetero.train.access.backward import (
    PASSES,
    WHY,
    Accessed,
    AccessLog,
    BackwardAccess,
    SavedViews,
)
from hetero.train.access.cursor import Cursor
from hetero.train.access.early import EarlyUpdates, NoEarlyUpdates
from hetero.train.access.fetches import Fetches
from hetero.train.access.home_view import StateDictView
from hetero.train.access.page_faults import PageFaults
from hetero.train.access.pages import ParameterPages
from hetero.train.access.step_events import StepEvents
from hetero.train.activations.caches import is_cache
from hetero.train.activations.held import GraphFootprint
from hetero.train.activations.meter import GUARDS as METERING
from hetero.train.activations.meter import __name__ as METER
from hetero.train.activations.saved import GUARDS as SAVING
from hetero.train.activations.saved import SavedTensors, inside_foreign_hooks
from hetero.train.gradients.store import GradStore
from hetero.train.model import faults
from hetero.train.model.parts import Parts
from hetero.train.update.masters import Masters, Scaling
from hetero.types import Phase, noop


class Runtime:
    """Pins the buckets of each access, binds their parameters and issues the planned ops.

    Args:
        params: plain, with their values at home; `Binding.page_all` makes them pages.
        needs: the buckets of each unit.
        train, evaluate: cursors of forwards with and without gradients.
        stepped: whether an optimizer's step ends a trace.
        scaling: of the loss, under precision="fp16".
        parts: what parameters have inside.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        needs: Sequence[tuple[int, ...]],
        *,
        device: Device,
        manager: ChunkManager,
        grads: GradStore,
        masters: Masters,
        train: Cursor,
        evaluate: Cursor,
        stepped: bool,
        events: StepEvents,
        early: EarlyUpdates | NoEarlyUpdates,
        scaling: Scaling | None,
        parts: Parts,
    ) -> None:
        self.unguard: Callable[[], object] = noop
        """Removes our guards from torch's functions."""
        self.needs = needs
        self._device = device
        self.early = early
        self.events = events
        self.fetches = Fetches(manager, train=train, evaluate=evaluate, stepped=stepped)
        place = device.torch_device
        shared = layout.is_shared
        owner = PageFaults(self, place=place, scaling=scaling, parts=parts, is_shared=shared)
        binding = parts.bind_to(params, layout, place, owner)
        self.pages = ParameterPages(layout, manager=manager, masters=masters, binding=binding)
        self.state_dicts = StateDictView(self.pages, parts, before_write=events.before_load)
        footprint = GraphFootprint()
        self.accesses = AccessLog(
            layout, needs, device=device, log=manager.log, footprint=footprint
        )
        self.backward = BackwardAccess(
            needs,
            device=device,
            pages=self.pages,
            fetches=self.fetches,
            accesses=self.accesses,
            grads=grads,
            early=early,
            begins=events.backward_begins,
            ended=events.backward_ended,
        )
        self.views = SavedViews(self.pages, self.fetches, self.backward)
        self.saved = SavedTensors(self.views, footprint, parts)
        self._grads = grads
        self._entered: list[Accessed] = []  # open accesses, which nest
        self._calls: list[Phase] = []  # open calls of the whole model, which nest
        self._began = 0.0  # when the outermost call began
        self._open: list[int] = []  # threads of open calls and accesses, which nest
        self._busy = 0  # the thread that opens or closes one now, so often:
        self._n_busy = 0

    def _claim(self, task: int) -> None:
        """Refuse a thread while another one uses the model. One that comes while the other waits
        for it nests in it; one of backward's works for the thread that waits for that."""
        here = threading.get_ident()
        is_between = bool(self._open) and self._open[-1] != here and here in self._open
        is_late = task == NO_TASK and self.backward.is_anothers and not self._open
        if (self._n_busy and self._busy != here) or (task == NO_TASK and is_between) or is_late:
            raise StateError(
                "two threads use the model at the same time",
                advice="let one thread at a time call it, or read its weights: a lock around such"
                " calls, or a queue to one thread",
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep other threads out while this one opens a call or an access, or changes what is
        resident. Every use of the model but a backward pass begins here, so a capture is refused
        here, before anything is queued in it."""
        self._device.refuse_capture()
        self._claim(graph_task())
        self._busy = threading.get_ident()
        self._n_busy += 1
        try:
            with own_mode():
                yield
        finally:
            self._n_busy -= 1

    def _opened(self) -> None:
        self._open.append(threading.get_ident())

    def _closed(self) -> None:
        here = threading.get_ident()
        for at in reversed(range(len(self._open))):
            if self._open[at] == here:
                del self._open[at]
                return

    @property
    def is_running(self) -> bool:
        """Whether the model is inside its forward or a backward pass through it."""
        return self._is_running(graph_task())

    @property
    def evaluates(self) -> bool:
        """Whether a forward of a model that is not trained runs: it is a step of its own."""
        return not self.fetches.stepped and bool(self._calls)

    def guard(self) -> None:
        """Let torch's functions ask us first, until `close`, or until this object is gone."""
        faults.guard_compiler()
        faults.guard_compiler(METER)  # it would compile our counting, again and again
        undo = install((*faults.GUARDS, *SAVING, *METERING, *PASSES))
        self.unguard = finalizer = weakref.finalize(self, undo)
        finalizer.atexit = False

    def close(self) -> None:
        """Refuse graphs that refer to frames from now on, and remove our guards from torch."""
        self.views.closed = True
        self.unguard()

    def enter(self, unit: int, *, tries: bool = False) -> bool:
        """Begin a unit's forward: pin, bind, look ahead. Return whether hooks were pushed.

        ``tries``: no backward follows.
        """
        faults.refuse_transforms()
        with self.changing():
            pushed = self._enter(unit, self.needs[unit], graph_task(), tries=tries)
            self._opened()
        return pushed

    def _enter(self, unit: int, buckets: tuple[int, ...], task: int, *, tries: bool) -> bool:
        if task == NO_TASK or self.backward.buckets != buckets:
            self.backward.settle()
        # Otherwise backward is recomputing this very unit, and autograd already holds an unpacked
        # weight of it: keep that pin.
        if task != NO_TASK and torch.is_grad_enabled():
            self.backward.hear_of_pass()  # before one inside of it, see [Note: passes inside ...]
        self._grads.flush_pending()
        if not self._is_running(task):
            self.events.resume()
        phase = self._phase(task)
        if phase is Phase.FORWARD and not tries:
            self.early.entered(unit)
        elif phase is Phase.BACKWARD:
            self.early.reached(unit)
        accessed = self.accesses.begin(unit)
        self.fetches.pin(buckets, WHY[phase])
        self.pages.bind(buckets)
        try:
            self.fetches.follow(phase, unit, buckets, self._calls)
            pushed = self.saved.push_where_differentiated()
        except BaseException:
            self.pages.unbind(buckets)
            raise
        self._entered.append(accessed)
        return pushed

    @in_own_mode
    def leave(self, unit: int, pushed: bool) -> None:
        self._closed()
        if pushed:
            self.saved.pop()
        self.pages.unbind(self.needs[unit])
        self.pages.manager.settle()
        self.accesses.end(self._entered.pop())

    def enter_model(self) -> bool:
        """Begin a call of the whole model: choose the phase, pack tensors saved between units."""
        with self.changing():
            pushed = self._enter_model()
            self._opened()
        return pushed

    def _enter_model(self) -> bool:
        self.events.before_use()
        faults.refuse_transforms()
        self.backward.settle()
        task = graph_task()
        if not self._is_running(task):
            self.events.resume()
        phase = self._phase(task)
        if not self._calls:
            if self.fetches.is_step(phase):
                self.fetches.forward_begins(phase)
            self._began = self.accesses.begin_phase(phase)
        self._calls.append(phase)
        return self.saved.push_where_differentiated()

    @in_own_mode
    def leave_model(self, output: object, *, pushed: bool) -> None:
        self._closed()
        if not is_faking():
            n_bytes = sum(t.nbytes for t in tree_iter(output, is_leaf=is_cache) if has_memory(t))
            self.saved.footprint.output_bytes = max(self.saved.footprint.output_bytes, n_bytes)
        if pushed:
            self.saved.pop()
        phase = self._calls.pop() if self._calls else Phase.FORWARD
        if not self._calls:
            self.accesses.end_phase(self._began)
            if self.fetches.is_step(phase):
                self.events.forward_ended()

    @contextmanager
    def lend(self, buckets: Sequence[int], why: str, only: Positions = ANY) -> Iterator[None]:
        """Hold buckets and bind their parameters inside a block. ``only``: those, by bucket, whose
        memory the block's code may keep."""
        with self.changing():
            self.fetches.pin(buckets, why, self._spare, in_frames=True)  # they may be written
            self.pages.bind(buckets)
            self._opened()
        try:
            yield
        finally:
            with own_mode():
                self._closed()
                self.pages.unbind(buckets, only)
                self.pages.watch(buckets, only)

    def call_with(
        self,
        buckets: Sequence[int],
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        only: Positions = ANY,
    ) -> Any:
        """Call a function on parameters of buckets, in an access of its own."""
        phase = self._phase(graph_task())
        if phase is Phase.BACKWARD:  # unpin the previous unit: backward has reached this one
            self.backward.touch(buckets[0])
        with self.lend(buckets, "fault", only):
            with own_mode():
                for bucket in buckets:
                    unit = self.pages.layout.buckets[bucket].unit
                    self.fetches.follow(phase, unit, (bucket,), self._calls)
            pushed = not inside_foreign_hooks() and self.saved.push_where_differentiated()
            try:
                found = func(*args, **kwargs)
            finally:
                if pushed:
                    self.saved.pop()
        with own_mode():
            self.pages.manager.settle()
        return found

    def quiesce(self) -> None:
        """Bring every gradient and every written parameter home (before a step or a read)."""
        with self.changing():
            self.backward.settle()
            self._grads.flush_pending()
            self.pages.flush()

    def _spare(self) -> int:
        computes = self._calls or self._entered or graph_task() != NO_TASK
        return 0 if computes else self.events.spare()

    def _is_running(self, task: int) -> bool:
        return bool(self._calls) if task == NO_TASK else task == self.backward.task

    def _phase(self, task: int) -> Phase:
        if task != NO_TASK:
            return Phase.BACKWARD
        if self._calls:
            return self._calls[-1]
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL
