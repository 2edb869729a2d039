"""Slices that do again what the one before them did, without their operations (floor 4).

[Note: equal slices]  A slice is recorded: each operation's cost, each new storage, and each call of
the engine, in order. If it began in the state that it left, and did what the slice before it, or
the same unit's in the last step, had done, then the next one of as many samples does so, too. It is
played: costs pass one by one on the device's clock, and the engine is called at the same places. So
copies, updates and evictions that go on meanwhile are those of a slice that runs. Nothing is played
that did anything else: moved the clock, logged an event, left bytes, drew, or wrote to its state.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from hetero.dry import DryDevice
from hetero.events import EventLog
from hetero.internals import (
    apply_function,
    at_end_of_backward,
    graph_task,
    in_backward,
    modes_on,
    without_modes,
)
from hetero.rehearse.clock import OpClock
from hetero.train.activations.held import GraphFootprint
from hetero.train.activations.meter import LiveBytes
from hetero.train.activations.moment import PLAIN, Moment
from hetero.train.activations.offload import Offload
from hetero.train.activations.slices import Sliced
from hetero.train.model.graph import OurHook
from hetero.types import noop

FEWEST = 3  # slices, of which one can be played


class Act(IntEnum):
    """What a slice does, as far as the clock, the meter and the engine see it."""

    BEGIN = 0
    """An operation."""
    SPEND = 1
    """The time it takes."""
    ADD_UP = 2
    """A sum of ranks."""
    GROW = 3
    """There are more live bytes."""
    RESOLVE = 4
    """A saved view of a weight is unpacked."""
    AWAKE = 5
    """Another saved tensor is."""
    HOOK = 6
    """A hook of ours on a parameter is called."""
    END = 7
    """The pass through the slice's graph is over."""


class Item(NamedTuple):
    """One of them."""

    act: Act
    live_bytes: int
    """That operations made, apart from those when the slice began."""
    held_bytes: int
    """By graphs, in the same way."""
    in_pass: bool
    """Whether it is in the pass through the slice's graph."""
    given: tuple[Any, ...]

    @property
    def shown(self) -> tuple[Any, ...]:
        """What is compared: an item of another step may differ in objects and versions."""
        given = self.given
        if self.act is Act.SPEND:
            given = given[0][:2]
        elif self.act is Act.RESOLVE:
            given = (given[0]._replace(version=0),)
        elif self.act is Act.HOOK:
            given = given[1:]
        return (self.act, *self[1:4], given)


class Untraced:
    """Stands for the meter of a model whose bytes no mode counts."""

    live = 0

    def grew(self) -> None:
        """Nothing grows."""


class Stage(NamedTuple):
    """What slices act on."""

    clock: OpClock
    meter: LiveBytes | Untraced
    footprint: GraphFootprint
    offload: Offload
    resolve: Any
    """The owner of `resolve`."""
    device: DryDevice
    log: EventLog

    def now(self) -> tuple[float, int]:
        """Return what nothing but items may change: the time, and the number of events."""
        return self.device.clock_seconds, len(self.log)


