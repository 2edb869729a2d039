"""The access of backward, and views of parameters saved by graphs (floor 2)."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.device import Device
from hetero.errors import StateError
from hetero.events import EventLog, What
from hetero.internals import (
    NO_TASK,
    RUN_BACKWARD,
    Replacement,
    at_end_of_backward,
    graph_task,
)
from hetero.memory.layout import Layout
from hetero.modes import refuse_backward
from hetero.train.access.early import EarlyUpdates, NoEarlyUpdates
from hetero.train.access.fetches import Fetches
from hetero.train.access.pages import ParameterPages
from hetero.train.activations.held import CHANGED, GraphFootprint
from hetero.train.activations.saved import SavedView
from hetero.train.gradients.store import GradStore
from hetero.types import Kind, Phase, Tier, noop

WHY = {phase: phase.value for phase in Phase}  # `phase.value` costs two calls
NAMES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.EVAL: "eval"}
_offset_of = attrgetter("offset")


class Caller(NamedTuple):
    """Who waits for a backward pass."""

    thread: int
    task: int
    """The graph task of the pass that makes this one; NO_TASK outside of one."""
    accumulates: bool
    """Whether leaves get gradients, as by `backward`; `torch.autograd.grad` returns them."""


_callers: list[Caller] = []  # of torch's backward, which wait


def _noted(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's backward, which notes who waits for it."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        accumulates = kwargs.get("accumulate_grad", True)
        caller = Caller(threading.get_ident(), graph_task(), accumulates)
        _callers.append(caller)
        try:
            return run(*args, **kwargs)
        finally:
            _callers.remove(caller)

    return noted


PASSES: tuple[Replacement, ...] = (RUN_BACKWARD.replaced(_noted),)
"""Replaced functions of torch while threads, and passes inside of passes, are told apart."""


class Accessed(NamedTuple):
    """An open access, for the event log."""

    unit: int
    seq: int
    began: float
    range_: object | None
    """Of the vendor's profiler."""


class AccessLog:
    """Writes accesses and phases to the event log and the vendor's profiler."""

    def __init__(
        self,
        layout: Layout,
        needs: Sequence[tuple[int, ...]],
        *,
        device: Device,
        log: EventLog,
        footprint: GraphFootprint,
    ) -> None:
        self._device = device
        self._log = log
        self._footprint = footprint
        self._names = layout.unit_names
        self._needs_bytes = [sum(layout.buckets[b].n_bytes for b in needed) for needed in needs]

    def begin(self, unit: int) -> Accessed:
        log = self._log
        range_ = self._device.annotate(self._names[unit]) if log.annotates else None
        return Accessed(unit, log.begin_access(), log.clock(), range_)

    def end(self, accessed: Accessed) -> None:
        unit, seq, began, range_ = accessed
        self._log.end_access(seq, began, unit, self._needs_bytes[unit])
        held = self._footprint.live_bytes
        self._log.now(What.LIVE, tier=Tier.HBM, category=Kind.ACTIVATION, n_bytes=held, unit=unit)
        if range_ is not None:
            self._device.end_annotation(range_)

    def begin_phase(self, phase: Phase) -> float:
        """Begin a phase of the step; return the time."""
        self._log.phase = NAMES[phase]
        return self._log.clock()

    def end_phase(self, began: float) -> None:
        log = self._log
        log.add(What.PHASE, began, log.clock(), why=log.phase)
        log.phase = "between"


class Pass:
    """A backward pass through the model that was heard of."""

    def __init__(self, task: int, *, brings: bool) -> None:
        self.task = task
        """Its graph task."""
        self.brings = brings
        """Whether gradients come in it; inside of another one, whether one has come."""
        self.ending: Callable[[], Ending | None] = noop
        """Gives what is called at its end, until that, or until it fails."""

    @property
    def has_failed(self) -> bool:
        return self.ending() is None


class Ending:
    """What autograd calls at the end of a pass, and drops if the pass fails."""

    __slots__ = ("__weakref__", "_end", "_of")

    def __init__(self, of: Pass, end: Callable[[Pass], None]) -> None:
        self._of = of
        self._end = end

    def __call__(self) -> None:
        self._end(self._of)


