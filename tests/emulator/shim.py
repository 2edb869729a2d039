"""`torch.cuda` as hetero's device room sees it, over the emulated device.

It has the real API's names and no others: `cudart()` binds only what torch binds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch

DEVICE = "fakecuda"
POOL = 32  # streams that torch hands out in turn
LAZY = 0.25  # how often an event that no one waited for is found done
MEMORY_ALLOCATION, ALREADY_REGISTERED, NOT_REGISTERED = 2, 712, 713  # cudaError_t


@dataclass
class Facts:
    """What the driver says of the device."""

    name: str = "fake"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 1 << 36
    is_integrated: int = 0
    is_expandable: bool = False
    """Of all the allocator's segments."""
    uuid: str = field(default_factory=lambda: f"GPU-{os.getpid()}")

    def become(self, facts: dict[str, Any]) -> None:
        """Take these facts, and the usual ones for the others."""
        fresh = Facts(**facts)
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))


class Cuda:
    """The names of `torch.cuda`, as attributes of an object."""

    def __init__(self, extension: ModuleType, stalled: Any) -> None:
        self._e, self._stalled = extension, stalled
        self._ids = itertools.count()
        self.chance = random.Random(0)
        self.facts = Facts()
        self.pinned_limit: int | None = None
        self._thread = threading.local()
        self.elsewhere = 0
        """The current device of threads that have not chosen one."""
        self.contexts: set[int] = set()
        """Devices that a thread chose, or page-locked memory on: each takes HBM for it."""
        self.backend = "native"
        """torch's allocator."""
        self.captures = False
        """Whether a graph is captured."""
        self.fraction = 1.0
        """Of the device's memory, that torch's allocator may take."""
        self.late: list[Late] = []
        """What happens on the device after it was queued, oldest first; all else does at once."""
        self.nvtx = SimpleNamespace(range_start=lambda name: 1, range_end=lambda handle: None)

    def Stream(self, device: object = None, priority: int = 0) -> Stream:
        number = 1 + next(self._ids) % POOL
        self._e.name_stream(number, "")  # of a device that had it before
        return Stream(self, number)

    def Event(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        return Event(self, enable_timing)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        """The thread's; there is one, and a test may say that it is another."""
        return int(getattr(self._thread, "device", self.elsewhere))

    @contextlib.contextmanager
    def device(self, place: torch.device) -> Iterator[None]:
        before = self.current_device()
        self._choose(place.index or 0)
        try:
            yield
        finally:
            self._thread.device = before  # which stays as it is if it has no context

    def _choose(self, index: int) -> None:
        """Make a device the thread's current one; if it was another one, that makes a context."""
        if index != self.current_device():
            self.contexts.add(index)
        self._thread.device = index

    def current_stream(self, device: object = None) -> Stream:
        return Stream(self, self._e.get_stream())

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def default_stream(self, device: object = None) -> Stream:
        return Stream(self, 0)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        old, before = self._e.set_stream(stream.id), self.current_device()
        self._choose(stream.device.index)
        try:
            yield
        finally:
            self._e.set_stream(old)
            self._choose(before)  # by `set_stream`, whether it has a context or not

    def synchronize(self, device: object = None) -> None:
        self.happen(None)
        self._e.device_sync()

    def happen(self, event: Any) -> None:
        """Let happen what comes before an event; None: all. The host waits: it is the device."""
        for work in list(self.late):
            if event is None or event.covers(work.end):
                work.happen()
                with contextlib.suppress(ValueError):  # another thread was here
                    self.late.remove(work)

    def is_late(self, event: Any) -> bool:
        """Whether something before an event cannot happen yet."""
        return any(event.covers(work.end) and not work.can_happen() for work in list(self.late))

    def cudart(self) -> Cudart:
        return Cudart(self)

    def _sleep(self, cycles: int) -> None: ...

    def get_device_properties(self, device: object = None) -> Facts:
        return self.facts

    def get_device_name(self, device: object = None) -> str:
        return self.facts.name

    def memory_reserved(self, device: object = None) -> int:
        return int(self._e.memory()[0])

    memory_allocated = memory_reserved

    def max_memory_allocated(self, device: object = None) -> int:
        return int(self._e.memory()[1])

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._e.reset_peak()

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        total = self.facts.total_memory
        return total - self._e.memory()[0], total

    def get_per_process_memory_fraction(self, device: object = None) -> float:
        return self.fraction

    def get_allocator_backend(self) -> str:
        return self.backend

    def memory_snapshot(self) -> list[dict[str, Any]]:
        if self.backend != "native":
            raise RuntimeError(f"Calling snapshot with backend:{self.backend} is not meaningful")
        return [{"device": 0, "is_expandable": self.facts.is_expandable}]

    def memory_stats(self, device: object = None) -> dict[str, int]:
        now, peak = self._e.memory()
        kinds = ("allocated_bytes.all.current", "reserved_bytes.all.current")
        return {**dict.fromkeys(kinds, now), "allocated_bytes.all.peak": peak}

    def memory_stats_as_nested_dict(self, device: object = None) -> dict[str, Any]:
        now, peak = self._e.memory()
        counts = {"all": {"current": now, "peak": peak}}
        return {"allocated_bytes": counts, "reserved_bytes": counts}

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # kernels draw from the CPU's generator

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None: ...


class Late(Protocol):
    """Work on a stream that takes until other processes have done theirs."""

    end: Any
    """The event after it."""

    def can_happen(self) -> bool: ...

    def happen(self) -> None:
        """Let it happen; blocks until it can."""


class Stream:
    """One of the pool's streams, or compute's (0)."""

    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda, self.id = cuda, number
        self.device = torch.device(DEVICE, 0)

    @property
    def cuda_stream(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def wait_event(self, event: Event) -> None:
        self.cuda.happen(event.event)
        self.cuda._e.stream_wait(self.id, event.event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.cuda.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.happen(self.record_event().event)
        if self.cuda._e.stream_sync(self.id):
            self.cuda._stalled("stream.synchronize")


class Event:
    """A clock's value. `query` is true at random before anyone waits: kernels just end."""

    def __init__(self, cuda: Cuda, enable_timing: bool) -> None:
        self.cuda, self.event = cuda, cuda._e.Event()
        self._timed, self._seconds = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.event.record(self.cuda._e.get_stream() if stream is None else stream.id)
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        if self.event.known():
            return True
        if self.cuda.is_late(self.event):
            return False
        done = self.cuda.chance.random() < LAZY
        if done:
            self.cuda.happen(self.event)
            self.event.sync()
        return done

    def synchronize(self) -> None:
        self.cuda.happen(self.event)
        if not self.event.known():
            self.cuda._stalled("event.synchronize")
        self.event.sync()

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event.recorded and end.event.recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return max(1e3 * (end._seconds - self._seconds), 1e-3)


class Cudart:
    """What torch binds of the runtime (torch/csrc/cuda/shared/cudart.cpp): no cudaGetLastError."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        if pointer % 4096:
            raise ValueError("not a page's address")
        self._cuda.contexts.add(self._cuda.current_device())
        limit, e = self._cuda.pinned_limit, self._cuda._e
        if limit is not None and e.pinned_bytes() + size > limit:
            e.refuse()
            return MEMORY_ALLOCATION
        return 0 if e.pin(pointer, size) else ALREADY_REGISTERED

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0 if self._cuda._e.unpin(pointer) else NOT_REGISTERED


class Torch:
    """torch, with the emulated `cuda` and a device of that name."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.utils = SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=self.from_dlpack))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: object, *index: int) -> torch.device:
        return torch.device(DEVICE if kind == "cuda" else kind, *index)

    def from_dlpack(self, source: Any) -> torch.Tensor:
        """As for CUDA: a storage of its own over the same bytes."""
        if isinstance(source, torch.Tensor):
            if source.device.index not in (None, self.cuda.current_device()):
                raise BufferError("Can't export tensors on a different CUDA device index")
            source = torch._C._to_dlpack(source)
        return torch._C._from_dlpack(source)


def register(cuda: Cuda) -> None:
    """Give torch the module that it asks for a device of this name."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    module = ModuleType(f"torch.{DEVICE}")
    answers = {
        "device": lambda *place: contextlib.nullcontext(),
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_rng_state": cuda.get_rng_state,
        "set_rng_state": cuda.set_rng_state,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_autocast_enabled": lambda: False,
    }
    vars(module).update(answers)
    torch._register_device_module(DEVICE, module)
