"""Big models in, and tokens out: loading against the drive, decoding against the link."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.disk import scratch
from benchmarks.engine import (
    UNIT_BYTES,
    WIDTH,
    Figure,
    Figures,
    ModelledBlock,
    no_schedule,
    virtual,
)
from benchmarks.memory import memory_of_this_process, reset_peak
from benchmarks.paging import paged_of
from hetero.api import engine_of, prepare, prepare_tuned, release
from hetero.config import Config
from hetero.device import SimDevice
from hetero.export import dtype_name
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.status import status
from hetero.tensorfile import header
from hetero.train.engine.tuning import Tuning
from hetero.train.model.empty import empty_parameters
from hetero.types import Lane

SHARDS = 5
ROUNDS = 5
BLOCK = 8 * 2**20  # bytes that the plain reader asks for at once


def load(device: str | None = None) -> Figures:
    """A model of 1.1 B bf16 parameters from five shards into its homes: memory, and time."""
    with scratch() as folder, torch.no_grad():
        write_shards(big_model(), folder)
        files = sorted(folder.iterdir())
        n_bytes = sum(file.stat().st_size for file in files)
        loads: list[Loaded] = []
        plain: list[float] = []
        for number in range(ROUNDS):
            for ours_next in (number % 2 == 0, number % 2 == 1):
                drop_from_cache(files)
                if ours_next:
                    loads.append(loaded(folder))
                else:
                    plain.append(n_bytes / plain_read(files))
    ours = [n_bytes / each.seconds for each in loads]
    ratio = statistics.median(mine / raw for mine, raw in zip(ours, plain, strict=True))
    memory = statistics.median(each.peak_bytes / each.home_bytes for each in loads)
    rows = [
        Figure("peak of resident memory / bytes of homes", memory, "ratio", "<=", 1.05),
        Figure("rate / the drive's, same files, cold cache", ratio, "ratio", ">=", 0.8),
    ]
    detail = {
        "bytes": n_bytes,
        "memory": "VmHWM over VmRSS before: no file is mapped, so that it is anonymous",
        "home_bytes": loads[0].home_bytes,
        "plain_bytes_per_second": plain,
        "load_bytes_per_second": ours,
    }
    return Figures(rows, detail)


def big_model() -> nn.Module:
    """Return an empty GPT of 1.1 B parameters in bf16."""
    with empty_parameters():
        model = GPT(GPTConfig(width=2048, layers=22, heads=16, context=256))
    return model.bfloat16()


def write_shards(model: nn.Module, folder: Path) -> None:
    """Write files with a model's names and shapes; their numbers are of no matter."""
    state = list(model.state_dict().items())
    noise = torch.randn(BLOCK // 2).bfloat16().view(torch.uint8).numpy().tobytes()
    each = -(-len(state) // SHARDS)
    for number in range(0, len(state), each):
        part = state[number : number + each]
        n_bytes = sum(tensor.numel() * tensor.dtype.itemsize for _, tensor in part)
        with (folder / f"part{number:04d}.safetensors").open("wb") as file:
            file.write(header((name, dtype_name(tensor), tensor.shape) for name, tensor in part))
            for start in range(0, n_bytes, BLOCK):
                file.write(noise[: min(BLOCK, n_bytes - start)])
            file.flush()
            os.fsync(file.fileno())


def drop_from_cache(files: Iterable[Path]) -> None:
    """Let the next reader find files on the drive only."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain_read(files: Iterable[Path]) -> float:
    """Read files from end to end into one buffer; returns seconds."""
    buffer = memoryview(bytearray(BLOCK))
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
    return time.perf_counter() - began


class Loaded(NamedTuple):
    """What a load took."""

    seconds: float
    peak_bytes: int
    home_bytes: int


def loaded(folder: Path) -> Loaded:
    """Load the model into homes on HOST."""
    model = big_model()
    before = memory_of_this_process("VmRSS")
    reset_peak()
    began = time.perf_counter()
    prepare(model, device="cpu", hbm="1GiB", weights=str(folder))
    seconds = time.perf_counter() - began
    peak = memory_of_this_process("VmHWM") - before
    homes = engine_of(model).setup.store.homes.values()
    n_bytes = sum(home.part(slice(None)).nbytes for home in homes)
    forget(model)
    return Loaded(seconds, peak, n_bytes)


def forget(model: nn.Module) -> None:
    """Let a model's memory go, without a copy of its values for anybody."""
    engine = engine_of(model)
    paged_of(model).manager.close()
    engine.setup.store.close()


# -- decoding --------------------------------------------------------------------------------------

DEEP, SHALLOW = 80, 32  # blocks, as of models of 70 B and of 8 B parameters
TOKENS = 12
SHARE = 0.25  # of the model, for everything on the device


def generate(device: str | None = None) -> Figures:
    """Tokens a second with HBM for 25 % of a model, over what the link or compute allows."""
    rows: list[Figure] = []
    detail: dict[str, Any] = {
        "clock": "virtual",
        "bound": "the larger of compute and (bytes of the model - hbm) / rate of the link",
        # One unit computes and one is on its way, so that two units' frames stream, and what is
        # left of one stands empty: of few large units that is a larger part.
        "units": {"rows": DEEP, "shallow": SHALLOW},
    }
    for n_units, ratio in ((DEEP, 0.5), (DEEP, 1.0), (DEEP, 2.0), (DEEP, 8.0), (SHALLOW, 8.0)):
        planned = decoded(n_units, ratio, virtual())
        demand = decoded(n_units, ratio, virtual(schedule=no_schedule))
        name = f"transfer {ratio:g}x compute"
        if n_units == DEEP:
            rows.append(Figure(name, planned.bound / planned.seconds, "ratio", ">=", 0.9))
        detail[name if n_units == DEEP else f"shallow: {name}"] = {
            "ratio": planned.bound / planned.seconds,
            "token_seconds": planned.seconds,
            "bound_seconds": planned.bound,
            "bytes_a_token": planned.n_bytes,
            "bytes_that_do_not_fit": planned.least_bytes,
            "misses_a_token": planned.misses,
            "demand_paging": demand.bound / demand.seconds,
        }
    return Figures(rows, detail)


class Decoded(NamedTuple):
    """A token of the steady state, on the virtual clock."""

    seconds: float
    bound: float
    n_bytes: float
    least_bytes: int
    misses: float


def decoded(n_units: int, ratio: float, tuning: Tuning) -> Decoded:
    """Return what a token takes; a transfer takes ``ratio`` times a unit's compute."""
    rate = UNIT_BYTES / ratio
    device = SimDevice(seed=1, h2d_bytes_per_second=rate, d2h_bytes_per_second=rate)
    torch.manual_seed(0)
    model = nn.Sequential(*(ModelledBlock(device, 1.0) for _ in range(n_units)))
    hbm = int(SHARE * n_units * UNIT_BYTES)
    prepare_tuned(model, None, Config.load(device=device, hbm=hbm, chunk_bytes=4096), tuning)
    seen = list(tokens(model, device))[TOKENS // 2 :]
    least = n_units * UNIT_BYTES - hbm
    release(model)
    seconds, n_bytes, misses = (statistics.median(column) for column in zip(*seen, strict=True))
    return Decoded(seconds, max(float(n_units), least / rate), n_bytes, least, misses)


def tokens(model: nn.Module, device: SimDevice) -> Iterator[tuple[float, int, int]]:
    """Yield seconds, bytes and misses of one token after the other."""
    hidden = torch.randn(1, WIDTH)
    for _ in range(TOKENS):
        began = device.now()
        with torch.no_grad():
            model(hidden)
        moved = status(model)
        yield device.now() - began, engine_of(model).setup.stats.n_bytes[Lane.H2D], moved.misses