class Record:
    """What a slice does. Use it as a block around the slice."""

    def __init__(self, stage: Stage, job: Sliced) -> None:
        self.items: list[Item] = []
        self.is_plain = True
        """Whether all that it did is in the items."""
        self.held_bytes = stage.footprint.live_bytes
        """That graphs held when it began."""
        self._stage, self._job = stage, job
        self._live_bytes = stage.meter.live
        self._task = graph_task()
        self._pass: int | None = None  # through the slice's graph
        self._is_inside = False  # of that pass
        self._depth = 0
        self._now: tuple[float, int] | None = stage.now()
        self._taps = ExitStack()

    def __enter__(self) -> Record:
        stage, tap = self._stage, self._taps.enter_context
        tap(self._tapped(stage.clock, "begin", Act.BEGIN))
        tap(self._tapped(stage.clock, "spend", Act.SPEND))
        tap(self._tapped(stage.clock, "add_up", Act.ADD_UP))
        tap(self._tapped(stage.meter, "grew", Act.GROW))
        tap(self._tapped(stage.resolve, "resolve", Act.RESOLVE))
        tap(self._tapped(stage.offload, "awake", Act.AWAKE))
        tap(self._hooked())
        return self

    def __exit__(self, *raised: Any) -> None:
        self._taps.close()
        ends = [item.act for item in self.items if item.in_pass]
        self._check()
        self.is_plain &= (
            self._stage.meter.live == self._live_bytes
            and self._stage.footprint.live_bytes == self.held_bytes
            and ends.count(Act.END) == bool(ends)
            and (not ends or ends[-1] is Act.END)
        )

    @contextmanager
    def _tapped(self, owner: Any, name: str, act: Act) -> Iterator[None]:
        """Record calls of an object's method inside the block."""
        own = getattr(owner, name)
        vars(owner)[name] = lambda *given: self._note(act, own, given, given)
        try:
            yield
        finally:
            del vars(owner)[name]

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Record calls of our hooks on the unit's parameters inside the block."""
        kept = []
        for at, param in enumerate(self._job.params):
            table = param._backward_hooks or {}
            for key, hook in list(table.items()):
                kept.append((table, key, hook))
                table[key] = Heard(self._note, hook, at)
        try:
            yield
        finally:
            for table, key, hook in kept:
                table[key] = hook

    def _note(
        self, act: Act, own: Callable[..., Any], given: tuple[Any, ...], kept: tuple[Any, ...]
    ) -> Any:
        """Call what a slice called, and record that."""
        if self._depth:  # a part of another one
            return own(*given)
        self._check()
        task = graph_task()
        if task != self._task and self._pass is None:
            self._pass, self._is_inside = task, True
            at_end_of_backward(self._ended)
        self.is_plain &= task == (self._pass if self._is_inside else self._task)
        self._add(act, kept, in_pass=task != self._task)
        self._depth += 1
        try:
            return own(*given)
        finally:
            self._depth -= 1
            self._now = self._stage.now()

    def _ended(self) -> None:
        """Autograd calls this, and then the engine, at the end of the pass."""
        self._check()
        self._add(Act.END, (), in_pass=True)
        self._now, self._is_inside = None, False

    def _add(self, act: Act, kept: tuple[Any, ...], *, in_pass: bool) -> None:
        live = self._stage.meter.live - self._live_bytes
        held = self._stage.footprint.live_bytes - self.held_bytes
        self.items.append(Item(act, live, held, in_pass, kept))

    def _check(self) -> None:
        """Nothing may have happened since the last item."""
        if self._now is not None and self._now != self._stage.now():
            self.is_plain = False


class Heard(OurHook):
    """Our hook on a parameter, whose calls are recorded."""

    def __init__(self, note: Callable[..., Any], hook: Any, at: int) -> None:
        self._note, self._hook, self._at = note, hook, at

    def __call__(self, grad: torch.Tensor) -> None:
        self._note(Act.HOOK, self._hook, (grad,), (self._hook, self._at))


