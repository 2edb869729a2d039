"""torch's allocators and generators, and the C library's heap, in this process."""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from hetero.internals import current_mode, without_modes

_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_RETURNS = threading.Event()
"""Set once large blocks stay out of the heap for good."""
MT_WORDS = 624  # of a Mersenne Twister's state


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def finish_compute() -> None:
    """Wait for everything queued on the CUDA device, if there is one (benchmarks)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


_NOTHING = nullcontext()


def unseen() -> AbstractContextManager[Any]:
    """Hide a block's operations from the program's dispatch modes, which would count them."""
    if current_mode() is None:
        return _NOTHING
    manager: AbstractContextManager[Any] = without_modes()
    return manager


def n_accelerators() -> int:
    """Return the number of CUDA devices that this process sees."""
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def use_accelerator(number: int) -> None:
    """Compute on the CUDA device of a number from here on, or of its remainder; without one, on
    CPUs."""
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def accelerator_name() -> str | None:
    """Return the CUDA device's name, None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def settle_backward_at_exit(device: torch.device) -> None:
    """Let the interpreter end only when the thread of a device's backward has let go of Python.

    That thread frees what it ran (graph nodes, hooks, what they saved) after `backward` returned or
    raised. If the interpreter ends meanwhile, it ends the thread inside of torch, and that aborts
    the process: SIGABRT in place of the exit status.
    """
    if not _TASKS:
        atexit.register(_settle_backward)
    if device not in _TASKS:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.empty(1, device=device, requires_grad=True)
            view, grad = leaf.view(-1), torch.empty(1, device=device)
        _TASKS[device] = os.getpid(), partial(torch.autograd.backward, view, grad, inputs=[leaf])


FREED_SECONDS = 0.1
"""In which a thread of backward frees a task of one node: microseconds, if it has a core."""
_TASKS: dict[torch.device, tuple[int, Callable[[], None]]] = {}
"""By device: the process that uses it, and a task of no work for its backward."""


def _settle_backward() -> None:
    """Return when the threads of backward have finished what they were given before: each takes one
    task after another.

    This one is a view's, which launches no kernel. What is left of it, the thread frees when the
    caller goes on already: nothing tells when that is over, so it is given a moment.
    """
    for pid, task in _TASKS.values():
        if pid == os.getpid():  # a fork has no such thread
            with suppress(RuntimeError):  # a device that failed takes no work
                task()
            time.sleep(FREED_SECONDS)


def return_large_blocks() -> None:
    """Return memory of freed tensors of 4 MiB and more to the system at once, in this process.

    glibc raises that bound to the size of a freed block, up to 32 MiB, and keeps such blocks in a
    heap that fragments: a model three times its RAM took twice its budget (measured). Returning the
    smaller temporaries of updates too makes AdamW three times slower (measured, 1 MiB blocks).
    """
    _RETURNS.set()
    _bound_blocks(4 * 2**20, 16 * 2**20)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Keep tensors of 4 MiB and more out of the heap inside a ``with`` block, in this process.

    One that is freed while smaller ones come after it leaves a hole there, which later tensors fill
    and the heap then keeps: of a model built and moved away, up to all of its bytes (measured). The
    bounds after the block are those that glibc comes to by itself.
    """
    _bound_blocks(4 * 2**20, 16 * 2**20)
    try:
        yield
    finally:
        if not _RETURNS.is_set():
            _bound_blocks(32 * 2**20, 64 * 2**20)


def _bound_blocks(mapped: int, top: int) -> None:
    """Let blocks of ``mapped`` bytes have pages of their own, and the heap at most ``top`` free
    bytes at its end."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, mapped)
        libc.mallopt(_M_TRIM_THRESHOLD, top)
    except (OSError, AttributeError):
        return  # not glibc


class Allocated(NamedTuple):
    """The counts of torch's allocator on a device, in bytes."""

    now_bytes: int
    peak_bytes: int
    """Since the process, or its last reset, began."""
    reserved_bytes: int
    """Taken from the driver: tensors, and blocks kept for the next ones."""


def allocated(place: torch.device) -> Allocated | None:
    """Return the counts of torch's allocator; None on a CPU."""
    return counts(place) if place.type == "cuda" else None


