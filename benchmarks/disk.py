"""The disk tier and checkpoints: against what the same drive gives in the same run."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from benchmarks.engine import Figure, Figures, adamw, timed
from hetero.api import engine_of, prepare_tuned
from hetero.checkpoint.save import save_checkpoint
from hetero.checkpoint.writer import retain
from hetero.config import Config
from hetero.device import paged_slab
from hetero.errors import BudgetError
from hetero.events import EventLog
from hetero.io import IO, File, Folder, align_up, aligned_buffer
from hetero.memory.extent import Extents, PinSpan, PinUse, Request
from hetero.memory.ledger import Ledger
from hetero.memory.pool import Pool, open_pool
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.work import SIZE, raw
from hetero.status import status
from hetero.train.engine.engine import Engine
from hetero.train.engine.tuning import Tuning
from hetero.types import Kind, Tier

RUNS = "runs"  # in the working directory: a drive, where a system's temporary folder may be RAM
EXTENT_NUMEL = 2**20  # 4 MiB of 4-byte elements
HOME_BYTES = 512 * 2**20
POOL_BYTES = 128 * 2**20
SPILLED_BYTES = 2**30
ROUNDS = 5
STEPS = 4  # in a row: an update goes on behind the next forward
SLOWER = 4
T = TypeVar("T")


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder on the drive that the working directory is on."""
    Path(RUNS).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS, prefix="bench-") as name:
        yield Path(name)


class Homes(NamedTuple):
    """A home on disk, as the pool sees it."""

    extents: Extents


