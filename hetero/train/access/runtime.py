"""The runtime: where the model's accesses meet memory and plan (floor 2).

`access` is the hot path of the library: demand first (correctness), then look ahead (speed).
Forward accesses nest with module calls. In backward at most one access is open: it opens when a
saved weight is unpacked and closes when another unit's is, or when the pass ends.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.device import ALONE, Device, use_count
from hetero.errors import StateError
from hetero.events import What
from hetero.functional.head import LateLogits
from hetero.internals import NO_TASK, at_end_of_backward, graph_task, install, is_faking, tree_iter
from hetero.memory.layout import Layout, Segment
from hetero.memory.manager import ChunkManager
from hetero.plan.schedule import Op
from hetero.plan.trace import Access
from hetero.train.access.cursor import Cursor
from hetero.train.access.early import EarlyUpdates, NoEarlyUpdates
from hetero.train.activations.caches import is_cache
from hetero.train.activations.held import CHANGED
from hetero.train.activations.meter import GUARDS as METERING
from hetero.train.activations.saved import GUARDS as SAVING
from hetero.train.activations.saved import Saved, SavedTensors, foreign
from hetero.train.activations.structure import leaves_of
from hetero.train.gradients.store import GradStore
from hetero.train.model import binding, faults
from hetero.train.model.binding import Swizzle
from hetero.train.model.host_work import host_work
from hetero.train.model.lazy import HomeSlot, shown
from hetero.train.update.masters import Masters, Scaling
from hetero.types import Kind, Phase, Tier

WHY = {phase: phase.value for phase in Phase}  # asked of an enum it costs two calls
NAMES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.EVAL: "eval"}
_HOMEWARD = (torch.Tensor.detach, torch.Tensor.copy_)


class Accessed(NamedTuple):
    """An access that is under way, for the event log."""

    unit: int
    seq: int
    began: float
    range_: object | None
    """Of the vendor's profiler."""


class Open(NamedTuple):
    """The access of backward: what it has pinned."""

    buckets: tuple[int, ...]
    accessed: Accessed


class Late:
    """Planned fetches whose homes are not ready yet, in order, and the buckets that they are of."""

    def __init__(self) -> None:
        self.ops: deque[Op] = deque()
        self._of: Counter[int] = Counter()

    def __contains__(self, bucket: int) -> bool:
        return self._of.get(bucket, 0) > 0

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self._of[op.bucket] += 1

    def pop(self) -> Op:
        """Return the first, which is late no more."""
        op = self.ops.popleft()
        self._of[op.bucket] -= 1
        return op

    def clear(self) -> None:
        self.ops.clear()
        self._of.clear()