class BackwardAccess:
    """The access of the unit that backward has reached; at most one is open.

    It opens when a saved weight is unpacked, and closes when another unit's is or the pass ends.

    [Note: passes inside of a pass]  A reentrant checkpoint, and each slice of ``micro_batch=``,
    runs a backward pass inside of another, whose gradients go on arriving: it is a part of that
    one. Gradients that come in it are complete when it ends, and the same parameters may get more
    in the next one: ranks exchange them then. One that brings none to parameters, as a slice's or
    any by `torch.autograd.grad`, leaves nothing to exchange.

    Args:
        begins: called when a backward pass reaches the model, inside of no other one.
        ended: called when it is over.
    """

    def __init__(
        self,
        needs: Sequence[tuple[int, ...]],
        *,
        device: Device,
        pages: ParameterPages,
        fetches: Fetches,
        accesses: AccessLog,
        grads: GradStore,
        early: EarlyUpdates | NoEarlyUpdates,
        begins: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.task = NO_TASK
        """The graph task of the current pass through this model, the innermost."""
        self.buckets: tuple[int, ...] = ()
        """The buckets that the open access has pinned."""
        self._needs = needs
        self._device = device
        self._pages = pages
        self._fetches = fetches
        self._accesses = accesses
        self._grads = grads
        self._early = early
        self._begins = begins
        self._ended = ended
        self._accessed: Accessed | None = None
        self._passes: list[Pass] = []  # that run, each inside of the one before
        self._began = 0.0

    @property
    def is_anothers(self) -> bool:
        """Whether another thread has begun a pass through this model that runs and has not failed.

        Of one that failed, autograd's threads may let go after its caller has gone on.
        """
        here = threading.get_ident()
        is_under_way = bool(self._passes) and not self._passes[0].has_failed
        return is_under_way and any(caller.thread != here for caller in _callers)

    def touch(self, bucket: int) -> None:
        """Backward needs a bucket: move the access to its unit."""
        self._device.in_order()
        if bucket in self.buckets:
            return
        self.hear_of_pass()
        self._grads.flush_pending()
        self._close()
        unit = self._pages.layout.buckets[bucket].unit
        self._early.reached(unit)
        buckets = self._needs[unit] if bucket in self._needs[unit] else (bucket,)
        accessed = self._accesses.begin(unit)
        self._fetches.pin(buckets, WHY[Phase.BACKWARD])
        self.buckets, self._accessed = buckets, accessed
        self._fetches.follow(Phase.BACKWARD, unit, buckets)

    def gradient_arrived(self, param: nn.Parameter) -> None:
        """Note a complete gradient; its flush starts at the next event."""
        self._hear_of_gradient()
        self._grads.arrived(param)

    def gradient_assigned(self, param: nn.Parameter, *, adds: bool) -> None:
        """Note a gradient that code has set; ``adds``: as autograd does."""
        self._hear_of_gradient()
        self._grads.assigned(param, adds=adds)

    def gradient_arriving(self, index: int) -> None:
        """Autograd is about to add to a gradient."""
        self._hear_of_gradient()
        self._grads.arriving(index)

    def _hear_of_gradient(self) -> None:
        self.hear_of_pass()
        if self._passes:
            self._passes[-1].brings = True

    def hear_of_pass(self) -> None:
        """Note the running backward pass, and be called when it ends."""
        task = graph_task()
        if task in (NO_TASK, self.task):
            return
        self._leave_failed(task)
        if task == self.task:
            return
        self._device.refuse_capture()
        refuse_backward()
        is_outermost = not self._passes
        accumulates = not _callers or any(caller.accumulates for caller in _callers)
        heard = Pass(task, brings=is_outermost and accumulates)
        ending = Ending(heard, self._end)
        heard.ending = weakref.ref(ending)
        at_end_of_backward(ending)
        self._keep([*self._passes, heard])
        if is_outermost:
            self._began = self._accesses.begin_phase(Phase.BACKWARD)
            self._begins()

    def settle(self) -> None:
        """Close the access: its unit is done, or an error ended the pass."""
        if self._accessed is not None:
            self._close()
        if graph_task() == NO_TASK and self._passes:
            self._keep([])
            self._grads.pass_failed()

    def _leave_failed(self, task: int) -> None:
        """Forget the passes that neither are the running one nor are around it: they have raised.

        Of one inside of another, whose code caught that, what came stays, as in torch.
        """
        around = {task, *(caller.task for caller in _callers)}
        if self._passes and self._passes[0].task not in around:
            self._grads.pass_failed()
        self._keep([each for each in self._passes if each.task in around])

    def _keep(self, passes: list[Pass]) -> None:
        self._passes = passes
        self.task = passes[-1].task if passes else NO_TASK

    def _end(self, ended: Pass) -> None:
        self._keep([each for each in self._passes if each is not ended])
        self._close()
        self._grads.flush_pending()
        if ended.brings:
            self._grads.pass_ended()
        if not self._passes:
            self._early.pass_ended()
            self._accesses.end_phase(self._began)
            self._ended()

    def _close(self) -> None:
        accessed, buckets = self._accessed, self.buckets
        if accessed is not None:
            self._accessed, self.buckets = None, ()
            self._pages.manager.unpin(buckets)
            self._accesses.end(accessed)


class SavedViews:
    """Turns tensors that graphs save into locations in parameters, and back."""

    def __init__(self, pages: ParameterPages, fetches: Fetches, backward: BackwardAccess) -> None:
        self.closed = False
        self.n_located = 0
        self._pages = pages
        self._by_storage = pages.manager.arena.by_storage
        self._fetches = fetches
        self._backward = backward
        self._version_of = pages.binding.version_of

    def locate(self, tensor: torch.Tensor, cdata: int) -> SavedView | None:
        """Return the position of a tensor in a parameter's frame or placeholder (see saved.py).

        Called where no parameter faults.
        """
        binding = self._pages.binding
        replica = self._by_storage.get(cdata)
        if replica is None and cdata not in binding.by_placeholder:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None  # a location has no such bit: its storage is a lease
        if replica is None:
            self.n_located += 1
            index = binding.by_placeholder[cdata]
            spec = self._pages.layout.home[index][1].spec
            return SavedView(
                index, 0, spec.shape, spec.stride, self._version_of(binding.params[index])
            )
        if tensor.dtype is not replica.bucket.dtype:
            return None  # a view under another dtype: its storage is a lease
        offset, segments = int(tensor.storage_offset()), replica.bucket.segments
        segment = segments[bisect_right(segments, offset, key=_offset_of) - 1]
        then = self._version_of(binding.params[segment.index])
        at = offset - segment.offset
        self.n_located += 1
        return SavedView(segment.index, at, tuple(tensor.size()), tensor.stride(), then)

    def resolve(self, saved: SavedView) -> torch.Tensor:
        """Return a saved view of a parameter; in backward this opens an access."""
        if self.closed:
            raise StateError(
                "this graph was made before hetero.release; the frames it refers to are gone",
                advice="run backward before releasing the model",
            )
        bucket, segment = self._pages.layout.home[saved.param]
        now = self._version_of(self._pages.binding.params[saved.param])
        if now != saved.version:
            what = f"parameter {segment.spec.name!r} of shape {list(segment.spec.shape)}"
            raise RuntimeError(CHANGED.format(what=what, now=now, then=saved.version))
        if graph_task() != NO_TASK:
            self._backward.touch(bucket)
            return self._view(bucket, segment.offset, saved)
        self._fetches.pin((bucket,), "saved", in_frames=True)
        view = self._view(bucket, segment.offset, saved)
        self._pages.manager.unpin((bucket,))
        return view

    def _view(self, bucket: int, offset: int, saved: SavedView) -> torch.Tensor:
        flat = self._pages.manager.replicas[bucket].flat
        return torch.as_strided(flat, saved.size, saved.stride, offset + saved.offset)