def counts(place: torch.device) -> Allocated:
    """Return the counts of a CUDA device's allocator; zeros before CUDA has begun.

    A meter asks after every unit: `torch.cuda.memory_stats` makes 140 names and sorts them first.
    """
    stats = torch.cuda.memory_stats_as_nested_dict(place)
    if not stats:
        return Allocated(0, 0, 0)
    held, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return Allocated(held["current"], held["peak"], reserved["current"])


def counts_memory(place: torch.device) -> bool:
    """Whether the allocator of a CUDA device, on which a tensor is, counts its bytes."""
    try:
        return counts(place).now_bytes > 0
    except RuntimeError:  # an allocator of a program's own
        return False


class Fragments(NamedTuple):
    """How a CUDA device's memory is cut, as torch's allocator tells, in bytes."""

    total_bytes: int
    """Of the device."""
    free_bytes: int
    """Free for any process."""
    reserved_bytes: int
    """Taken from the driver by this process's allocator."""
    allocated_bytes: int
    """Of those, in tensors."""
    largest_free_bytes: int
    """The largest piece that the allocator holds and no tensor uses."""
    n_free: int
    """How many such pieces."""
    n_segments: int
    """Blocks taken from the driver."""
    n_retries: int
    """How often it gave blocks back to the driver to find room."""
    expands: bool
    """Whether its segments grow, so that free memory is in one piece."""

    @property
    def unused_bytes(self) -> int:
        return max(0, self.reserved_bytes - self.allocated_bytes)


def keeps_segments() -> bool:
    """Whether torch's allocator cuts segments of its own; cudaMallocAsync, which the driver serves,
    refuses to tell of any."""
    return str(torch.cuda.get_allocator_backend()) == "native"


def fragments(place: torch.device) -> Fragments | None:
    """Return how the memory of a CUDA device is cut; None on a CPU, and where drivers cut it."""
    if place.type != "cuda" or not keeps_segments():
        return None
    free, total = torch.cuda.mem_get_info(place)
    held = counts(place)
    index = torch.cuda.current_device() if place.index is None else place.index
    segments = [s for s in torch.cuda.memory_snapshot() if s.get("device") == index]
    blocks = [block for segment in segments for block in segment.get("blocks", ())]
    unused = [int(block["size"]) for block in blocks if block["state"] == "inactive"]
    stats = torch.cuda.memory_stats(place)
    return Fragments(
        total_bytes=int(total),
        free_bytes=int(free),
        reserved_bytes=held.reserved_bytes,
        allocated_bytes=held.now_bytes,
        largest_free_bytes=max(unused, default=0),
        n_free=len(unused),
        n_segments=len(segments),
        n_retries=int(stats.get("num_alloc_retries", 0)),
        expands=any(segment.get("is_expandable") for segment in segments),
    )


def accelerator_rng(place: torch.device) -> torch.Tensor | None:
    """Return the state of a CUDA device's generator; None for a CPU."""
    return torch.cuda.get_rng_state(place) if place.type == "cuda" else None


def check_accelerator_rng(place: torch.device, state: torch.Tensor) -> None:
    """Try a state on a CUDA generator of our own; RuntimeError if it is not one."""
    if place.type == "cuda":
        torch.Generator(place).set_state(state)


def checked_rng(state: torch.Tensor) -> torch.Tensor:
    """Return the state of a CPU generator; ValueError if it would read beyond its words.

    It begins like ``at::mt19937``: a seed, then ``left`` (one more than the draws until new words
    are made) and ``next`` (the word drawn next). torch only checks each alone.
    """
    if state.dtype is not torch.uint8 or state.numel() != torch.Generator().get_state().numel():
        raise ValueError(f"a state of {state.dtype} {list(state.shape)} is no generator's")
    _, left, _, place = struct.unpack_from("=QiiQ", bytes(state.flatten()[:24].tolist()))
    if left + place > MT_WORDS + 1:
        raise ValueError(f"a generator is at word {place} of {MT_WORDS}, with {left} left")
    return state


def set_accelerator_rng(place: torch.device, state: torch.Tensor) -> None:
    """Set the state of a CUDA device's generator; does nothing on a CPU."""
    if place.type == "cuda":
        torch.cuda.set_rng_state(state, place)


def trim_heap() -> None:
    """Return freed heap pages to the system, so that moved parameters do not count twice."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc: nothing to trim
