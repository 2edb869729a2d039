"""The count of torch's allocator, for CUDA: whose bytes are on the device (floor 2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hetero.device import Device
from hetero.internals import tree_iter
from hetero.train.activations.held import GraphFootprint

MARGIN = 0.05  # of a measured peak: segments are not reused perfectly, nor are copies equally fast


class DeviceBytes(Protocol):
    """Counts all that is on a device."""

    def now_bytes(self) -> int:
        """Return the present bytes."""

    def peak_bytes(self) -> int:
        """Return their peak since `restart`."""

    def most_bytes(self) -> int:
        """Return as many as there may be, while others keep theirs."""

    def restart(self) -> None:
        """Begin a new peak."""


class AllocatorMeter:
    """For CUDA: the count of torch's allocator, without synchronising, less what is not ours.

    Gradients on their way down cannot be told apart there: they are counted twice.

    [Note: strangers]  Whatever lives on the device when a forward begins and is not ours (another
    model, averages, the batch) is no activation. Strangers that came after `prepare` count all the
    same as far as the device has no room for them outside the budget: frames then give way. Without
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
        self._gone = 0  # bytes of other prepared models that went since the last reset
        self._frames_last = Bytes()
        _counting.add(self)
        told = weakref.finalize(self, _went, device.torch_device, self._frames_last)
        told.atexit = False

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
        """Return the bytes of other prepared models' frames and buffers, at present and as they
        were when a model went: the peak may be older."""
        return sum(meter._others() for meter in self._rivals()) + self._gone

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
            self._device.memory.reset_peak()

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
        begin_peak(self._device, of=self)

    def _recent(self) -> int:
        return max(0, (self._device.memory.allocated_peak() or 0) - self._others())


_counting: weakref.WeakSet[AllocatorMeter] = weakref.WeakSet()
_whole: weakref.WeakSet[AllocatedBytes] = weakref.WeakSet()


def begin_peak(device: Device, *, of: AllocatorMeter | None = None) -> None:
    """Begin a new peak of a device's allocator, after all that read it have noted the last one."""
    for meter in _counting:
        if meter._device.torch_device == device.torch_device:
            meter.fold(ours=of is None or meter is of or not of._watches)
            meter._gone, meter._frames_last.n_bytes = 0, meter._others()
    for count in _whole:
        count.fold(device.torch_device)
    device.memory.reset_peak()


class AllocatedBytes:
    """All bytes of torch's allocator on a device, and their peak since `restart`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._most = 0  # up to the last reset of the allocator's peak
        _whole.add(self)

    def fold(self, place: torch.device) -> None:
        """The allocator's peak of a device is about to be reset."""
        if place == self._device.torch_device:
            self._most = max(self._most, self._device.memory.allocated_peak() or 0)

    def now_bytes(self) -> int:
        return self._device.memory.allocated_bytes() or 0

    def peak_bytes(self) -> int:
        return max(self._most, self._device.memory.allocated_peak() or 0)

    def most_bytes(self) -> int:
        """Return as many bytes as the allocator may ever have while others keep theirs."""
        return (self._device.memory.free_bytes() or 0) + self._device.memory.reserved_bytes()

    def restart(self) -> None:
        """Begin a new peak."""
        begin_peak(self._device)
        self._most = 0


class Bytes:
    """A number that outlives the meter which counted it."""

    __slots__ = ("n_bytes",)

    def __init__(self) -> None:
        self.n_bytes = 0


def _went(place: torch.device, last: Bytes) -> None:
    """A prepared model goes: its bytes are still in the allocator's peak."""
    for meter in _counting:
        if meter._device.torch_device == place:
            meter._gone += last.n_bytes


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
