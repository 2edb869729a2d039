"""The thread that launches operations, beside threads that update: both need the interpreter."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.engine import Figure, Figures, adamw, timed
from benchmarks.paging import paged_of
from benchmarks.update import SPLIT_BYTES
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.errors import StateError
from hetero.jobs import Job, Worker
from hetero.train.engine.tuning import Tuning
from hetero.train.update.arithmetic import rule_numel
from hetero.train.update.kernel import SharedUpdate

N_THREADS = 15
THREAD_BYTES_PER_SECOND = 11e9  # of each of them, on a server's memory
LAYER_NUMEL = 60_821_504  # of a layer of Llama-3.2-1B
RULE_BYTES = 28  # read and written a parameter: fp32 weight and moments, gradient
LAUNCHES = 30_000
ROUNDS = 7
WIDTH, BATCH = 16, 2


def launches(device: str | None = None) -> Figures:
    """Time to launch operations beside 15 threads that update, over that alone.

    Updates are the library's own slices, over a few elements. Sleep stands for their work on
    memory, which would take cores from this process, and leaves the interpreter to others as it
    does. Slices are as long as those of a layer of 61M parameters: in the kernel's, each thread has
    its share of the layer.
    """
    rows, detail = [], {}
    for name, precision, reach, numel, n_bytes in (
        ("the kernel", "bf16", 1.1, LAYER_NUMEL // N_THREADS, SPLIT_BYTES),
        ("torch's rule", "fp32", 2.5, rule_numel(N_THREADS), RULE_BYTES),
    ):
        seconds = numel * n_bytes / THREAD_BYTES_PER_SECOND
        ratios = ratios_beside(slices_of(precision), seconds)
        rows.append(Figure(f"beside {name}", statistics.median(ratios), "ratio", "<=", reach))
        detail[name] = {"elements": numel, "slice_seconds": seconds, "ratios": ratios}
    return Figures(rows, detail)


def ratios_beside(slices: list[Callable[[], None]], seconds: float) -> list[float]:
    """Return the times of `launch` beside slices that take so long, over those alone, in turn."""
    ratios = []
    for _ in range(ROUNDS):
        alone = timed(launch, "cpu")
        over, worker = threading.Event(), Worker(N_THREADS)
        work = [partial(slowed, slices[i % len(slices)], seconds, over) for i in range(N_THREADS)]
        n_slices = 1 + int(20 * alone / seconds)  # for each thread, until `over` tells
        job = worker.submit(Job(work * n_slices))
        ratios.append(timed(launch, "cpu") / alone)
        over.set()
        job.wait()
        worker.close()
    return ratios


def slowed(work: Callable[[], None], seconds: float, over: threading.Event) -> None:
    """Do a slice's Python, and wait for as long as its memory would take."""
    if not over.is_set():
        work()
        time.sleep(seconds)


def launch() -> None:
    """Launch operations so small that they take no time themselves."""
    x = torch.zeros(4)
    with torch.no_grad():
        for _ in range(LAUNCHES):
            x.add_(1.0)


def slices_of(precision: str) -> list[Callable[[], None]]:
    """Return the slices of a step's updates of a few parameters, which may be done repeatedly."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    config = Config.load(
        device="cpu:sim", hbm=4 * 4 * WIDTH * WIDTH, chunk_bytes=256, precision=precision
    )
    tuning = Tuning(worker=Worker(0))
    optimizer: Any
    model, optimizer = prepare_tuned(model, adamw(model), config, tuning)
    paged = paged_of(model)
    x = torch.randn(BATCH, WIDTH).to(next(model.parameters()).dtype)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x).sum().backward()
    paged.quiesce()
    stepper = paged.trained.stepper
    if stepper is None:
        raise StateError("nothing is trained", advice="give an optimizer to prepare")
    with torch.no_grad():
        updates = stepper.close(optimizer.param_groups, optimizer.known_state)
    slices = dict.fromkeys(work for update in updates for work in update.slices)
    return [partial(stepper._run, partial(repeated, work)) for work in slices]


def repeated(work: Callable[[], None]) -> None:
    """Do a slice again, whole if it is shared."""
    if isinstance(work, SharedUpdate):
        work._left.value = 0
    work()
