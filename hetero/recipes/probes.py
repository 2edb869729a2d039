"""Probes of `hetero calibrate`, each a call that takes one sample (floor 4).

A probe knows no medians, warm-ups or files: `hetero.recipes.calibrate` repeats it and makes figures
of its samples. Groups of probes are generators: the buffers, page-locked memory and files of a
group exist only while its probes run.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hetero.config import host_limit
from hetero.cores import torch_threads
from hetero.device import COPY_LANES, OPPOSITE, Device, Move, Slab, release_slab
from hetero.jobs import Worker
from hetero.plan.machine import Dtype
from hetero.plan.rates import attention_flops
from hetero.recipes.doctor import usable_cores
from hetero.recipes.work import Split
from hetero.train.update import kernel
from hetero.types import Lane

KIB, MIB, GIB = 2**10, 2**20, 2**30
TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SMALLEST_SIDE, LARGEST_SIDE = 32, 8192  # of a matmul
GROWS = 2  # times: a side twice as long is eight times the work
LAUNCHES = 1000  # empty operations in a row
LATENCY_BYTES = 4 * KIB  # of a copy that takes only its latency
MOST_COPIES = 64  # in a row, per sample
COPIED_BYTES = 256 * MIB  # per sample, unless a single copy is larger
MOST_REPEATS = 100_000
TRIALS = 3  # calls; the fastest decides how often to repeat
OVERLAP_BYTES = 16 * MIB  # of each copy in the background
OVERLAP_OUTLASTS = 3  # times the work that is timed meanwhile
CPU_ATTENTION, GPU_ATTENTION = (2, 8, 256, 64), (4, 16, 2048, 128)  # batch, heads, tokens, width
COLD_BYTES, MOST_IN_TURN = 64 * MIB, 64  # of data larger than caches; parts of it
ELEMENTWISE_BYTES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
FUNCTION_NUMEL = 2**18
TRIAD_BYTES, COPY_BYTES = 12, 8  # an fp32 element: two read and one written, one and one


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How thorough a measurement is."""

    name: str
    warm_ups: int
    """Discarded samples."""
    rounds: int
    """Samples of each probe."""
    sample_seconds: float
    """The least time of a sample, if it can repeat its work."""
    matmul_seconds: float
    """About the time of the largest matmul of a grid."""
    matmul_divisors: tuple[int, ...]
    """The sides of a grid are the largest divided by these."""
    array_bytes: int
    """Of each array that is streamed."""
    copy_bytes: tuple[int, ...]
    """Sizes of copies on the link, ascending."""
    update_numel: int
    disk_bytes: int


QUICK = Pace(
    name="quick",
    warm_ups=1,
    rounds=5,
    sample_seconds=0.03,
    matmul_seconds=0.02,
    matmul_divisors=(8, 1),
    array_bytes=128 * MIB,
    copy_bytes=(64 * KIB, MIB, 16 * MIB, 64 * MIB),
    update_numel=8 * MIB,
    disk_bytes=256 * MIB,
)
FULL = Pace(
    name="full",
    warm_ups=3,
    rounds=7,
    sample_seconds=0.05,
    matmul_seconds=0.05,
    matmul_divisors=(16, 4, 1),
    array_bytes=GIB,
    copy_bytes=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB),
    update_numel=64 * MIB,
    disk_bytes=2 * GIB,
)


