"""What a unit costs as units grow: steps, plans, states that are read, averages."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.engine import Figure, Figures
from benchmarks.paging import paged_of
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice, UncountedMemory
from hetero.errors import StateError

SIZES = (10, 100, 1000)
WIDTH = 8
CHUNK_BYTES = 1024
REPEATS = 1000  # units, in all repetitions of what is measured


class NoPeak(UncountedMemory):
    """Counts no allocations, as a device whose allocator does."""

    def allocated_peak(self) -> int | None:
        return 0


class Uncounted(SimDevice):
    """A device whose allocations hetero need not count."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = NoPeak()


class Block(nn.Module):
    """Two tiny parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.linear(x)
        return found


class Chain(nn.Module):
    """So many blocks, each a unit."""

    def __init__(self, n_units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def scale(device: str | None = None) -> Figures:
    """CPU time of a unit in a step, a plan, a read of states, an average: 10 to 1,000 units."""
    rows, detail = [], {}
    found = {n_units: measured(n_units) for n_units in SIZES}
    least, most = found[SIZES[0]], found[SIZES[-1]]
    for what in least:
        rows.append(
            Figure(f"{what}: 1,000 units / 10", most[what] / least[what], "ratio", "<=", 1.3)
        )
        detail[what] = {f"{n} units": found[n][what] for n in SIZES}
    top = max(found[n]["step"] for n in SIZES)
    rows.append(Figure("a step over plain torch's", top, "us a unit", "<=", 350))
    return Figures(rows, {"us_a_unit": detail})


def measured(n_units: int) -> dict[str, float]:
    """Return microseconds of CPU a unit, of each thing that is done once a unit."""
    torch.manual_seed(0)
    repeats = max(3, REPEATS // n_units)
    x = torch.randn(4, WIDTH)
    plain, model = Chain(n_units), Chain(n_units)
    theirs = torch.optim.AdamW(plain.parameters())
    config = Config.load(
        device=Uncounted(),
        hbm=n_units // 2 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        activations="keep",
    )
    model, ours = prepare_tuned(model, torch.optim.AdamW(model.parameters()), config, None)
    pairs = [(partial(train, model, ours, x), partial(train, plain, theirs, x))] * (repeats + 3)
    steps = [cpu_seconds(ours) - cpu_seconds(theirs) for ours, theirs in quiet(pairs)][3:]
    runtime = paged_of(model).runtime
    schedule = runtime.fetches.train.schedule
    if schedule is None:
        raise StateError("nothing was planned in these steps", advice="take more of them")
    trace = schedule.trace
    copies = [torch.zeros_like(p) for p in plain.parameters()]
    calls: dict[str, Callable[[], Any]] = {
        "a plan": partial(runtime.fetches.train._build, trace),
        "a plan without an optimizer": partial(runtime.fetches.evaluate._build, trace),
        "reading the states": partial(read, ours, list(model.parameters())),
        "an average of weights": partial(average, copies, model),
    }
    found = {"step": statistics.median(steps)}
    for what, call in calls.items():
        seconds = [cpu_seconds(call) for call in quiet([call] * repeats)]
        found[what] = statistics.median(seconds)
    return {what: 1e6 * seconds / n_units for what, seconds in found.items()}


def quiet(items: list[Any]) -> Iterator[Any]:
    """Yield items while no garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        yield from items
    finally:
        gc.enable()


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Return the CPU time of a call, that of all threads."""
    start = time.process_time()
    call()
    return time.process_time() - start


def train(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def read(optimizer: Any, params: list[nn.Parameter]) -> None:
    for param in params:
        optimizer.state[param]["step"]


@torch.no_grad()
def average(copies: list[torch.Tensor], model: nn.Module) -> None:
    for copy, param in zip(copies, model.parameters(), strict=True):
        copy.lerp_(param, 0.1)
