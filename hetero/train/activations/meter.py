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
from hetero.internals import RUN_BACKWARD, Replacement, TorchDispatchMode, current_mode, tree_iter
from hetero.train.activations.held import GraphFootprint
from hetero.train.model.binding import without_faults
from hetero.types import noop

MADE_BY = "hetero_meter"  # in the metadata of graph nodes
MARGIN = 0.05  # of a measured peak: segments are not reused perfectly, nor are copies equally fast


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


class BoundMeter:
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

    def prepared(self) -> None: ...

    def changing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def computes(self) -> None: ...

    def rests(self) -> None: ...

    def lend(self) -> None: ...

    def resume(self) -> None: ...


class AllocatorMeter:
    """For CUDA: the count of torch's allocator, without synchronising, less what is not ours.

    Gradients on their way down cannot be told apart there: they are counted twice.

    [Note: strangers]  Whatever lives on the device when a forward begins and is not ours (another
    model, averages, the batch) is no activation. Strangers that came after `prepare` count all the
    same as far as the device has no room for them beside the budget: frames then give way. Without
    an optimizer only those of `prepare`, and other prepared models, are told from a cache of keys
    and values, which is ours.

    Args:
        others: returns bytes of this model that are no activations.
        passing: returns gradients on their way down.
        trains: whether there is an optimizer.
        slack_bytes: of the device, that neither the budget nor strangers had at `prepare`.
    """

    def __init__(
        self,
        device: Device,
        footprint: GraphFootprint,
        others: Callable[[], int],
        *,
        passing: Callable[[], Iterable[torch.Tensor]],
        trains: bool,
        slack_bytes: int,
    ) -> None:
        self._device = device
        self._footprint = footprint
        self._others = others
        self._passing = passing
        self._trains = trains
        self._watches = False  # whether a forward of ours runs
        self._idle = True  # whether nothing of ours computes until the next forward or backward
        self._lent = False
        self._allowance = slack_bytes  # of strangers that take nothing from the budget
        self._unknown = 0  # bytes of strangers that no prepared model has, when a forward began
        self._graphs = 0  # and of graphs of other prepared models
        self._outputs = LiveOutputs()
        self._before = 0  # the peak of ours, up to the last reset of the allocator's
        self._most = 0  # the same with strangers
        self._end = 0
        _counting.add(self)

    def prepared(self) -> None:
        self.restart()
        self._allowance += self._recent()
        self._look(own=0, first=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._anew()
        self._look(own=self._own())
        self._idle, self._watches = False, True
        try:
            yield
        finally:
            self._anew()
            self._watches = False

    def _own(self) -> int:
        """Return the bytes of ours that live between forwards."""
        passing = sum(tensor.nbytes for tensor in self._passing())
        return self._footprint.live_bytes + self._outputs.n_bytes + passing

    def _look(self, *, own: int, first: bool = False) -> None:
        """Count strangers, between forwards; ``own`` bytes are of outputs, graphs and gradients."""
        self._graphs = sum(meter._footprint.live_bytes for meter in self._rivals())
        unknown = max(0, self._recent() - own - self._graphs - self._frames())
        self._unknown = unknown if self._trains or first else min(unknown, self._unknown)

    def _alike(self) -> list[AllocatorMeter]:
        """Return the meters of models on the same device."""
        place = self._device.torch_device
        return [meter for meter in _counting if meter._device.torch_device == place]

    def _rivals(self) -> Iterator[AllocatorMeter]:
        return (meter for meter in self._alike() if meter is not self)

    def _frames(self) -> int:
        """Return the present bytes of other prepared models' frames and buffers."""
        return sum(meter._others() for meter in self._rivals())

    def unit_done(self) -> None:
        self._idle = False
        self._anew()

    def made(self, output: Any) -> None:
        self._end = self.live_bytes()
        self._outputs.note(output)

    def peak_bytes(self) -> int:
        return int((1 + MARGIN) * self.seen_bytes())

    def seen_bytes(self) -> int:
        folded = max(self._before, self._most - self._allowance)
        if self._lent:
            return folded
        ours = 0 if self._idle else self.live_bytes()
        return max(folded, ours, self._recent() - self._allowance)

    def live_bytes(self) -> int:
        if self._lent:
            self._anew()  # now, and not since the last reset
            return max(self._own(), self._recent() - self._allowance)
        strangers = self._unknown + self._graphs + self._frames()
        return max(0, self._recent() - min(strangers, self._allowance))

    def end_bytes(self) -> int:
        return self._end + self._footprint.output_bytes

    def computes(self) -> None:
        self._idle = False

    def rests(self) -> None:
        self._anew()
        self._idle = True

    def lend(self) -> None:
        if not self._lent:
            self._anew()
            self._lent = True

    def resume(self) -> None:
        if self._lent:
            self._anew()
            self._lent = False

    def restart(self) -> None:
        self._anew()
        self._lent = False
        self._before, self._most, self._idle = 0, 0, True
        self._footprint.restart()

    @contextmanager
    def changing(self) -> Iterator[None]:
        self._anew()
        try:
            yield
        finally:
            self._device.reset_peak()

    def fold(self, *, ours: bool) -> None:
        """Note the allocator's peak before it is reset, and whether it may be ours."""
        if self._lent:
            return
        self._most = max(self._most, self._recent())
        if ours and not self._idle:
            self._before = max(self._before, self.live_bytes())

    def _anew(self) -> None:
        """Begin a new peak of the allocator, which all models on a device share.

        What a forward of ours took is a stranger's to the others.
        """
        for meter in self._alike():
            meter.fold(ours=meter is self or not self._watches)
        self._device.reset_peak()

    def _recent(self) -> int:
        return max(0, (self._device.allocated_peak() or 0) - self._others())


_counting: weakref.WeakSet[AllocatorMeter] = weakref.WeakSet()


class LiveOutputs:
    """Bytes of a model's outputs that are still alive."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._seen: dict[int, object] = {}

    def note(self, output: Any) -> None:
        """Count the tensors of an output while their storages live."""
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._hold(storage)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()

        def gone(_: object) -> None:
            del self._seen[key]
            self.n_bytes -= n_bytes

        self.n_bytes += n_bytes
        self._seen[key] = weakref.ref(storage, gone)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made by operations, while they live.

    Storages made before, and those of ``known`` tensors, are not counted.

    Args:
        grown: called with the live bytes at each new peak; may raise, else returns them recounted.
        ours: whether operations belong to the model; False suspends counting.
        passing: tensors in such storages that are counted elsewhere.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),
        grown: Callable[[int], int] | None = None,
        ours: Callable[[], bool] = lambda: True,
        passing: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's modes have no types
        self.live = 0
        self.peak = 0
        self.recent = 0  # the peak since the last reset
        self._grown = grown
        self._ours = ours
        self._passing = passing
        self._seen: dict[int, object] = {t.untyped_storage()._cdata: None for t in known}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # dynamo's guard would cost more than the counting

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **kwargs) if kwargs else func(*args)
        if func.is_view:
            return found
        with without_faults():  # else this would fetch an unbound parameter
            for tensor in tensors_in(found):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._seen:
                    given = (*args, *kwargs.values()) if kwargs else args
                    shared = (t.untyped_storage()._cdata for t in tensors_in(given))
                    if key not in shared:  # else a view, or a write in place
                        self._note(storage, key)
        return found

    def _note(self, storage: torch.UntypedStorage, key: int) -> None:
        n_bytes = storage.nbytes()

        def gone(_: object) -> None:
            del self._seen[key]
            self.live -= n_bytes

        self.live += n_bytes
        self._seen[key] = weakref.ref(storage, gone)
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


class TracedMeter:
    """For "cpu:sim", and RAM without training: all allocations in forward and backward.

    Between the two, the program's own tensors are taken for a copy of the model's outputs.

    Args:
        keeper: returns the enforcer of the budget.
        ours: whether the running forward or backward is of the measured model.
        passing: gradients on their way down; their limit is counted instead, since their number at
            the peak is chance.
    """

    def __init__(
        self,
        footprint: GraphFootprint,
        *,
        keeper: Callable[[], Keeper],
        ours: Callable[[], bool],
        passing: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._footprint = footprint
        self._keeper = keeper
        self._mode = LiveBytes(grown=self._look, ours=ours, passing=passing)
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
            node: Any = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
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

    def prepared(self) -> None: ...

    def changing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def computes(self) -> None: ...

    def rests(self) -> None: ...

    def lend(self) -> None: ...

    def resume(self) -> None: ...


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
    ours: Callable[[], bool],
    keeper: Callable[[], Keeper],
) -> Meter:
    """Return the meter of activations for a device.

    Args:
        gradient_bytes: of the largest gradients made at once.
        traced: whether a mode may watch operations if the device cannot count.
        others: returns bytes of the model that are no activations; for the rest see the meters.
    """
    if device.allocated_peak() is not None:
        return AllocatorMeter(
            *(device, footprint, others), passing=passing, trains=trains, slack_bytes=slack_bytes
        )
    if traced:
        return TracedMeter(footprint, keeper=keeper, ours=ours, passing=passing)
    return BoundMeter(footprint, gradient_bytes)


def _for_passes(run: Callable[..., Any]) -> Callable[..., Any]:
    """Watch backward passes: a mode holds for a pass only if it is on at the start."""

    @functools.wraps(run)
    def watched(roots: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for meter in meters_of(roots):
                stack.enter_context(meter.watching())
            return run(roots, *args, **kwargs)

    return watched


def meters_of(roots: Sequence[Any]) -> list[TracedMeter]:
    """Return the meters of the models whose outputs a graph leads to.

    Other graphs are left alone: compiled code runs differently under any mode.
    """
    found: dict[int, TracedMeter] = {}
    n_there = len(_meters)
    # a root is a tensor or a GradientEdge
    ahead = [node for root in roots if (node := getattr(root, "grad_fn", None) or _node(root))]
    seen = set(ahead)
    while ahead and len(found) < n_there:
        node = ahead.pop()
        meter = node.metadata.get(MADE_BY, noop)()
        if meter is not None:
            found[id(meter)] = meter
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                ahead.append(below)
    return list(found.values())


def _node(root: Any) -> Any:
    return getattr(root, "node", None)


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