class Repeats:
    """Runs the slices of units, and plays those that do again what is known, see [Note: equal
    slices]. Otherwise all slices run (`one_by_one`)."""

    def __init__(self, device: DryDevice) -> None:
        self.log: EventLog | None = None
        """The engine's; until there is one, all slices run."""
        self.offload: Offload | None = None
        """The engine's."""
        self.n_played = 0
        """How many slices did not have to run."""
        self._device = device
        self._known: dict[tuple[str, bool, int], tuple[Any, ...]] = {}

    @contextmanager
    def __call__(self, job: Sliced) -> Iterator[Iterable[int]]:
        with closing(self._numbers(job)) as numbers:  # an error leaves no tap
            yield numbers

    def _numbers(self, job: Sliced) -> Generator[int, None, None]:
        """Yield the numbers of the slices that have to run, and play the others in between."""
        stage = self._stage(job) if len(job.rows) >= FEWEST and not has_hooks(job) else None
        sizes = [rows.stop - rows.start for rows in job.rows]
        known: Record | None = None
        for at, size in enumerate(sizes):
            if stage is None or at == 0 or size != sizes[0]:
                yield at
            elif known is not None and at not in job.moments and may_play(stage, known):
                play(stage, known.items)
                self.n_played += 1
            else:
                before = state_of(job)
                with Record(stage, job) as record:
                    yield at
                known = record if self._is_known(job, record, before) else None

    def _is_known(self, job: Sliced, record: Record, before: Moment) -> bool:
        """Whether the next slice does what is in a record."""
        with without_modes():
            is_steady = record.is_plain and before.is_as(job.moment())
        others = job.others
        if not (is_steady and set(map(type, others)) <= PLAIN):
            return False
        which = job.name, in_backward(), job.rows[0].stop
        shown = (*others, *(item.shown for item in record.items))
        seen, self._known[which] = self._known.get(which), shown
        return shown == seen

    def _stage(self, job: Sliced) -> Stage | None:
        """Return what the slices act on; None if something else looks at operations, too."""
        modes = modes_on()
        clocks = [mode for mode in modes if isinstance(mode, OpClock)]
        meters = [mode for mode in modes if isinstance(mode, LiveBytes)]
        strange = len(modes) != len(clocks) + len(meters)
        if self.log is None or self.offload is None or strange or len(clocks) != 1:
            return None
        if len(meters) > 1:
            return None
        meter = meters[0] if meters else Untraced()
        saved = job.saved
        return Stage(
            *(clocks[0], meter, saved.footprint, self.offload, saved.views, self._device, self.log)
        )


def has_hooks(job: Sliced) -> bool:
    """Whether modules of a unit have hooks, which may do anything."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module).get(name) for module in job.module.modules() for name in tables)


def state_of(job: Sliced) -> Moment:
    """Return the state of a unit; what looks is no operation of the model."""
    with without_modes():
        return job.moment()


def may_play(stage: Stage, record: Record) -> bool:
    """Whether a slice finds what the recorded one found: graphs hold no more than then."""
    return stage.footprint.live_bytes == record.held_bytes


def play(stage: Stage, items: Sequence[Item]) -> None:
    """Let what a slice does happen, but for its operations."""
    acts: dict[Act, Callable[..., Any]] = {
        Act.BEGIN: stage.clock.begin,
        Act.SPEND: stage.clock.spend,
        Act.ADD_UP: stage.clock.add_up,
        Act.GROW: stage.meter.grew,
        Act.RESOLVE: stage.resolve.resolve,
        Act.AWAKE: stage.offload.awake,
        Act.HOOK: lambda hook, at: hook(None),
        Act.END: noop,
    }
    meter, footprint = stage.meter, stage.footprint
    live = held = 0  # of the slice, now; the engine may let go of other bytes at any time

    def act(some: Sequence[Item]) -> None:
        nonlocal live, held
        for what, its_live, its_held, _, given in some:
            meter.live += its_live - live
            footprint.live_bytes += its_held - held
            live, held = its_live, its_held
            acts[what](*given)

    first = next((at for at, item in enumerate(items) if item.in_pass), len(items))
    last = next((at for at, item in enumerate(items) if item.act is Act.END), first - 1) + 1
    try:
        act(items[:first])
        if first < last:
            in_a_pass(lambda: act(items[first:last]))
        act(items[last:])
    finally:
        meter.live -= live
        footprint.live_bytes -= held


class Passing(torch.autograd.Function):
    """Does some work in its backward."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return root.view_as(root)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.work()
        return grad, None


def in_a_pass(work: Callable[[], None]) -> None:
    """Do some work inside a backward pass of its own, as the operations of a graph are."""
    with without_modes(), torch.enable_grad():
        root = torch.zeros((), requires_grad=True)
        end, one = apply_function(Passing, root, work), torch.ones(())
    torch.autograd.grad(end, root, one)