def scanned(
    pool: Pool, home: Homes, use: PinUse, home_bytes: int = HOME_BYTES, size_bytes: int = SIZE
) -> float:
    """Pin a home in extents of ``size_bytes`` from end to end; returns bytes moved a second."""
    pool.drain()
    pool.nvme.take_counts()
    step = size_bytes // 4
    starts = range(0, home_bytes // 4, step)
    requests = [Request([PinSpan(home.extents, at, at + step, use)]) for at in starts]
    began = time.perf_counter()
    pool.ahead(requests)
    for request in requests:
        with pool.pin(request):
            pass
    pool.drain()
    seconds = time.perf_counter() - began
    return sum(pool.nvme.take_counts().values()) / seconds


def make_pool(
    folder: Folder, disk_bytes: int, pool_bytes: int = POOL_BYTES, size_bytes: int = SIZE
) -> Pool:
    return open_pool(
        [folder],
        disk_bytes,
        pool_bytes=pool_bytes,
        extent_numel=size_bytes // 4,
        ledger=Ledger({Tier.NVME: None}),
        log=EventLog(),
    )


def home_of(pool: Pool, n_bytes: int) -> Homes:
    slab = paged_slab(n_bytes)
    return Homes(pool.adopt(Kind.STATE, slab, n_bytes, 4, "bench"))


def disk(device: str | None = None) -> Figures:
    """The tier reading, writing and both, over O_DIRECT alone on the same directory."""
    uses = {"write": PinUse.FRESH, "read": PinUse.READ, "both": PinUse.WRITE}
    ratios: dict[str, list[float]] = {name: [] for name in uses}
    rates: dict[str, list[float]] = {name: [] for name in uses}
    with scratch() as path, Folder.open(path) as folder:
        pool = make_pool(folder, HOME_BYTES)
        home = home_of(pool, HOME_BYTES)
        with folder.private() as file:
            file.reserve(HOME_BYTES)
            # unwritten blocks read as zeros, at no cost
            raw(file, PinUse.FRESH, pool.n_threads, HOME_BYTES)
            scanned(pool, home, PinUse.FRESH)
            for number in range(ROUNDS):
                for name, use in uses.items():
                    sides: list[Callable[[], float]] = [
                        partial(scanned, pool, home, use),
                        partial(raw, file, use, pool.n_threads, HOME_BYTES),
                    ]
                    took = {s: sides[s]() for s in ((0, 1) if number % 2 else (1, 0))}
                    ratios[name].append(took[0] / took[1])
                    rates[name].append(took[1])
        pool.close()
    rows = [
        Figure(f"{name}, tier / O_DIRECT", statistics.median(found), "ratio", ">=", 0.90)
        for name, found in ratios.items()
    ]
    detail = {
        "raw bytes a second": {name: statistics.median(found) for name, found in rates.items()},
        "ratios": ratios,
        "threads": pool.n_threads,
        "home_bytes": HOME_BYTES,
        "pool_bytes": POOL_BYTES,
    }
    return Figures(rows, detail)


# -- steps that go through the disk --------------------------------------------------------------


class Spilled(NamedTuple):
    """A model whose optimizer states lie on disk; ``steps`` makes several and waits for them."""

    engine: Engine
    steps: Callable[[], None]


def spilled(
    folder: Path | None, tuning: Tuning, n_steps: int = STEPS, updates: str = "step"
) -> Spilled:
    """Return a GPT with all states on disk, or with everything on HOST."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=640, layers=8, heads=8, context=64, checkpoint_blocks=False))
    settings: dict[str, Any] = {"device": "cpu", "hbm": 4 * parameter_bytes(model)}
    settings["updates"] = updates
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if folder is not None:
        settings |= {"nvme": str(folder), "host": host_without_states(model, optimizer, settings)}
    model, optimizer = prepare_tuned(model, optimizer, Config.load(**settings), tuning)
    tokens = torch.randint(0, 256, (1, 32))
    step = partial(steps, model, optimizer, tokens, n_steps)
    step()
    return Spilled(engine_of(model), step)


def parameter_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def host_without_states(model: nn.Module, optimizer: Any, settings: dict[str, Any]) -> int:
    """Return a budget that holds parameters, gradients and the pool, and no states."""
    config = Config.load(host=4096, nvme=".", **settings)
    try:
        prepare_tuned(model, optimizer, config, None)
    except BudgetError as error:
        return 2 * parameter_bytes(model) + 2 * error.needed_bytes
    raise RuntimeError("4096 bytes of HOST held a model")


def moved(file: File, reads: int, writes: int, n_threads: int) -> float:
    """Return the seconds that a drive takes to read and write so many bytes, both at once."""
    n_reads, n_writes = -(-reads // SIZE), -(-writes // SIZE)
    buffers = [aligned_buffer(SIZE) for _ in range(n_threads)]
    todo = [(i, False) for i in range(n_reads)] + [(i, True) for i in range(n_writes)]
    todo.sort(key=lambda item: item[0] / (n_writes if item[1] else n_reads))

    n_blocks = file.size() // SIZE

    def work(thread: int) -> None:
        for at, write in todo[thread::n_threads]:
            (file.write if write else file.read)(at % n_blocks * SIZE, buffers[thread])

    with ThreadPoolExecutor(n_threads) as executor:
        return timed(lambda: list(executor.map(work, range(n_threads))))


class Slowed(IO):
    """A drive that moves ``rate`` bytes a second, reads and writes together."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        asked = time.perf_counter()
        result = act(*args)
        if op in ("read", "write"):
            with self._lock:
                self._free_at = max(self._free_at, asked) + sum(map(len, args[1])) / self.rate
                wait = self._free_at - time.perf_counter()
            time.sleep(max(0.0, wait))
        return result


def disk_step(device: str | None = None) -> Figures:
    """A step with all optimizer states on disk, over its compute or its bytes, the larger.

    Once with the drive as it is, and once with one of a quarter of its rate: here the processor
    that computes also moves and checks what is read, and only a slow drive leaves it idle.
    """
    with scratch() as path:
        here = spilled(None, Tuning())
        as_it_is, detail = on_drive(path, here, IO(), STEPS, ROUNDS)
        rate = detail["read_bytes"] + detail["write_bytes"]
        rate /= statistics.median(row["drive"] for row in detail["seconds"])
        early, early_detail = on_drive(path, here, IO(), STEPS, ROUNDS, "backward")
        slowed, n_rounds = partial(Slowed, rate / SLOWER), ROUNDS - 2
        slow, slow_detail = on_drive(path, here, slowed(), STEPS // 2, n_rounds)
        both, both_detail = on_drive(path, here, slowed(), STEPS // 2, n_rounds, "backward")
        release(here)
    rows = [
        Figure("step / max(compute, drive)", as_it_is, "ratio", "<=", 1.15),
        Figure("the same, updates='backward'", early, "ratio", "<=", 1.15),
        Figure(f"drive {SLOWER} times slower", slow, "ratio", "<=", 1.15),
        Figure(f"drive {SLOWER} times slower, updates='backward'", both, "ratio", "<=", 1.15),
    ]
    details = {"as it is": detail, "backward": early_detail}
    details |= {"slower": slow_detail, "slower, backward": both_detail}
    return Figures(rows, {**details, "bytes a second": rate})


def on_drive(
    path: Path, here: Spilled, io: IO, n_steps: int, n_rounds: int, updates: str = "step"
) -> tuple[float, dict[str, Any]]:
    """Return a step over its compute or its bytes, the larger, and what it was made of."""
    rows = []
    there = spilled(path, Tuning(io=io), n_steps, updates)
    now = status(there.engine.setup.model)
    n_threads = there.engine.setup.store.pool.n_threads
    with Folder.open(path, io) as folder, folder.private() as file:
        file.reserve(HOME_BYTES)
        moved(file, 0, HOME_BYTES, n_threads)  # unwritten blocks read as zeros, at no cost
        for number in range(n_rounds + 1):
            took = timed(there.steps) / n_steps
            now = status(there.engine.setup.model)
            compute = timed(here.steps) / STEPS
            drive = moved(file, now.read_bytes, now.write_bytes, n_threads)
            if number:
                ratio = took / max(compute, drive)
                rows.append({"step": took, "compute": compute, "drive": drive, "ratio": ratio})
    detail = {
        "seconds": rows,
        "states_on_disk_bytes": there.engine.setup.ledger.used(Tier.NVME, Kind.STATE),
        "read_bytes": now.read_bytes,
        "write_bytes": now.write_bytes,
        "states_bytes": 2 * parameter_bytes(there.engine.setup.model),
    }
    release(there)
    return statistics.median(row["ratio"] for row in rows), detail


def release(*sides: Spilled) -> None:
    for side in sides:
        side.engine.release()


def checksum(device: str | None = None) -> Figures:
    """What checksums take of a step that is bound by the disk."""
    shares = []
    with scratch() as path:
        with_digest, without = spilled(path, Tuning()), spilled(path, Tuning(checked=False))
        for number in range(2 * ROUNDS + 1):
            sides = [with_digest.steps, without.steps]
            took = {s: timed(sides[s]) for s in ((0, 1) if number % 2 else (1, 0))}
            if number:
                shares.append((took[0] - took[1]) / took[0])
        release(with_digest, without)
    share = statistics.median(shares)
    return Figures([Figure("share of the step", share, "", "<=", 0.10)], {"shares": shares})


# -- checkpoints ---------------------------------------------------------------------------------


def save(device: str | None = None) -> Figures:
    """Steps while an asynchronous save runs over steps without; a save's rate over the drive's."""
    ratios, rates, rows = [], [], []
    with scratch() as path, Folder.open(path) as folder:
        torch.manual_seed(0)
        model: Any = GPT(GPTConfig(width=768, layers=8, context=64, checkpoint_blocks=False))
        hbm = 4 * parameter_bytes(model)
        config = Config.load(device="cpu", hbm=hbm, activations="keep")
        model, optimizer = prepare_tuned(model, adamw(model), config, None)
        tokens = torch.randint(0, 256, (4, 64))
        n_bytes = 3 * parameter_bytes(model)
        steps(model, optimizer, tokens)
        for number in range(ROUNDS + 1):
            # 1. a save alone, and the drive alone, both durable
            saving, writing = save_and_write(folder, model, optimizer, number)
            # 2. steps without a save, and as many steps while one runs
            alone = timed(partial(steps, model, optimizer, tokens))
            beside, durable = while_saving(path, model, optimizer, tokens, 2 * number + 1)
            if number:
                rates.append(writing / saving)
                ratios.append(beside / (alone + writing))
                rows.append(
                    {
                        "raw": writing,
                        "save": saving,
                        "steps": alone,
                        "steps while saving": beside,
                        "saving": durable,
                        "plain ratio": beside / alone,
                    }
                )
        engine_of(model).release()
    figures = [
        Figure(
            "steps while saving / (steps + the drive's time)",
            statistics.median(ratios),
            "ratio",
            "<=",
            1.10,
        ),
        Figure("save / raw writing, both synced", statistics.median(rates), "ratio", ">=", 0.80),
    ]
    return Figures(figures, {"bytes": n_bytes, "seconds": rows, "ratios": ratios, "rates": rates})


def save_and_write(
    folder: Folder, model: nn.Module, optimizer: Any, number: int
) -> tuple[float, float]:
    """Return the seconds of a save, and of the drive writing as much, in alternating order.

    Both make a new file, and both files stay until both are measured: what a drive writes over is
    twice as fast here as what was never written, and so is the room of a file just removed.
    """
    path = Path(folder.path)
    n_bytes = 3 * parameter_bytes(model)

    with folder.private() as file:
        sides: list[Callable[[], Any]] = [
            partial(save_checkpoint, path, model, optimizer, step=2 * number),
            partial(written, file, n_bytes),
        ]
        took = {s: timed(sides[s]) for s in ((0, 1) if number % 2 else (1, 0))}
    retain(folder, 1)
    return took[0], took[1]


def one_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(model: nn.Module, optimizer: Any, tokens: torch.Tensor, n: int = STEPS) -> None:
    """Make steps, and wait for their updates."""
    for _ in range(n):
        one_step(model, optimizer, tokens)
    engine_of(model).finish()


def while_saving(
    path: Path, model: nn.Module, optimizer: Any, tokens: torch.Tensor, number: int
) -> tuple[float, float]:
    """Return the seconds of the same steps begun with a save, and those until it is durable."""
    began = time.perf_counter()
    saved = save_checkpoint(path, model, optimizer, step=number, keep_last=1, asynchronous=True)
    steps(model, optimizer, tokens)
    took = time.perf_counter() - began
    saved.wait()
    return took, time.perf_counter() - began


def written(file: File, n_bytes: int) -> None:
    """Write so many bytes to a new file with O_DIRECT, and sync them."""
    buffer = aligned_buffer(2 * SIZE)
    file.reserve(align_up(n_bytes))
    for start in range(0, n_bytes, len(buffer)):
        file.write(start, buffer[: align_up(min(len(buffer), n_bytes - start))])
    file.sync()


# -- page cache ----------------------------------------------------------------------------------


def page_cache(device: str | None = None) -> Figures:
    """Page cache that the tier's own files take after 1 GiB went through it both ways."""
    with scratch() as path, Folder.open(path) as folder:
        pool = make_pool(folder, HOME_BYTES)
        home = home_of(pool, HOME_BYTES)
        before = cached_bytes()
        for _ in range(SPILLED_BYTES // HOME_BYTES):
            scanned(pool, home, PinUse.WRITE)
        cached = sum(pages_in_cache(fd, n) for fd, n in pool.nvme.open_files())
        grown = cached_bytes() - before
        direct = pool.nvme.direct
        pool.close()
    rows = [Figure("of the tier's files", cached / 2**20, "MiB", "<=", 128)]
    return Figures(rows, {"whole machine's page cache grew by bytes": grown, "direct": direct})


def cached_bytes() -> int:
    """Return the page cache of the whole machine, other programs' included."""
    lines: Sequence[str] = Path("/proc/meminfo").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["Cached"]


def pages_in_cache(fd: int, n_bytes: int) -> int:
    """Return the bytes of an open file that are in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, n_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        n_pages = -(-n_bytes // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * n_pages)()
        status = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), resident)
        if status:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return sum(page & 1 for page in resident) * mmap.PAGESIZE