class Probe(NamedTuple):
    """One measurement: ``sample`` returns it in bytes, seconds or operations per second."""

    key: str
    at: tuple[int, ...]
    """Coordinates in a table: a matmul's shape, a copy's bytes, a number of threads."""
    sample: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rig:
    """The device and limits that probes measure with."""

    device: Device
    pace: Pace
    folder: Path | None = None
    """Directory on the drive to measure; None: measure no drive."""
    clock: Callable[[], float] = time.perf_counter
    cores: int = field(default_factory=usable_cores)
    limit_bytes: int = field(default_factory=lambda: host_limit().n_bytes)

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        """Return the time of so many calls in a row, including the device's work."""
        self.device.sync(self.device.mark())
        began = self.clock()
        for _ in range(times):
            call()
        self.device.sync(self.device.mark())
        return max(self.clock() - began, 1e-9)

    def repeats(self, call: Callable[[], object]) -> int:
        """Return the number of calls in a sample that is long enough."""
        times = math.ceil(self.pace.sample_seconds / self.least_seconds(call))
        return min(MOST_REPEATS, max(1, times))

    def least_seconds(self, call: Callable[[], object]) -> float:
        """Return the undisturbed time of a call: the least of a few, after a first one.

        On a busy machine one call may take a thousand times as long as the next.
        """
        call()
        return min(self.seconds(call) for _ in range(TRIALS))

    def per_second(self, call: Callable[[], object], amount: float) -> Callable[[], float]:
        """Return a sample of the rate of a call that does ``amount`` of work."""
        times = self.repeats(call)
        return lambda: amount * times / self.seconds(call, times)

    def array_bytes(self, free_bytes: int | None = None) -> int:
        """Return the size of an array, of which several must fit."""
        room = self.limit_bytes if free_bytes is None else free_bytes
        return max(MIB, min(self.pace.array_bytes, room // 16 // MIB * MIB))


Group = Callable[[Rig], Iterator[Probe]]


# -- memory --------------------------------------------------------------------------------------


def device_memory(rig: Rig) -> Iterator[Probe]:
    """Copy and triad over arrays in the memory of an accelerator."""
    if rig.device.facts() is None:
        return
    a, b, c = arrays(rig.array_bytes(rig.device.memory.free_bytes()), rig.device.torch_device)
    numel = a.numel()
    yield Probe("gpu.copy", (), rig.per_second(lambda: a.copy_(b), COPY_BYTES * numel))
    triad = partial(torch.add, b, c, alpha=0.5, out=a)
    yield Probe("gpu.triad", (), rig.per_second(triad, TRIAD_BYTES * numel))


def host_memory(rig: Rig) -> Iterator[Probe]:
    """Triad in RAM, by threads."""
    a, b, c = arrays(rig.array_bytes(), torch.device("cpu"))
    triad = partial(torch.add, b, c, alpha=0.5, out=a)
    for n_threads in thread_counts(rig.cores):
        with torch_threads(n_threads):
            sample = rig.per_second(triad, TRIAD_BYTES * a.numel())
            yield Probe("host.dram", (n_threads,), sample)


def arrays(n_bytes: int, place: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three fp32 arrays with all pages present."""
    a, b, c = (torch.ones(n_bytes // 4, device=place) for _ in range(3))
    return a, b, c


def thread_counts(cores: int) -> list[int]:
    """Return powers of two below the number of cores, and that number."""
    return [*(2**i for i in range(cores.bit_length()) if 2**i < cores), cores]


# -- matmuls -------------------------------------------------------------------------------------


def matmuls(rig: Rig) -> Iterator[Probe]:
    """Operations per second of matmuls, over a grid of shapes for each dtype."""
    for dtype, kind in TORCH_DTYPES.items():
        largest = largest_side(rig, kind)
        for shape in shapes(largest, rig.pace.matmul_divisors):
            m, n, k = shape
            call = matmul_of_each_layout(rig.device, kind, *shape)
            yield Probe(f"matmul.{dtype}", shape, rig.per_second(call, 3 * 2 * m * n * k))


def matmul(device: Device, kind: torch.dtype, m: int, n: int, k: int) -> Callable[[], object]:
    """Return a call that multiplies (m, k) by (k, n)."""
    ones = partial(torch.ones, device=device.torch_device, dtype=kind)
    return partial(torch.mm, ones(m, k), ones(k, n), out=ones(m, n))


def matmul_of_each_layout(
    device: Device, kind: torch.dtype, m: int, n: int, k: int
) -> Callable[[], object]:
    """Return a call that multiplies (m, k) by (k, n) three times, as training does.

    A linear layer transposes its weight in forward, nothing for the gradient of its input, and the
    left factor for that of its weight. Neither inputs nor outputs are in a cache.
    """
    ones = partial(torch.ones, device=device.torch_device, dtype=kind)

    def make() -> Callable[[], object]:
        a, b, at, bt = ones(m, k), ones(k, n), ones(k, m).t(), ones(n, k).t()
        return lambda: (a @ bt, a @ b, at @ b)

    return in_turn(make, kind.itemsize * (2 * m * k + 2 * k * n + 3 * m * n))


def in_turn(make: Callable[[], Callable[[], object]], n_bytes: int) -> Callable[[], object]:
    """Return a call that makes one of several calls in turn, and holds their latest results.

    Each has ``n_bytes`` of its own; together they exceed any cache.
    """
    calls = [make() for _ in range(min(MOST_IN_TURN, -(-COLD_BYTES // n_bytes)))]
    turns, held = cycle(calls), deque[object](maxlen=len(calls))
    return lambda: held.append(next(turns)())


def largest_side(rig: Rig, kind: torch.dtype) -> int:
    """Return the side of the square matmul that takes about as long as the pace allows.

    A dtype without native instructions is tens of times slower, and gets a smaller side. On a busy
    machine a small matmul may wait for its threads longer than a large one computes, so only a time
    that grows with the size ends the search.
    """
    side, before, budget = SMALLEST_SIDE, math.inf, rig.pace.matmul_seconds
    while side < LARGEST_SIDE:
        seconds = rig.least_seconds(matmul(rig.device, kind, side, side, side))
        if 4 * seconds > budget and seconds > GROWS * before:
            return side if seconds < 2 * budget else side // 2
        side, before = 2 * side, seconds
    return side


def shapes(largest: int, divisors: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return every (m, n, k) from the sides that the divisors give."""
    sides = sorted({max(1, largest // divisor) for divisor in divisors})
    return [(m, n, k) for m in sides for n in sides for k in sides]


def launches(rig: Rig) -> Iterator[Probe]:
    """Seconds of an operation without work."""
    one = torch.zeros(1, device=rig.device.torch_device)
    call = partial(one.add_, 1)
    yield Probe("matmul.launch", (), lambda: rig.seconds(call, LAUNCHES) / LAUNCHES)


# -- between matmuls -----------------------------------------------------------------------------


def attentions(rig: Rig) -> Iterator[Probe]:
    """Operations per second of causal attention, forward and backward, in the default kernel."""
    place, on_cpu = rig.device.torch_device, rig.device.facts() is None
    shape = CPU_ATTENTION if on_cpu else GPU_ATTENTION
    dtype = torch.float32 if on_cpu else torch.bfloat16
    q, k, v = (torch.ones(shape, device=place, dtype=dtype, requires_grad=True) for _ in range(3))
    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    forward_flops, backward_flops = (attention_work(on_cpu, backward=b) for b in (False, True))
    yield Probe("attention.forward", (), rig.per_second(forward, forward_flops))
    out = forward()
    backward = partial(torch.autograd.grad, out, (q, k, v), out.detach(), retain_graph=True)
    yield Probe("attention.backward", (), rig.per_second(backward, backward_flops))


def attention_work(on_cpu: bool, *, backward: bool) -> float:
    batch, heads, tokens, width = CPU_ATTENTION if on_cpu else GPU_ATTENTION
    sizes = batch, heads, tokens, tokens, 2 * width
    return attention_flops(*sizes, causal=True, backward=backward)


def elementwise(rig: Rig) -> Iterator[Probe]:
    """Bytes per second of a sum into fresh memory; elements per second of an activation."""
    if rig.device.facts() is not None:
        return
    for n_bytes in ELEMENTWISE_BYTES:
        call = in_turn(partial(addition, n_bytes // TRIAD_BYTES), n_bytes)
        yield Probe("host.elementwise", (n_bytes,), rig.per_second(call, n_bytes))
    x = torch.ones(FUNCTION_NUMEL, requires_grad=True)
    yield Probe("host.functions", (), rig.per_second(functions(x), 2 * x.numel()))


def addition(numel: int) -> Callable[[], object]:
    """Return a call that adds two arrays into a new one."""
    return partial(torch.add, torch.ones(numel), torch.ones(numel))


def functions(x: torch.Tensor) -> Callable[[], object]:
    """Return a call of an activation function and its derivative."""
    grad = x.detach()
    return lambda: torch.autograd.grad(F.gelu(x), x, grad)


# -- the link ------------------------------------------------------------------------------------


class Ends(NamedTuple):
    """Memory on both sides of a lane."""

    here: torch.Tensor
    below: torch.Tensor

    def moves(self, lane: Lane, n_bytes: int) -> list[Move]:
        """Return copies of ``n_bytes`` to distinct places: few if large, many if small."""
        dst, src = (self.here, self.below) if lane is Lane.H2D else (self.below, self.here)
        count = min(MOST_COPIES, max(1, min(COPIED_BYTES, len(dst)) // n_bytes))
        starts = [i * n_bytes for i in range(count)]
        once = [Move(dst[at : at + n_bytes], src[at : at + n_bytes]) for at in starts]
        return once if len(once) > 1 else 2 * once


def link(rig: Rig) -> Iterator[Probe]:
    """Rates of both lanes: by size, with the other lane busy, and from pageable memory."""
    sizes = copy_sizes(rig)
    slabs = {lane: rig.device.slab(sizes[-1]) for lane in COPY_LANES}
    ends = {lane: Ends(rig.device.arena(sizes[-1]).block, slabs[lane].block) for lane in COPY_LANES}
    for each in ends.values():
        each.here.fill_(1)
        each.below.fill_(1)  # untouched pages are all the same one, so copies of them tell nothing
    try:
        for lane in COPY_LANES:
            yield from one_way(rig, lane, ends, sizes)
            if slabs[lane].registered:
                plain = Ends(ends[lane].here, torch.ones(sizes[-1], dtype=torch.uint8))
                sample = partial(lane_rate, rig, lane, plain.moves(lane, sizes[-1]))
                yield Probe(f"link.{lane.value}.pageable", (), sample)
        if all(slab.registered for slab in slabs.values()):
            yield Probe("host.lock", (), partial(lock_rate, rig, sizes[-1]))
    finally:
        for slab in slabs.values():
            release_slab(slab)


def one_way(rig: Rig, lane: Lane, ends: dict[Lane, Ends], sizes: Sequence[int]) -> Iterator[Probe]:
    for size in (LATENCY_BYTES, *sizes):
        sample = partial(lane_rate, rig, lane, ends[lane].moves(lane, size))
        yield Probe(f"link.{lane.value}", (size,), sample)
    against = OPPOSITE[lane]
    moves, beside = (ends[each].moves(each, sizes[-1]) for each in (lane, against))
    yield Probe(f"link.duplex.{lane.value}", (), partial(lane_rate, rig, lane, moves, beside))


def lock_rate(rig: Rig, n_bytes: int) -> float:
    """Return the bytes per second of page-locking new memory, which the driver touches first."""
    made: list[Slab] = []
    seconds = rig.seconds(lambda: made.append(rig.device.slab(n_bytes)))
    release_slab(made[0])
    return n_bytes / seconds


def copy_sizes(rig: Rig) -> tuple[int, ...]:
    """Return the sizes of copies of which two fit on either side."""
    free = rig.device.memory.free_bytes()
    room = rig.limit_bytes if free is None else min(free, rig.limit_bytes)
    fitting = tuple(n for n in rig.pace.copy_bytes if 8 * n <= room)
    return fitting or rig.pace.copy_bytes[:1]


def lane_rate(rig: Rig, lane: Lane, moves: list[Move], beside: Sequence[Move] = ()) -> float:
    """Return bytes per second of copies on a lane, one after the other."""
    n_bytes = sum(len(move.dst) for move in moves)
    return n_bytes / max(rig.device.lane_seconds(lane, moves, beside), 1e-9)


# -- the update ----------------------------------------------------------------------------------


def updates(rig: Rig) -> Iterator[Probe]:
    """Parameters per second of AdamW on split masters in RAM, by threads."""
    native = kernel.load()
    split = Split(update_numel(rig), "cpu")
    for n_threads in thread_counts(rig.cores) if native is not None else [rig.cores]:
        # without the kernel, torch's operations use threads of their own
        worker = Worker(n_threads - 1 if native is not None else 0)
        call = partial(split.step, native, worker)
        try:
            sample = rig.per_second(call, split.param.numel())
            yield Probe("host.update", (n_threads,), sample)
        finally:
            worker.close()


def update_numel(rig: Rig) -> int:
    """Return a number of parameters whose states and scratch fit many times over."""
    return max(MIB, min(rig.pace.update_numel, rig.limit_bytes // 128))


# -- slowdowns -----------------------------------------------------------------------------------


def overlaps(rig: Rig) -> Iterator[Probe]:
    """Slowdown of one kind of work during another, for pairs that a device runs at once."""
    kind = torch.float32 if rig.device.facts() is None else torch.float16
    side = largest_side(rig, kind)
    gemm = matmul(rig.device, kind, side, side, side)
    worker = Worker(0)
    split = Split(update_numel(rig) // 4, "cpu")
    update = partial(split.step, kernel.load(), worker)
    try:
        if rig.device.facts() is None:  # a CPU computes both, and makes copies too
            beside = partial(looping, update)
            yield Probe("overlap.gemm_under_update", (), partial(slowdown, rig, gemm, beside))
            return
        for lane in COPY_LANES:
            beside = partial(copying, rig, [lane])
            sample = partial(slowdown, rig, gemm, beside)
            yield Probe(f"overlap.gemm_under_{lane.value}", (), sample)
        beside = partial(copying, rig, COPY_LANES)
        yield Probe("overlap.update_under_dma", (), partial(slowdown, rig, update, beside))
    finally:
        worker.close()


Beside = Callable[[float], AbstractContextManager[None]]


def slowdown(rig: Rig, call: Callable[[], object], beside: Beside) -> float:
    """Return the time of a call during ``beside`` over its time alone."""
    times = rig.repeats(call)
    alone = rig.seconds(call, times)
    with beside(alone):
        return rig.seconds(call, times) / alone


@contextmanager
def looping(call: Callable[[], object], seconds: float) -> Iterator[None]:
    """Repeat a call in another thread."""
    enough = threading.Event()

    def loop() -> None:
        while not enough.is_set():
            call()

    thread = threading.Thread(target=loop, name="hetero-calibrate")
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


@contextmanager
def copying(rig: Rig, lanes: Iterable[Lane], seconds: float) -> Iterator[None]:
    """Keep lanes busy for longer than ``seconds``."""
    device = rig.device
    slabs, arenas, tickets = [], [], []
    for lane in lanes:
        slabs.append(device.slab(OVERLAP_BYTES))
        arenas.append(device.arena(OVERLAP_BYTES))
        (move, *_) = Ends(arenas[-1].block, slabs[-1].block).moves(lane, OVERLAP_BYTES)
        needed = OVERLAP_OUTLASTS * seconds / device.copy_seconds(lane, OVERLAP_BYTES)
        tickets += [device.copy(lane, move.dst, move.src) for _ in range(math.ceil(needed))]
    try:
        yield
    finally:
        for ticket in tickets:
            device.sync(ticket)
        for slab in slabs:
            release_slab(slab)
