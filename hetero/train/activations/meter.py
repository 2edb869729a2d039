"""Bytes on the device apart from frames: allocator's count, traced count, or bound (floor 2)."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from hetero.device import Device
from hetero.functional.head import has_memory
from hetero.internals import RUN_BACKWARD, Replacement, current_mode, modes_on, tree_iter
from hetero.train.activations.allocator import MARGIN, AllocatorMeter
from hetero.train.activations.held import GraphFootprint
from hetero.train.model.binding import without_faults
from hetero.train.model.looking import OnlyLooks, bitwise, nodes_of, unseen_products
from hetero.types import noop

MADE_BY = "hetero_meter"  # in the metadata of graph nodes


class Meter(Protocol):
    """Measures a step; bytes of frames, of buffers and of the gradient ring are not counted."""

    def watching(self) -> AbstractContextManager[None]:
        """Measure inside the block: the model's forward, or a backward."""

    def unit_done(self) -> None:
        """A unit's forward ended; if no other follows, the model's end comes now."""

    def made(self, output: Any) -> None:
        """The model's forward returned ``output``: measure backward passes from it."""

    def peak_bytes(self) -> int:
        """Return the peak since `restart`, with margins."""

    def seen_bytes(self) -> int:
        """Return the peak without margins."""

    def live_bytes(self) -> int:
        """Return the present bytes."""

    def end_bytes(self) -> int:
        """Return the peak after the last unit of the last forward; 0 if unknown."""

    def restart(self) -> None:
        """Begin a new measurement."""

    def computes(self) -> None:
        """A backward pass begins."""

    def rests(self) -> None:
        """A backward pass is over."""

    def prepared(self) -> None:
        """Parameters are home, and nothing was computed: what lives now is no activation."""

    def changing(self) -> AbstractContextManager[None]:
        """Change the memory of frames inside the block."""

    def lend(self) -> None:
        """Nothing computes: measure nothing until `resume`, while frames use free memory."""

    def resume(self) -> None:
        """Measure again."""


class Keeper(Protocol):
    """Enforces a budget while operations are counted."""

    def fits(self, live_bytes: int) -> bool:
        """Whether so many bytes may be alive, after making room."""

    def passed(self, live_bytes: int) -> None:
        """So many bytes may not be alive; an error raised here ends the operation."""

    def forward_done(self) -> None:
        """The model's forward ended; may raise."""


class Uninterrupted:
    """A meter that measures all the while: frames are not in what it counts."""

    def prepared(self) -> None: ...

    def changing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def computes(self) -> None: ...

    def rests(self) -> None: ...

    def lend(self) -> None: ...

    def resume(self) -> None: ...


class BoundMeter(Uninterrupted):
    """For RAM in training: bytes held by graphs, with bounds on temporaries and new gradients."""

    def __init__(self, footprint: GraphFootprint, gradient_bytes: int) -> None:
        self._footprint = footprint
        self._gradient_bytes = gradient_bytes

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unit_done(self) -> None: ...

    def made(self, output: Any) -> None: ...

    def peak_bytes(self) -> int:
        return self._footprint.bound_bytes + self._gradient_bytes

    def seen_bytes(self) -> int:
        return self.peak_bytes()

    def live_bytes(self) -> int:
        return self._footprint.live_bytes

    def end_bytes(self) -> int:
        return 0

    def restart(self) -> None:
        self._footprint.restart()


