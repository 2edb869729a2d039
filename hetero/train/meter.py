"""How many bytes are on the device beside frames: the allocator's count, a traced one, or a bound
(floor 2).
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from hetero.device import Device
from hetero.errors import BudgetError
from hetero.train.footprint import Footprint
from hetero.train.swizzle import plainly

EXPECTED = 4  # models between a forward and a step, that backward passes are watched for
MARGIN = 0.05  # of a measured peak: segments are not perfectly reused, nor copies equally fast


class Meter(Protocol):
    """Measures a step; bytes of frames and of buffers are not counted."""

    def watching(self) -> AbstractContextManager[None]:
        """Measure inside the block: the model's forward, or a backward."""

    def peak_bytes(self) -> int:
        """Return the most bytes there were at once since `restart`."""

    def restart(self) -> None:
        """Begin a new measurement."""


class BoundMeter:
    """For RAM: what graphs hold, with a bound on temporaries and on gradients in flight."""

    def __init__(self, footprint: Footprint, in_flight_bytes: int) -> None:
        self._footprint = footprint
        self._in_flight_bytes = in_flight_bytes

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def peak_bytes(self) -> int:
        return self._footprint.bound_bytes + self._in_flight_bytes

    def restart(self) -> None:
        self._footprint.restart()


class AllocatorMeter:
    """For CUDA: torch's allocator counts, without synchronising. ``others`` is what is not ours."""

    def __init__(self, device: Device, footprint: Footprint, others: Callable[[], int]) -> None:
        self._device = device
        self._footprint = footprint
        self._others = others

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def peak_bytes(self) -> int:
        peak = (self._device.allocated_peak() or 0) - self._others()
        return int((1 + MARGIN) * max(0, peak))

    def restart(self) -> None:
        self._device.reset_peak()
        self._footprint.restart()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, for as long as they live.

    What lives already, and ``known`` tensors, are not counted. ``grown`` is called with the bytes
    alive whenever they are more than ever; it may raise. What is no business of ours, by ``ours``,
    makes no peak.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),
        grown: Callable[[int], None] | None = None,
        ours: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._grown = grown
        self._ours = ours
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        with plainly():  # a parameter that is not bound would be fetched for the question
            for tensor in tensors_in(found):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    given = (*args, *kwargs.values()) if kwargs else args
                    shared = (t.untyped_storage()._cdata for t in tensors_in(given))
                    if storage._cdata not in shared:  # or it is a view, or written in place
                        self._note(storage)
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.live += n_bytes
        weakref.finalize(storage, self._gone, key, n_bytes)
        if self.live > self.peak and self._ours():
            self.peak = self.live
            if self._grown is not None:
                self._grown(self.live)

    def _gone(self, key: int, n_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= n_bytes


class TracedMeter:
    """For "cpu:sim": every allocation of an operation in the model's forward and in backward.

    What a program computes between the two, by itself, is taken for a copy of the model's outputs.

    Args:
        check: called with the bytes alive when they are more than ever; raises where the budget
            does not hold them.
        ours: whether this forward or backward is of the model that is measured.
        in_flight_bytes: what may be on its way down at the peak, and was not this time.
    """

    def __init__(
        self,
        footprint: Footprint,
        *,
        check: Callable[[int], None],
        ours: Callable[[], bool],
        in_flight_bytes: int,
    ) -> None:
        self._footprint = footprint
        self._in_flight_bytes = in_flight_bytes
        self._check = check
        self._mode = LiveBytes(grown=self._look, ours=ours)
        self._runs = guard_backward()

    def _look(self, live_bytes: int) -> None:
        try:
            self._check(live_bytes)
        except BudgetError:
            gc.collect()  # graphs in cycles (`create_graph=True`) live until somebody looks
            self._check(self._mode.live)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._runs.expect(self)
        if _get_current_dispatch_mode() is self._mode:  # a backward inside a forward
            yield
            return
        with self._mode:
            yield

    def peak_bytes(self) -> int:
        besides = self._footprint.output_bytes + self._in_flight_bytes
        return int((1 + MARGIN) * self._mode.peak) + besides

    def restart(self) -> None:
        self._runs.forget(self)
        self._mode.peak = self._mode.live
        self._footprint.restart()


class Runs:
    """Whose backward passes are to be expected: models that have had a forward, and no step."""

    def __init__(self) -> None:
        self._expected: list[weakref.ref[TracedMeter]] = []  # the latest last

    def expect(self, meter: TracedMeter) -> None:
        """A forward ran; where many did, and nothing came of them, the oldest are given up."""
        self.forget(meter)
        self._expected = [*self._expected[1 - EXPECTED :], weakref.ref(meter)]

    def forget(self, meter: TracedMeter) -> None:
        """A step was made, or is not to be."""
        self._expected = [ref for ref in self._expected if ref() not in (None, meter)]

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return autograd's engine with all expected meters watching."""

        @functools.wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for meter in [ref() for ref in self._expected]:
                    if meter is not None:
                        stack.enter_context(meter.watching())
                return run(*args, **kwargs)

        return watched


def guard_backward() -> Runs:
    """Have backward passes watched: a mode holds for a pass only where it is on as it begins."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward
    if not hasattr(run, "hetero_runs"):
        runs = Runs()
        autograd._engine_run_backward = runs.watched(run)
        autograd._engine_run_backward.hetero_runs = runs
        return runs
    found: Runs = run.hetero_runs
    return found


def unmeasured() -> AbstractContextManager[Any]:
    """Let operations on HOST inside a block count for nothing."""
    if _get_current_dispatch_mode() is None:
        return nullcontext()
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in an operation's arguments or results: no pytree, for speed."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