class Runtime:
    """Pins what each access needs, binds its parameters and issues the planned ops."""

    def __init__(
        self,
        layout: Layout,
        needs: Sequence[tuple[int, ...]],
        *,
        device: Device,
        manager: ChunkManager,
        grads: GradStore,
        masters: Masters,
        train: Cursor,
        evaluate: Cursor,
        stepped: bool = True,
    ) -> None:
        self.layout = layout
        self.needs = needs
        self.manager = manager
        self.grads = grads
        self._masters = masters
        self.train = train
        self.evaluate = evaluate
        self.active = train
        self.on_idle: Callable[[], None] = lambda: None
        self.before_load: Callable[[], None] = lambda: None  # a state dict replaces a value at home
        self.backward_begins: Callable[[], None] = lambda: None
        self.spare: Callable[[], int] = lambda: 0  # frames there may be besides, between steps
        self.resume: Callable[[], None] = lambda: None  # gives them back
        self.before_use: Callable[[], None] = lambda: None  # raises where the model must not be
        self.unguard: Callable[[], object] = lambda: None  # takes off what torch does otherwise
        self.swizzle: Swizzle  # set by attach: its classes fault into this runtime
        self.saved = SavedTensors(self)
        self.early: EarlyUpdates | NoEarlyUpdates = NoEarlyUpdates()
        self._device = device
        self._open: Open | None = None  # the backward access
        self._entered: list[Accessed] = []  # forward accesses, which nest
        self._log = manager.log
        self._forward_began = self._backward_began = 0.0
        self._needs_bytes = [sum(layout.buckets[b].n_bytes for b in needed) for needed in needs]
        self._graph_task = NO_TASK
        self._phases: list[Phase] = []
        self._at_home = False
        self._gathered: list[dict[int, int]] = []  # versions at the beginning of open blocks
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.closed = False
        self._stepped = stepped  # whether an optimizer's step ends a trace
        self._late = Late()
        self.scaling: Scaling | None = None  # of the loss, under precision="fp16"

    @property
    def index(self) -> dict[int, int]:
        """Position of every parameter, by its id."""
        return self.swizzle.index

    @property
    def is_running(self) -> bool:
        """Whether the model is inside its forward, or inside a backward pass through it."""
        task = graph_task()
        return bool(self._phases) if task == NO_TASK else task == self._graph_task

    @property
    def evaluates(self) -> bool:
        """Whether a forward runs that is a step of its own: this model is not trained."""
        return not self._stepped and bool(self._phases)

    def attach(self, params: Sequence[nn.Parameter]) -> None:
        """Take the parameters over as placeholders; their homes hold the values already."""
        faults.guard_compiler()
        undo = install((*faults.GUARDS, *SAVING, *METERING))
        self.unguard = weakref.finalize(self, undo)
        self.unguard.atexit = False
        paged, pinned = faults.paged_classes(self)
        place = self._device.torch_device
        self.swizzle = Swizzle(params, self.layout, place, paged, pinned)
        for index in range(len(params)):
            self.swizzle.page(index)

    # -- accesses of forward ---------------------------------------------------------------------

    def enter(self, unit: int) -> bool:
        """Begin a unit's forward: pin, bind, look ahead. Returns whether hooks were pushed."""
        faults.refuse_transforms()
        buckets = self.needs[unit]
        if graph_task() == NO_TASK or self._open is None or self._open.buckets != buckets:
            self._settle_backward()
        # Otherwise backward is recomputing this very unit, and autograd already holds an unpacked
        # weight of it: keep that pin.
        self.grads.flush_pending()
        if not self.is_running:
            self.resume()
        phase = self._phase()
        if phase is Phase.FORWARD:
            self.early.entered(unit)
        elif phase is Phase.BACKWARD:
            self.early.reached(unit)
        accessed = self._begin_access(unit)
        self._pin(buckets, WHY[phase])
        self._bind(buckets)
        try:
            self._look_ahead(phase, unit, buckets)
            pushed = self.saved.push_where_differentiated()
        except BaseException:
            self._unbind(buckets)
            raise
        self._entered.append(accessed)
        return pushed

    def leave(self, unit: int, pushed: bool) -> None:
        """End a unit's forward."""
        if pushed:
            self.saved.pop()
        self._unbind(self.needs[unit])
        self._end_access(self._entered.pop())

    def enter_model(self) -> bool:
        """Begin a call of the whole model: decide the phase, see what is saved between units."""
        self.before_use()
        faults.refuse_transforms()
        self._settle_backward()
        if not self.is_running:
            self.resume()
        phase = self._phase()
        if not self._phases and (phase is Phase.EVAL or not self._stepped):
            cursor = self.evaluate if phase is Phase.EVAL else self.train
            self.issue(cursor.border())
        if not self._phases:
            self._forward_began, self._log.phase = self._log.clock(), NAMES[phase]
        self._phases.append(phase)
        return self.saved.push_where_differentiated()

    def leave_model(self, output: object, *, pushed: bool) -> None:
        """End a call of the whole model."""
        if not is_faking():
            n_bytes = sum(t.nbytes for t in tree_iter(output, is_leaf=is_cache) if is_there(t))
            self.saved.footprint.output_bytes = max(self.saved.footprint.output_bytes, n_bytes)
        if pushed:
            self.saved.pop()
        phase = self._phases.pop() if self._phases else Phase.FORWARD
        if not self._phases:
            self._end_phase(self._forward_began)
        if not self._phases and (phase is Phase.EVAL or not self._stepped):
            self.on_idle()

    @contextmanager
    def lend(self, buckets: Sequence[int], why: str) -> Iterator[None]:
        """Hold buckets and bind their parameters for the length of a block."""
        self._pin(buckets, why, self._spare)
        self._bind(buckets)
        try:
            yield
        finally:
            self._unbind(buckets)
            self.manager.watch(bucket for bucket in buckets if not self.swizzle.bound[bucket])

    def _spare(self) -> int:
        computes = self._phases or self._entered or graph_task() != NO_TASK
        return 0 if computes else self.spare()

    def _phase(self) -> Phase:
        if graph_task() != NO_TASK:
            return Phase.BACKWARD
        if self._phases:
            return self._phases[-1]
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL

    def _bind(self, buckets: Sequence[int]) -> None:
        if self._sources:
            self._check_sources()
        done = []
        try:
            for bucket in buckets:
                self.swizzle.bind(self.manager.replicas[bucket])
                done.append(bucket)
        except BaseException:
            for bucket in done:
                self.swizzle.unbind(bucket)
            self.manager.unpin(buckets)
            raise

    def _unbind(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            for position in self.swizzle.unbind(bucket):
                self._note_write(self.layout.buckets[bucket].segments[position])
        self.manager.unpin(buckets)

    def _note_write(self, segment: Segment) -> None:
        self.manager.write(self.layout.home[segment.index][0], segment.offset, segment.end)
        self._masters.written(segment)

    def _look_ahead(self, phase: Phase, unit: int, buckets: tuple[int, ...]) -> None:
        """Follow the plan, unless this is no part of a step: who reads weights between forwards
        that train nothing (an average of them under `no_grad`) is not planned for."""
        stepped = self._stepped and phase is not Phase.EVAL
        if not (stepped or self._phases or phase is Phase.BACKWARD):
            return
        self.active = self.evaluate if phase is Phase.EVAL else self.train
        self.issue(self.active.observe(Access(phase, unit, buckets)))

    def issue(self, ops: Sequence[Op]) -> None:
        """Carry out planned ops; one that does not fit any more is skipped (it is advice).

        A fetch whose home is still being updated, or read from disk, is late, and those after it
        wait with it, in order: the addresses of a plan are right only in its own order.
        """
        late, manager = self._late, self.manager
        for op in ops:
            if not op.demand:
                late.add(op)
        while late.ops and not self._is_busy(late.ops[0].bucket):
            op = late.pop()
            with host_work():  # who leaves may be coded, on HOST
                manager.prefetch(op.bucket, op.start, op.evict)

    def _is_busy(self, bucket: int) -> bool:
        return self.manager.copies[bucket].is_busy(resident=bucket in self.manager.replicas)

    def stepped(self, buckets: Iterable[int]) -> None:
        """`step` bumped the version counters of bound parameters: do not treat that as a write."""
        for bucket in buckets:
            if self.swizzle.bound[bucket]:
                self.swizzle.written(bucket)
        for before in self._gathered:
            before.update((i, binding.version(self.swizzle.params[i])) for i in before)

    def replan(self) -> None:
        """The frames are others: what was planned for the old ones is planned again."""
        self._late.clear()
        self.train.replan()
        self.evaluate.replan()

    def border(self) -> None:
        """A step was made: what is late belongs to the old one; begin to prefetch for the next."""
        self._late.clear()
        self.issue(self.train.border())

    def _pin(self, buckets: Sequence[int], why: str, spare: Callable[[], int] = lambda: 0) -> None:
        """Pin buckets, after the late fetches among which theirs are: the plan knew a place."""
        late, replicas = self._late, self.manager.replicas
        missing = [b for b in buckets if b not in replicas] if late.ops else []
        with host_work():  # frames are counted as such, and what comes from disk is on HOST
            while any(bucket in late for bucket in missing):
                op = late.pop()
                self.manager.prefetch(op.bucket, op.start, op.evict)
            self.manager.pin(buckets, why, spare)

    # -- accesses of backward --------------------------------------------------------------------

    def locate(self, tensor: torch.Tensor, cdata: int) -> Saved | None:
        """Return where a tensor lies in a parameter's frame or placeholder (see activation.py)."""
        if tensor.is_conj() or tensor.is_neg():
            return None  # the bits would be lost: its storage is a lease
        replica = self.manager.arena.by_storage.get(cdata)
        if replica is None:
            index = self.swizzle.by_placeholder.get(cdata)
            if index is None:
                return None
            spec = self.layout.home[index][1].spec
            then = binding.version(self.swizzle.params[index])
            return Saved(index, 0, spec.shape, spec.stride, then)
        if tensor.dtype != replica.bucket.dtype:
            return None  # a view of other bytes: its storage is a lease
        with binding.plainly():
            offset, size, stride = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        segment = _segment_at(replica.bucket.segments, offset)
        then = binding.version(self.swizzle.params[segment.index])
        return Saved(segment.index, offset - segment.offset, tuple(size), tuple(stride), then)

    def resolve(self, saved: Saved) -> torch.Tensor:
        """Return a saved view of a parameter; in backward this is what opens an access."""
        if self.closed:
            raise StateError(
                "this graph was made before hetero.release; the frames it refers to are gone",
                advice="run backward before releasing the model",
            )
        bucket, segment = self.layout.home[saved.param]
        now = binding.version(self.swizzle.params[saved.param])
        if now != saved.version:
            what = f"parameter {segment.spec.name!r} of shape {list(segment.spec.shape)}"
            raise RuntimeError(CHANGED.format(what=what, now=now, then=saved.version))
        if graph_task() == NO_TASK:
            self._pin((bucket,), "saved")
            view = self._view(bucket, segment.offset, saved)
            self.manager.unpin((bucket,))
            return view
        self.touch(bucket)
        return self._view(bucket, segment.offset, saved)

    def touch(self, bucket: int) -> None:
        """Backward needs a bucket: move the open access to its unit."""
        if self._open is not None and bucket in self._open.buckets:
            return
        self.backward_event()
        self._close_backward()
        unit = self.layout.buckets[bucket].unit
        self.early.reached(unit)
        buckets = self.needs[unit] if bucket in self.needs[unit] else (bucket,)
        accessed = self._begin_access(unit)
        self._pin(buckets, WHY[Phase.BACKWARD])
        self._open = Open(buckets, accessed)
        self._look_ahead(Phase.BACKWARD, unit, buckets)

    def backward_event(self) -> None:
        """Something of ours happens in backward: start flushes, make sure to hear of its end."""
        self.gradient_arrived()
        self.grads.flush_pending()

    def gradient_arrived(self) -> None:
        """A gradient is complete; its flush starts at the next event."""
        task = graph_task()
        if task != NO_TASK and task != self._graph_task:
            self._graph_task = task
            self._backward_began, self._log.phase = self._log.clock(), NAMES[Phase.BACKWARD]
            at_end_of_backward(self._end_backward)
            self.backward_begins()

    def _end_backward(self) -> None:
        self._graph_task = NO_TASK
        self._close_backward()
        self.grads.flush_pending()
        self.early.pass_ended()
        self._end_phase(self._backward_began)

    def _close_backward(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            self.manager.unpin(opened.buckets)
            self._end_access(opened.accessed)

    def _settle_backward(self) -> None:
        """Close the backward access: its unit is done, or an error ended the pass."""
        self._close_backward()
        if graph_task() == NO_TASK:
            self._graph_task = NO_TASK

    def _view(self, bucket: int, offset: int, saved: Saved) -> torch.Tensor:
        flat = self.manager.replicas[bucket].flat
        return torch.as_strided(flat, saved.size, saved.stride, offset + saved.offset)

    # -- the event log ---------------------------------------------------------------------------

    def _begin_access(self, unit: int) -> Accessed:
        log = self._log
        range_ = self._device.annotate(self.layout.unit_names[unit]) if log.annotates else None
        return Accessed(unit, log.begin_access(), log.clock(), range_)

    def _end_access(self, accessed: Accessed) -> None:
        unit, seq, began, range_ = accessed
        self._log.end_access(seq, began, unit, self._needs_bytes[unit])
        held = self.saved.footprint.live_bytes
        self._log.now(What.LIVE, tier=Tier.HBM, category=Kind.ACTIVATION, n_bytes=held, unit=unit)
        if range_ is not None:
            self._device.end_annotation(range_)

    def _end_phase(self, began: float) -> None:
        log = self._log
        log.add(What.PHASE, began, log.clock(), why=log.phase)
        log.phase = "between"

    # -- faults ----------------------------------------------------------------------------------

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Let ``detach`` and ``copy_`` of unbound parameters reach the homes (state dicts)."""
        before, self._at_home = self._at_home, True
        try:
            yield
        finally:
            self._at_home = before

    def _reach_home(self, func: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor:
        """Carry out a state dict's ``detach`` or ``copy_`` on the home itself."""
        param: nn.Parameter = args[0]
        bucket, segment = self.layout.home[self.swizzle.index[id(param)]]
        home = self.manager.home(bucket)
        if func == torch.Tensor.detach and not home.shows:
            return self._on_disk(param, segment)
        self.manager.flush_and_wait(bucket)
        if func == torch.Tensor.detach:
            self.before_load()  # what is shown can be written unseen
            self.manager.copies[bucket].expose()
            return home.view(segment).detach()
        self.before_load()
        self._masters.assign(segment, args[1])
        torch.autograd.graph.increment_version(param)
        self.manager.refresh(bucket)
        return param

    def _on_disk(self, param: nn.Parameter, segment: Segment) -> torch.Tensor:
        """Return what a state dict shows of a parameter that memory does not hold as it is."""
        bucket = self.layout.home[self.swizzle.index[id(param)]][0]

        def read() -> torch.Tensor:
            self.manager.flush_and_wait(bucket)
            return self.manager.home(bucket).read(segment)

        def keep() -> torch.Tensor:
            self.before_load()  # what is shown can be written unseen
            self.manager.adopt_home_writes(held=False)
            self.manager.flush_and_wait(bucket)
            return self.manager.home(bucket).alias(segment)

        def write(value: torch.Tensor) -> None:
            self._reach_home(torch.Tensor.copy_, (param, value))

        view = self.manager.home(bucket).view(segment)
        return shown(HomeSlot(view, read=read, keep=keep, write=write), segment)

    def fault(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function on parameters that are not bound (see faults.py)."""
        faults.refuse_transforms()
        if self._at_home and func in _HOMEWARD:
            return self._reach_home(func, args)
        index = self.swizzle.index
        places = (index.get(id(value), -1) for value in leaves_of((args, dict(kwargs))))
        buckets = tuple(dict.fromkeys(self.layout.home[i][0] for i in places if i >= 0))
        if not buckets:
            with binding.plainly():  # only the class took part, no parameter's bytes
                return func(*args, **kwargs)
        phase = self._phase()
        if graph_task() != NO_TASK:
            self.touch(buckets[0])  # unpin the previous unit: backward has reached this one
        with self.lend(buckets, "fault"):
            for bucket in buckets:
                self._look_ahead(phase, self.layout.buckets[bucket].unit, (bucket,))
            pushed = not foreign() and self.saved.push_where_differentiated()
            try:
                found = func(*args, **kwargs)
            finally:
                if pushed:
                    self.saved.pop()
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_iter(found)):
            self.early.outside(buckets)
        return found

    def alias(self, param: nn.Parameter) -> torch.Tensor:
        """Return ``param.data`` of a bound parameter; writes through it leave no trace."""
        bucket, _ = self.layout.home[self.swizzle.index[id(param)]]
        self.manager.replicas[bucket].exposed = True
        return faults.read_data(param)

    def assign(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Carry out ``param.data = value`` by copying; a change of geometry is refused."""
        bucket, segment = self.layout.home[self.swizzle.index[id(param)]]
        spec, place = segment.spec, self._device.torch_device
        if tuple(value.shape) != spec.shape or value.dtype != spec.dtype or value.device != place:
            raise StateError(
                f"parameter {spec.name!r} is {spec.dtype} {list(spec.shape)} on {place}; data of"
                f" {value.dtype} {list(value.shape)} on {value.device} cannot replace it",
                advice="convert the model before hetero.prepare, or release it first",
            )
        with torch.no_grad(), self.lend((bucket,), "assign"):
            replica = self.manager.replicas[bucket]
            view = replica.views[segment.position]
            if view.data_ptr() == value.data_ptr():
                return
            kept = self.swizzle.bound[bucket] == 1 and replica.aliases(self.swizzle.count(bucket))
            if kept or use_count(value) > ALONE:
                whose = "its old value" if kept else "the new one"
                raise StateError(
                    f"data of {spec.name!r} is assigned while a view of {whose} is alive, which"
                    " torch would keep (apart from the parameter, or as an alias of it)",
                    advice="copy: backup = p.detach().clone(), and p.data.copy_(new)",
                )
            view.copy_(value)
            self._note_write(segment)
        # torch would alias the two from here on; a later write to `value` must not go unseen, nor
        # a graph that saved the old bytes
        torch.autograd.graph.increment_version(param)
        self._sources[self.swizzle.index[id(param)]] = (weakref.ref(value), value._version)

    def _check_sources(self) -> None:
        """Refuse when a tensor that was assigned to ``p.data`` was written afterwards."""
        for index, (source, version) in list(self._sources.items()):
            value = source()
            if value is None:
                del self._sources[index]
            elif value._version != version:
                del self._sources[index]
                name = self.layout.home[index][1].spec.name
                raise StateError(
                    f"the tensor that was assigned to {name!r}.data was written afterwards; torch"
                    " would have written the parameter",
                    advice="write to the parameter: p.data.copy_(value) or hetero.gathered(p)",
                )

    def geometry(self, param: nn.Parameter) -> torch.Tensor:
        """Return a meta tensor with the parameter's own shape and strides."""
        spec = self.layout.home[self.swizzle.index[id(param)]][1].spec
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")

    def name(self, param: nn.Parameter) -> str:
        """Return the parameter's name in its model."""
        return self.layout.home[self.swizzle.index[id(param)]][1].spec.name

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], *, write: bool) -> Iterator[None]:
        """Hold parameters, full and current, for the length of a block."""
        self.before_use()
        home, held = self.layout.home, self.swizzle.params
        indices = [self.swizzle.index[id(p)] for p in params]
        buckets = tuple(dict.fromkeys(home[i][0] for i in indices))
        self.quiesce()
        with self.lend(buckets, "gathered"):
            before = {i: binding.version(held[i]) for i in indices}
            self._gathered.append(before)
            try:
                yield
            finally:
                self._gathered.remove(before)
            changed = [i for i, v in before.items() if binding.version(held[i]) != v]
            if write:
                for bucket, segment in (home[i] for i in indices):
                    self.manager.write(bucket, segment.offset, segment.end)
        if changed and not write:
            for bucket in {home[i][0] for i in changed}:
                self.manager.discard_writes(bucket)
            for i in changed:
                self._masters.not_written(home[i][1])
            names = ", ".join(repr(home[i][1].spec.name) for i in changed)
            raise StateError(
                f"parameter {names} was written inside gathered(write=False); the write is undone",
                advice="use hetero.gathered(..., write=True)",
            )
        for bucket in buckets:
            self.manager.flush_and_wait(bucket)

    # -- borders ---------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Bring every gradient and every written parameter home (before a step or a read)."""
        self._settle_backward()
        self.grads.flush_pending()
        if self._sources:
            self._check_sources()
        for bucket, replica in list(self.manager.replicas.items()):
            if replica.pins:
                self._note_writes(bucket)
            self.manager.flush_and_wait(bucket)
        self.manager.adopt_home_writes()

    def _note_writes(self, bucket: int) -> None:
        """Mark what was written to a bucket while it is still bound."""
        for position in self.swizzle.written(bucket):
            self._note_write(self.layout.buckets[bucket].segments[position])


def is_there(value: object) -> bool:
    """Whether a value is a tensor with memory of its own, not logits for later."""
    late = isinstance(value, LateLogits) and not value.computed
    return isinstance(value, torch.Tensor) and not late


def _segment_at(segments: Sequence[Any], offset: int) -> Any:
    """Return the segment that holds an element offset."""
    low, high = 0, len(segments) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if segments[middle].offset <= offset:
            low = middle
        else:
            high = middle - 1
    return segments[low]
