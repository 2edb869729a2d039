"""The drive as `hetero calibrate` measures it: its rates, and the end of its fast cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hetero.io import File, Folder
from hetero.memory.extent import PinUse
from hetero.memory.pool import N_THREADS
from hetero.plan.figures import Figure
from hetero.plan.machine import DriveRates, Io
from hetero.recipes.probes import GIB, KIB, Probe, Rig
from hetero.recipes.readings import RUN, Readings, Samples, rounded
from hetero.recipes.work import SIZE, raw

FALLEN = 0.7  # of the first writes' rate: below it the fast cache is full
SMALL_BLOCK, SMALL_BLOCKS = 128 * KIB, 1024  # to show a transfer's latency; at most
DISK_SECONDS = 0.5  # of a sample of a drive, at most


def drive(rig: Rig) -> Iterator[Probe]:
    """Bytes per second of direct reads, writes, and both at once (summed), by block size."""
    if rig.folder is None:
        return
    with Folder.open(rig.folder) as folder, folder.private() as file:
        n_bytes = disk_bytes(rig, folder)
        file.reserve(n_bytes)
        rate = raw(
            file, PinUse.FRESH, N_THREADS, n_bytes
        )  # unwritten blocks read as zeros without the drive
        n_bytes = max(SIZE, min(n_bytes, int(rate * DISK_SECONDS)) // SIZE * SIZE)
        for name, use in (("write", PinUse.FRESH), ("read", PinUse.READ), ("mixed", PinUse.WRITE)):
            for size in (SMALL_BLOCK, SIZE) if use is not PinUse.WRITE else (SIZE,):
                part = min(n_bytes, SMALL_BLOCKS * size)
                sample = partial(raw, file, use, N_THREADS, part, size)
                yield Probe(f"nvme.{name}", (size,), sample)


def disk_bytes(rig: Rig, folder: Folder) -> int:
    """Return the size of the file to read and write, in whole blocks."""
    return max(SIZE, min(rig.pace.disk_bytes, folder.space() // 4) // SIZE * SIZE)


class Cliff(NamedTuple):
    """The end of a drive's fast cache, and the write rate after it."""

    slc_bytes: float
    sustained_bytes_per_second: float


def burn_in(path: Path, n_bytes: int, window_bytes: int = GIB) -> Cliff | None:
    """Write ``n_bytes`` in a row and return where the rate fell for good; None: it did not.

    Files fill half of the free room at most, and are then written again.
    """
    window_bytes = max(SIZE, min(window_bytes, n_bytes) // SIZE * SIZE)
    with ExitStack() as stack:
        folder = stack.enter_context(Folder.open(path))
        n_files = max(1, min(n_bytes, folder.space() // 2) // window_bytes)
        files = [stack.enter_context(folder.private()) for _ in range(n_files)]
        n_windows = max(1, n_bytes // window_bytes)
        rates = [written(files[i % n_files], window_bytes) for i in range(n_windows)]
    return cliff(rates, window_bytes)


def written(file: File, n_bytes: int) -> float:
    file.reserve(n_bytes)
    return raw(file, PinUse.FRESH, N_THREADS, n_bytes)


def cliff(rates: Sequence[float], window_bytes: int) -> Cliff | None:
    """Return where rates fall below `FALLEN` of the first ones, and stay there."""
    head = sorted(rates[: max(1, len(rates) // 8)])
    bound = FALLEN * head[len(head) // 2] if head else 0.0
    last_fast = max((i for i, rate in enumerate(rates) if rate >= bound), default=-1)
    after = sorted(rates[last_fast + 1 :])
    if not after:
        return None
    return Cliff((last_fast + 1) * window_bytes, after[len(after) // 2])


def nvme_of(readings: Readings, cliff: Cliff | None, *, odirect: bool) -> DriveRates | None:
    """Return the drive's section.

    ``mixed_factor`` is the time of full-duplex transfers over the time that equal reads and writes
    at once took: 1 if they do not disturb each other, 0.5 if they take turns.
    """
    read, write, both = (readings.last(f"nvme.{name}") for name in ("read", "write", "mixed"))
    if read is None or write is None or both is None:
        return None
    factor = min(1.0, both.value / 2 / min(read.value, write.value))
    return DriveRates(
        odirect=odirect,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        write_sustained_bytes_per_second=None
        if cliff is None
        else Figure(min(write.value, rounded(cliff.sustained_bytes_per_second)), RUN),
        slc_bytes=None if cliff is None else Figure(cliff.slc_bytes, RUN),
        mixed_factor=Figure(rounded(factor), RUN, both.spread),
        read_latency_seconds=latency_of(readings.of("nvme.read")),
        write_latency_seconds=latency_of(readings.of("nvme.write")),
        io=Io(engine="threads", queue_depth=N_THREADS, block_bytes=SIZE, threads=N_THREADS),
    )


def latency_of(sized: Sequence[Samples]) -> Figure | None:
    """Return a transfer's latency: the time of small transfers beyond their share by bytes."""
    if len(sized) < 2:
        return None
    small, large = sized[0], sized[-1]
    seconds = small.at[0] / small.median - small.at[0] / large.median
    return Figure(rounded(max(0.0, seconds)), RUN, small.spread)