class LiveBytes(OnlyLooks):
    """Counts the bytes of storages made by operations, while they live.

    Storages made before, and those of ``known`` tensors, are not counted.

    Args:
        grown: called with the live bytes at each new peak; may raise, else returns them recounted.
        ours: whether operations belong to the model; False suspends counting.
        passing: tensors in such storages that are counted elsewhere.
        wrappers: classes of tensors whose operations are others on what they have inside.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),
        grown: Callable[[int], int] | None = None,
        ours: Callable[[], bool] = lambda: True,
        passing: Callable[[], Iterable[torch.Tensor]] = tuple,
        wrappers: tuple[type, ...] = (),
    ) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.recent = 0  # the peak since the last reset
        self._grown = grown
        self._ours = ours
        self._passing = passing
        self._wrappers = wrappers
        self._seen: dict[int, object] = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._wrappers and any(issubclass(kind, self._wrappers) for kind in types):
            return NotImplemented  # those that it makes inside are seen
        make = bitwise(func)
        found = make(*args, **kwargs) if kwargs else make(*args)
        if not func.is_view:
            self.note(found, (*args, *kwargs.values()) if kwargs else args)
        return found

    def note(self, found: Any, given: Any) -> None:
        """Count what an operation made that was given this."""
        with without_faults():  # else this would fetch an unbound parameter
            for tensor in tensors_in(found):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._seen:
                    shared = (t.untyped_storage()._cdata for t in tensors_in(given))
                    if key not in shared:  # else a view, or a write in place
                        self._note(storage, key)

    def _note(self, storage: torch.UntypedStorage, key: int) -> None:
        n_bytes = storage.nbytes()

        def gone(_: object) -> None:
            del self._seen[key]
            self.live -= n_bytes

        self.live += n_bytes
        self._seen[key] = weakref.ref(storage, gone)
        self.grew()

    def grew(self) -> None:
        """There are more live bytes: see whether they are a peak."""
        if self.live <= self.recent or not self._ours():
            return
        counted = self.counted()
        if counted > self.peak and self._grown is not None:
            counted = self._grown(counted)
        self.peak = max(self.peak, counted)
        self.recent = max(self.recent, counted)

    def counted(self) -> int:
        """Return the live bytes without those counted elsewhere."""
        seen, passing = self._seen, self._passing()
        return self.live - sum(t.nbytes for t in passing if t.untyped_storage()._cdata in seen)


_meters: weakref.WeakSet[TracedMeter] = weakref.WeakSet()


class TracedMeter(Uninterrupted):
    """For "cpu:sim", and RAM without training: all allocations in forward and backward.

    Between the two, the program's own tensors are taken for a copy of the model's outputs.

    Args:
        keeper: returns the enforcer of the budget.
        has: whether a leaf of a graph is a parameter of the measured model.
        ours: whether the running forward or backward is of the measured model.
        passing: gradients on their way down; their limit is counted instead, since their number at
            the peak is chance.
    """

    def __init__(
        self,
        footprint: GraphFootprint,
        *,
        keeper: Callable[[], Keeper],
        has: Callable[[torch.Tensor], bool],
        ours: Callable[[], bool],
        passing: Callable[[], Iterable[torch.Tensor]],
        wrappers: tuple[type, ...] = (),
    ) -> None:
        self._footprint = footprint
        self.has = has
        self._keeper = keeper
        self._mode = LiveBytes(grown=self._look, ours=ours, passing=passing, wrappers=wrappers)
        self._end = 0
        _meters.add(self)

    def _look(self, live_bytes: int) -> int:
        keeper = self._keeper()
        for generation in range(3):
            if keeper.fits(live_bytes):
                return live_bytes
            gc.collect(generation)  # graphs in cycles (`create_graph=True`) live until then
            live_bytes = self._mode.counted()
        if not keeper.fits(live_bytes):
            keeper.passed(live_bytes)
        return live_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        if current_mode() is self._mode:  # a backward inside a forward
            yield
            return
        with self._mode:
            yield

    def unit_done(self) -> None:
        self._mode.recent = self._mode.counted()

    def made(self, output: Any) -> None:
        self._end = self._mode.recent
        for tensor in tree_iter(output):
            node: Any = tensor.grad_fn if has_memory(tensor) else None
            if node is not None:
                node.metadata[MADE_BY] = weakref.ref(self)
        self._keeper().forward_done()

    def peak_bytes(self) -> int:
        return int((1 + MARGIN) * self._mode.peak) + self._footprint.output_bytes

    def seen_bytes(self) -> int:
        return self._mode.peak

    def live_bytes(self) -> int:
        return self._mode.counted()

    def end_bytes(self) -> int:
        return self._end + self._footprint.output_bytes

    def restart(self) -> None:
        self._mode.peak = self._mode.recent = self._mode.counted()
        self._footprint.restart()


def make_meter(
    device: Device,
    footprint: GraphFootprint,
    *,
    gradient_bytes: int,
    traced: bool,
    trains: bool,
    slack_bytes: int,
    others: Callable[[], int],
    passing: Callable[[], Iterable[torch.Tensor]],
    has: Callable[[torch.Tensor], bool],
    ours: Callable[[], bool],
    keeper: Callable[[], Keeper],
    wrappers: tuple[type, ...] = (),
) -> Meter:
    """Return the meter of activations for a device.

    Args:
        gradient_bytes: of the largest gradients made at once.
        traced: whether a mode may watch operations if the device cannot count.
        others: returns bytes of the model that are no activations; for the rest see the meters.
    """
    if device.memory.allocated_peak() is not None:
        return AllocatorMeter(
            *(device, footprint, others), passing=passing, trains=trains, slack_bytes=slack_bytes
        )
    if traced:
        return TracedMeter(
            footprint, keeper=keeper, has=has, ours=ours, passing=passing, wrappers=wrappers
        )
    return BoundMeter(footprint, gradient_bytes)


def _for_passes(run: Callable[..., Any]) -> Callable[..., Any]:
    """Watch backward passes: a mode holds for a pass only if it is on at the start."""

    @functools.wraps(run)
    def watched(roots: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for meter in meters_of(roots):
                stack.enter_context(meter.watching())
            # in a pass that another one runs (a reentrant checkpoint), its modes are on
            stack.enter_context(unseen_products(roots, _missed))
            return run(roots, *args, **kwargs)

    return watched


def _missed(gradients: Any) -> None:
    """A node of backward made these while modes were off."""
    for mode in modes_on():
        if isinstance(mode, LiveBytes):
            mode.note(gradients, ())


def meters_of(roots: Sequence[Any]) -> list[TracedMeter]:
    """Return the meters of the models whose outputs or parameters a graph leads to. A pass that
    begins inside a model (for weights alone, in a pipeline) comes to no output.

    Other graphs are left alone: compiled code runs differently under any mode.
    """
    found: dict[int, TracedMeter] = {}
    n_there = len(_meters)
    for node in nodes_of(roots) if n_there else ():
        meter = node.metadata.get(MADE_BY, noop)()
        if meter is not None:
            found[id(meter)] = meter
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.update({id(each): each for each in _meters if each.has(leaf)})
        if len(found) == n_there:
            break
    return list(found.values())


_NOTHING = nullcontext()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in an operation's arguments or results: no pytree, for speed."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


GUARDS: tuple[Replacement, ...] = (RUN_BACKWARD.replaced(_for_passes),)
"""Replaced functions of torch while a meter watches passes."""
