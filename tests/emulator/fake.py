"""An emulated CUDA device: hetero/device/cuda.py runs on it, line by line, without a GPU.

A C++ backend (csrc/) makes torch's PrivateUse1 a device "fakecuda" whose memory is RAM. Tensors on
it have a device of their own, mixing them with the CPU's is an error, `Parameter.data` may change
devices, and autograd runs backward in a thread of the device, as for CUDA. Streams and events are
vector clocks.

What it finds:

races     a kernel, a copy or an operation of the host at page-locked memory, and an access of
          another stream to the same 32 bytes, one of them a write, that no event, wait or
          synchronisation orders (`found`)
lifetime  memory that goes back to torch's allocator while a lane uses it, or comes from it and is
          written by a lane that is not after the stream it was allocated on; page-locked memory
          that is unregistered under a copy; a thread at bytes that a lane copies (`found`)
stalls    each place where the host waits for the device (`stalls`), and copies by kind (`copies`)
devices   operations on tensors of two devices: RuntimeError, as torch's
limits    HBM of a size, with torch's OutOfMemoryError, and page-locked memory (`limit`)

Kernels are the CPU's: it says nothing of CUDA's numbers, its speed or fragmentation.

Tests: `tests/emulator/plugin.py`. A script calls `load` before its first backward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from hetero.device import CudaDevice
from tests.emulator import build
from tests.emulator.install import install
from tests.emulator.shim import DEVICE, Cuda, register

PLACE = f"{DEVICE}:0"
OURS = tuple(str(Path(__file__).parent / name) for name in ("fake.py", "install.py", "shim.py"))
UNSEEN = (*OURS, "/threading.py", "/contextlib.py")
DOORS = ("device/cuda.py", "memory/link.py")  # every wait passes them


class Stall(NamedTuple):
    """A place where the host waited."""

    what: str
    where: str
    """Functions of hetero, the innermost first."""
    thread: str


_stalls: Counter[Stall] = Counter()
_lock = threading.Lock()


class Finding(NamedTuple):
    """Two accesses that no one ordered."""

    kind: str
    now: str
    then: str
    count: int
    stack: str

    def __repr__(self) -> str:
        return f"{self.kind} ({self.count}x)\n  now: {self.now}\n  then: {self.then}\n{self.stack}"


@functools.cache
def load() -> ModuleType:
    """Make the device, for the rest of this process; RuntimeError if that is too late."""
    return _load()[0]


def cuda() -> Cuda:
    """Return what hetero takes for `torch.cuda`."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ModuleType, Cuda]:
    extension = build.load()
    extension.init(_stack, _stalled)
    made = Cuda(extension, _stalled)
    register(made)
    _check_autograd()
    install(extension, made)
    return extension, made


def _check_autograd() -> None:
    """torch makes a thread for each device in a process's first backward, and none later."""
    try:
        torch.ones(1, device=PLACE, requires_grad=True).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(
            "the emulated device came after the first backward of this process: call "
            "tests.emulator.fake.load() before, or run the test by pytest"
        ) from error


def device(**facts: object) -> CudaDevice:
    """Return a fresh CudaDevice with the facts of `shim.Facts` (name, major, total_memory ...)."""
    cuda().facts.become(facts)
    return CudaDevice()


def on_device(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module to the device, as `module.cuda()`."""
    return module.to(PLACE)


def start(seed: int = 0) -> None:
    """Begin to watch, with nothing found yet; ``seed`` draws which events are found done."""
    cuda().chance.seed(seed)
    load().reset()
    _stalls.clear()
    load().watch(True)


def stop() -> None:
    """Watch no longer; what was found stays."""
    load().watch(False)


def found() -> list[Finding]:
    """Return the races and early frees since `start`."""
    return [Finding(f.kind, f.now, f.then, f.count, f.stack) for f in load().findings()]


def stalls() -> Counter[Stall]:
    """Return how often the host waited since `start`, by (what, where, thread)."""
    return Counter(_stalls)


def forget_stalls() -> None:
    """Count stalls anew, as at the begin of a step."""
    _stalls.clear()


def copies() -> Counter[str]:
    """Return the copies between host and device since `start`, by "asynchronous copy up" ..."""
    return Counter(load().copies())


def total_bytes() -> int:
    """Return the size of HBM as the driver says it."""
    return cuda().facts.total_memory


def allocated_bytes() -> int:
    """Return the bytes of HBM in tensors, as `torch.cuda.memory_allocated`."""
    return cuda().memory_allocated()


def pinned_bytes() -> int:
    """Return the bytes that are page-locked."""
    return int(load().pinned_bytes())


@contextlib.contextmanager
def limit(hbm: int | None = None, pinned: int | None = None) -> Iterator[None]:
    """Give the device ``hbm`` bytes, as reported and enforced, and let cudaHostRegister accept
    ``pinned`` bytes in all. None: as before."""
    shim, extension = cuda(), load()
    total, accepted, enforced = shim.facts.total_memory, shim.pinned_limit, extension.hbm_limit()
    if hbm is not None:
        shim.facts.total_memory = hbm
        extension.limit_hbm(hbm)
    if pinned is not None:
        shim.pinned_limit = pinned
    try:
        yield
    finally:
        shim.facts.total_memory, shim.pinned_limit = total, accepted
        extension.limit_hbm(enforced)


def _frames(limit: int) -> list[str]:
    """Return the innermost frames outside of the emulator, innermost last."""
    rows = []
    for frame in traceback.extract_stack():
        name = frame.filename
        if name.endswith(UNSEEN):
            continue
        short = name.split("site-packages/")[-1]
        short = "hetero/" + short.split("/hetero/")[-1] if "/hetero/" in short else short
        rows.append(f"{short}:{frame.lineno} {frame.name}")
    return rows[-limit:]


def _stack() -> str:
    return f"[{threading.current_thread().name}]\n" + "\n".join(_frames(14))


def _stalled(what: str) -> None:
    """The host waits for the device: note where."""
    ours = [row for row in _frames(60) if row.startswith("hetero/")]
    ours = [row for row in ours if not any(door in row for door in DOORS)] or ours
    where = " <- ".join(reversed(ours[-4:])) or "outside of hetero"
    name = threading.current_thread().name
    stall = Stall(what, where, "backward" if name.startswith("Dummy") else name)
    with _lock:
        _stalls[stall] += 1
