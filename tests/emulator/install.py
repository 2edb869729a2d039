"""hetero's device room on the emulated device, its lanes named, its compiled kernel watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

import hetero.device as room
from hetero.device import cuda as cuda_module
from hetero.device import face, lanes, locked, memory, process, rates
from hetero.device.cuda import CudaDevice
from hetero.device.face import Ticket
from hetero.train.activations import slices
from hetero.train.update import formulas, kernel
from hetero.types import Lane
from tests.emulator.shim import DEVICE, Cuda, Torch

ASK_THE_PLACE = ("allocated", "accelerator_rng", "set_accelerator_rng")
QUEUES = ("memory/link.py", "device/cuda.py")  # they copy for others


def install(extension: ModuleType, cuda: Cuda) -> None:
    """Do all of it, for the rest of this process."""
    proxy = Torch(cuda)
    for module in (cuda_module, face, lanes, locked, memory, process, rates, room):
        vars(module)["torch"] = proxy
    for name in ASK_THE_PLACE:
        answer = as_cuda(getattr(process, name))
        for module in (process, room, slices):
            if hasattr(module, name):
                setattr(module, name, answer)
    record_streams(extension)
    name_lanes(extension)
    label_copies(extension)
    watch_kernel(extension)
    put(formulas.Ops, "sqrt", exact_sqrt)


def put(owner: type, name: str, method: Callable[..., Any]) -> None:
    """Replace a method for as long as this process lives."""
    setattr(owner, name, method)


def as_cuda(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for which the emulated device is of the type "cuda"."""

    def ask(place: torch.device, *rest: Any) -> Any:
        return plain(SimpleNamespace(type="cuda") if place.type == DEVICE else place, *rest)

    return ask


def name_lanes(extension: ModuleType) -> None:
    plain = CudaDevice.__init__

    def named(self: CudaDevice, index: int | None = None) -> None:
        plain(self, index)
        for lane, stream in self._lanes.streams.items():
            extension.name_stream(stream.cuda_stream, f"{lane.value} lane")

    put(CudaDevice, "__init__", named)


def record_streams(extension: ModuleType) -> None:
    """Let `Tensor.record_stream` take the emulated streams."""
    plain = torch.Tensor.record_stream

    def record(self: torch.Tensor, stream: Any) -> None:
        if self.device.type == DEVICE:
            extension.record_stream(self.data_ptr(), stream.cuda_stream)
        else:
            plain(self, stream)

    torch.Tensor.record_stream = record  # takes our streams


def label_copies(extension: ModuleType) -> None:
    """Let findings say which function of hetero asked for a copy."""
    plain = CudaDevice.copy

    def labelled(
        self: CudaDevice,
        lane: Lane,
        dst: torch.Tensor,
        src: torch.Tensor,
        after: Iterable[Ticket] = (),
    ) -> Ticket:
        old = extension.set_label(f"{lane.value} by {caller()}")
        try:
            return plain(self, lane, dst, src, after)
        finally:
            extension.restore_label(old)

    CudaDevice.copy = labelled  # for this process


def caller() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/hetero/" in name and not name.endswith(QUEUES):
            return f"{Path(name).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def exact_sqrt(self: formulas.Ops, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """As CUDA's, a square root is rounded correctly; that of the CPU's vectors is not."""
    return out.copy_(x.double().sqrt())


def watch_kernel(extension: ModuleType) -> None:
    """Tell of what the compiled update reads and writes, alone or shared by threads: torch does not
    see it."""
    alone, shared = kernel.Library.update, kernel.Library.share

    @contextmanager
    def told(job: kernel.RunArgument) -> Iterator[None]:
        low_bytes, grad_bytes = (2, 4)[job.layout == 1], (2, 4)[job.kind == 2]
        uses = [(job.hi, 2, True), (job.low, low_bytes, True), (job.grad, grad_bytes, False)]
        uses += ((state, 4, True) for state in job.states if state)
        held = [
            extension.host_begin(at, job.n * size, write, "update kernel")
            for at, size, write in uses
        ]
        try:
            yield
        finally:
            for key in held:
                extension.host_end(key)

    def update(self: kernel.Library, c: Any, run: kernel.Operands) -> None:
        with told(kernel.run_argument(c, run)):
            alone(self, c, run)

    def share(self: kernel.Library, c: Any, job: kernel.RunArgument, left: Any) -> None:
        with told(job):
            shared(self, c, job, left)

    kernel.Library.update = update  # tells of reads
    kernel.Library.share = share  # and of those by several threads
