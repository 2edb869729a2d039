"""csrc/update.c on CUDA devices: one pass over memory, compiled when it is first needed (floor 2).

NVRTC compiles the functions that the CPU's library is made of, so both round alike; a kernel is for
one rule, one layout of masters and one kind of gradient. Triton would need a host's C compiler for
its launcher when it first runs. Without NVRTC, or if anything fails, updates are torch's
operations, with the same bits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hetero.device import CudaKernel, NoKernel, Toolchain, open_toolchain
from hetero.train.update.formulas import Coefficients
from hetero.train.update.kernel import Library, Native, Operands, load, run_argument

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "update.c"
THREADS, QUAD = 256, 4  # of a block; elements that a thread takes at once: as in update.c
LAYOUTS = {torch.bfloat16: "split, int16_t", torch.float16: "whole, float"}
GRADS = {
    torch.bfloat16: "bfloat, uint16_t",
    torch.float16: "half, uint16_t",
    torch.float32: "float, float",
}
TORCH = "torch's operations, with the same bits"


class KernelKind(NamedTuple):
    """A kernel that can be made of update.c."""

    rule: str
    layout: torch.dtype
    """Of the working weights."""
    grad: torch.dtype
    n_states: int

    @property
    def line(self) -> str:
        """The line that defines it, after update.c."""
        return f"KERNEL({self.rule}, {LAYOUTS[self.layout]}, {GRADS[self.grad]}, {self.n_states})"

    @property
    def name(self) -> str:
        words = (self.rule, LAYOUTS[self.layout].split(",")[0], GRADS[self.grad].split(",")[0])
        return "_".join(words)


ADAMW = KernelKind("adam", torch.bfloat16, torch.bfloat16, 2)


class DeviceLibrary:
    """csrc/update.c as kernels of CUDA devices; calls queue them on the current stream."""

    def __init__(
        self, toolchain: Callable[[], Toolchain] = open_toolchain, kind: str = "cuda"
    ) -> None:
        self._toolchain = toolchain
        self._kind = kind
        self._found: dict[tuple[torch.device, KernelKind], CudaKernel | str] = {}
        self._lock = threading.Lock()
        self.problem = ""
        """Why an update was left to torch's operations; empty while none was."""

    @property
    def condition(self) -> str:
        """What updates run as, in words."""
        if self.problem:
            return f"{TORCH}: {self.problem}"
        return "compiled" if self._found else "compiled when it is first needed"

    def takes(self, place: torch.device) -> bool:
        return place.type == self._kind

    def sharing(self, place: torch.device) -> Library | None:
        return None  # a launch takes a run of any length

    def update(self, c: Coefficients, run: Operands) -> None:
        param = run.param
        kind = KernelKind(c.rule, param.dtype, run.grad.dtype, len(run.states))
        kernel = self.kernel(kind, param.device)
        job = run_argument(c, run)
        if param.numel() == 0:
            return
        try:
            kernel.launch(job, blocks=-(-param.numel() // (THREADS * QUAD)), threads=THREADS)
        except NoKernel as error:
            self.problem = self.problem or str(error)
            raise

    def kernel(self, kind: KernelKind, place: torch.device) -> CudaKernel:
        """Return a kernel, compiled once for each device; NoKernel if there is none."""
        with self._lock:
            if (place, kind) not in self._found:
                self._found[place, kind] = self._build(kind, place)
            found = self._found[place, kind]
        if isinstance(found, str):
            raise NoKernel(found)
        return found

    def try_out(self, place: torch.device) -> str:
        """Compile AdamW's kernel for bf16; returns why there is none, or ''."""
        try:
            self.kernel(ADAMW, place)
        except NoKernel as error:
            return str(error)
        return ""

    def _build(self, kind: KernelKind, place: torch.device) -> CudaKernel | str:
        """Return a kernel, or why there is none."""
        try:
            source = f"{SOURCE.read_text(encoding='utf-8')}\n{kind.line}\n"
            return self._toolchain().build(source, kind.name, place)
        except (NoKernel, OSError) as error:
            self.problem = self.problem or str(error)
            return str(error)


class Natives:
    """Compiled passes, each for tensors of its kind of device.

    Args:
        say: is told once why one of them leaves its work to torch's operations.
    """

    def __init__(self, passes: Sequence[Native], say: Callable[[str], None]) -> None:
        self._passes = passes
        self._say = say
        self._said = False

    def takes(self, place: torch.device) -> bool:
        return any(each.takes(place) for each in self._passes)

    def sharing(self, place: torch.device) -> Library | None:
        return next(filter(None, (each.sharing(place) for each in self._passes)), None)

    def update(self, c: Coefficients, run: Operands) -> None:
        one = next(each for each in self._passes if each.takes(run.param.device))
        try:
            one.update(c, run)
        except NoKernel as error:
            if not self._said:
                self._said = True
                self._say(f"updates on {run.param.device} run as {TORCH}: {error}")
            raise


@functools.cache
def load_device() -> DeviceLibrary:
    """Return the kernels of this process's CUDA devices; nothing is compiled yet."""
    return DeviceLibrary()


def native_on(kind: str) -> Native | None:
    """Return the compiled pass over tensors of a kind of device, if there may be one."""
    return load() if kind == "cpu" else load_device()


def natives(say: Callable[[str], None]) -> Natives:
    """Return the compiled passes of this process."""
    library: Library | None = load()
    return Natives([load_device()] if library is None else [library, load_device()], say)


def conditions(place: torch.device) -> dict[str, str]:
    """Return, for each kind of device on which a model on ``place`` is updated, how."""
    found = {"cpu": TORCH if load() is None else "compiled"}
    if place.type == "cuda":
        found["cuda"] = load_device().condition
    return found
