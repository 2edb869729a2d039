"""How good plans are, and what they and records of runs cost."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.disk import home_of, make_pool, scanned, scratch
from benchmarks.engine import Figure, Figures, adamw, timed, train_step
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import BudgetError, ConfigError
from hetero.io import Folder
from hetero.memory.extent import PinUse
from hetero.plan.figures import Figure as Measured
from hetero.plan.hardware import dump, find
from hetero.plan.machine import MachineProfile
from hetero.recipes.calibrate import CalibrationRun, profile_of
from hetero.recipes.facts import look
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.probes import (
    MIB,
    QUICK,
    Group,
    Probe,
    Rig,
    attentions,
    elementwise,
    host_memory,
    largest_side,
    launches,
    link,
    matmul_of_each_layout,
    overlaps,
    shapes,
    updates,
)
from hetero.recipes.readings import take_readings
from hetero.rehearse.plan import Plan, plan
from hetero.rehearse.rehearsal import RehearsedStep, Scene, rehearse
from hetero.rehearse.twin import batch_twin, twin_of
from hetero.report.profile import profile as recorded
from hetero.types import Tier

GIB = 2**30
TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)

# -- predictions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A model, its batch, and settings; ``share`` of parameters, gradients and states is HBM."""

    name: str
    build: Callable[[], nn.Module]
    batch: torch.Tensor
    share: float
    settings: dict[str, Any]


class Outcome(NamedTuple):
    """What a run took, by ledger and clock."""

    peaks: dict[str, int]
    seconds: float


class WithTargets(nn.Module):
    """The GPT with its own loss, of one batch."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(tokens, tokens)
        return loss


class Convolutions(nn.Module):
    """A stack of 3 x 3 convolutions over images, and the mean square of what it makes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        body = (
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU()) for _ in range(layers)
        )
        self.blocks = nn.ModuleList(body)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.first(images)
        for block in self.blocks:
            images = images + block(images)
        return images.square().mean()


def gpt(width: int, layers: int, tokens: int, share: float, **settings: Any) -> Play:
    again = settings.pop("checkpoint", False)
    shape = GPTConfig(width=width, layers=layers, heads=4, context=tokens, checkpoint_blocks=again)
    name = f"gpt {width} x {layers}, {tokens} tokens{', checkpoint' * again}"
    batch = torch.zeros(2, tokens, dtype=torch.long)
    return Play(
        name=name, build=partial(WithTargets, shape), batch=batch, share=share, settings=settings
    )


def convolutional(width: int, layers: int, share: float, **settings: Any) -> Play:
    build = partial(Convolutions, width, layers)
    batch = torch.randn(4, 3, 24, 24)
    return Play(
        name=f"convolutions {width} x {layers}",
        build=build,
        batch=batch,
        share=share,
        settings=settings,
    )


def tried() -> list[Play]:
    """Return 30 runs; none has the shape of those that are calibrated with."""
    plays = [
        gpt(width, layers, tokens, share, chunk_bytes=chunk)
        for (width, layers, tokens), (share, chunk) in itertools.product(
            ((256, 4, 128), (320, 6, 128), (448, 3, 192)),
            ((0.15, 2**16), (0.3, 2**17), (0.6, 2**18), (1.2, 2**18), (2.5, 2**20)),
        )
    ]
    for activations in ("keep", "recompute", "offload"):
        plays.append(gpt(384, 4, 96, 0.4, activations=activations, chunk_bytes=2**18))
        plays.append(gpt(384, 4, 96, 0.8, activations=activations, chunk_bytes=2**20))
    plays += [gpt(320, 5, 128, share, checkpoint=True) for share in (0.25, 0.5, 1.0)]
    plays += [convolutional(64, 6, share, chunk_bytes=2**16) for share in (0.3, 0.6, 3.0)]
    plays += [
        gpt(448, 3, 192, share, host=host, nvme=True)
        for share, host in ((0.3, 2**26), (0.5, 3 * 2**25), (0.8, 2**26))
    ]
    return plays


def predict(device: str | None = None) -> Figures:
    """Plans of 30 runs against the runs: bytes of every tier, and the time of a step.

    The machine is calibrated anew for every ten of them: how fast shared processors are swings by
    half within minutes. How much is told by runs that are made again in the end.
    """
    plays = tried()
    rows: list[dict[str, Any]] = []
    for at in range(0, len(plays), PER_CALIBRATION):
        machine = calibrated()
        own = {"access_us": machine.host.access, "counted_us": machine.host.counted}
        costs = {name: 1e6 * figure.value for name, figure in own.items() if figure is not None}
        rows += [{**against(play, machine), **costs} for play in plays[at : at + PER_CALIBRATION]]
    again = [
        again_over_before(play, row) for play, row in list(zip(plays, rows, strict=True))[::AGAIN]
    ]
    hbm = sorted(row["peak error"] for row in rows)
    time_errors = sorted(row["time error"] for row in rows)
    exact = all(row["exact"] for row in rows)
    figures = [
        Figure("HBM peak, median error", statistics.median(hbm), "", "<=", 0.005),
        Figure("HBM peak, 95 % of errors", quantile(hbm, 0.95), "", "<=", 0.02),
        Figure("HOST and NVME peaks exact", float(exact), "", "==", 1.0),
        Figure("step time, median error", statistics.median(time_errors), "", "<=", 0.08),
        Figure("step time, 90 % of errors", quantile(time_errors, 0.9), "", "<=", 0.15),
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Figures(figures, {"runs": rows, "again / before": again, "load": load})


PER_CALIBRATION, AGAIN = 10, 5


def again_over_before(play: Play, row: dict[str, Any]) -> float:
    """Return the time of a step of a run that is made again, over what it took before."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        given = {**row["settings"], "device": "cpu:sim"}
        given |= {"nvme": folder} if "nvme" in play.settings else {}
        seconds = trained(play, given, row["steps"]).seconds
    return seconds / float(row["real_seconds"])


def quantile(ascending: list[float], share: float) -> float:
    """Return the least value that a share of all are not above."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def against(play: Play, machine: MachineProfile) -> dict[str, Any]:
    """Return what a plan says of a run, and what the run took."""
    with machine_file(machine) as name, tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        settings = settings_of(play, name, folder)
        said = plan_of(play, settings)
        real = trained(play, said.settings, len(said.rehearsal.steps))
    peaks = {tier.name: said.rehearsal.peaks[tier] for tier in TIERS}
    return {
        "name": play.name,
        "settings": {k: v for k, v in said.settings.items() if k not in ("nvme", "profile")},
        "steps": len(said.rehearsal.steps),
        "planned": peaks,
        "real": real.peaks,
        "peak error": abs(peaks["HBM"] - real.peaks["HBM"]) / real.peaks["HBM"],
        "exact": all(peaks[tier] == real.peaks[tier] for tier in ("HOST", "NVME")),
        "planned_seconds": said.step_seconds,
        "real_seconds": real.seconds,
        "time error": abs(said.step_seconds / real.seconds - 1),
    }


def settings_of(play: Play, profile: str, folder: str) -> dict[str, Any]:
    n_bytes = sum(p.nbytes for p in play.build().parameters())
    where = {"nvme": folder} if "nvme" in play.settings else {}
    hbm = int(4 * play.share * n_bytes)
    return {"hbm": hbm, "device": "cpu:sim", "profile": profile, **play.settings, **where}


@contextmanager
def machine_file(machine: MachineProfile) -> Iterator[str]:
    """Write a profile where `hetero.plan` reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text(dump(machine), encoding="utf-8")
        yield str(path)


def plan_of(play: Play, settings: dict[str, Any]) -> Plan:
    torch.manual_seed(0)
    return plan(play.build(), play.batch, loss=itself, estimates=False, **settings)


def itself(loss: Any) -> torch.Tensor:
    found: torch.Tensor = loss
    return found


def trained(play: Play, settings: dict[str, Any], steps: int) -> Outcome:
    """Train for as many steps as a plan took, and a few more for the clock."""
    torch.manual_seed(0)
    model: Any = play.build()
    model, optimizer = prepare_tuned(
        model, torch.optim.AdamW(model.parameters()), Config.load(**settings), None
    )
    engine, step = engine_of(model), partial(stepped, model, play.batch)
    for _ in range(steps):
        step(optimizer)
    peaks = {tier.name: engine.setup.ledger.peak(tier) for tier in TIERS}
    seconds = statistics.median(timed(partial(step, optimizer)) for _ in range(CLOCKED))
    engine.release()
    return Outcome(peaks, seconds)


CLOCKED = 7  # steps, of which the median counts


def stepped(model: nn.Module, batch: torch.Tensor, optimizer: Any) -> None:
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- this machine, quickly -----------------------------------------------------------------------


PACE = replace(
    QUICK,
    name="bench",
    rounds=3,
    sample_seconds=0.01,
    matmul_divisors=(16, 4, 1),
    array_bytes=32 * MIB,
    copy_bytes=(2**12, 2**16, MIB, 4 * MIB),
    update_numel=MIB,
)


def fp32_matmuls(rig: Rig) -> Iterator[Probe]:
    """Operations per second of fp32 matmuls, over a grid of shapes."""
    kind = torch.float32
    for m, n, k in shapes(largest_side(rig, kind), rig.pace.matmul_divisors):
        call = matmul_of_each_layout(rig.device, kind, m, n, k)
        yield Probe("matmul.fp32", (m, n, k), rig.per_second(call, 3 * 2 * m * n * k))


def tier_beside_compute(rig: Rig) -> Iterator[Probe]:
    """Bytes per second of the disk tier, while another thread computes, as it does in a step.

    Digests, page tables and threads that take turns cost a machine of few cores more than its drive
    does.
    """
    uses = {"write": PinUse.FRESH, "read": PinUse.READ, "mixed": PinUse.WRITE}
    for size in TIER_BLOCKS:
        with scratch() as path, Folder.open(path) as folder, computing():
            pool = make_pool(folder, TIER_BYTES, TIER_BYTES // 4, size)
            home = home_of(pool, TIER_BYTES)
            scanned(pool, home, PinUse.FRESH, TIER_BYTES, size)
            for name, use in uses.items():
                sample = partial(scanned, pool, home, use, TIER_BYTES, size)
                yield Probe(f"nvme.{name}", (size,), sample)
            pool.close()


TIER_BLOCKS, TIER_BYTES = (2**17, 2**20), 2**25


@contextmanager
def computing() -> Iterator[None]:
    """Let another thread multiply matrices meanwhile."""
    over = threading.Event()

    def multiply() -> None:
        left, right = torch.ones(256, 256), torch.ones(256, 256)
        while not over.is_set():
            left @ right

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def calibrated() -> MachineProfile:
    """Return a profile of this machine as "cpu:sim" uses it, made with shapes of its own."""
    groups: dict[str, Group] = {
        "RAM": host_memory,
        "matmuls": fp32_matmuls,
        "launches": launches,
        "attention": attentions,
        "element-wise work": elementwise,
        "drive": tier_beside_compute,
        "link": link,
        "updates": updates,
        "overlap": overlaps,
    }
    began = time.perf_counter()
    with closing(open_device("cpu:sim")) as device:
        rig = Rig(device, PACE, Path.cwd())
        readings = take_readings(rig, groups, lambda *_: None)
        facts = look(rig, {})
    run = CalibrationRun(pace=PACE, seconds=time.perf_counter() - began)
    return with_own_work(as_in_steps(profile_of(facts, readings, run)))


STAYING = (gpt(288, 4, 128, 2.5), gpt(416, 2, 160, 2.5))  # models that stay: no work of hetero's


def as_in_steps(machine: MachineProfile) -> MachineProfile:
    """Return a profile whose processor is as fast as in whole steps.

    Caches, allocations and heat make operations slower one behind the other than each by itself.
    """
    ratios = []
    with machine_file(machine) as name:
        for play in STAYING:
            said = plan_of(play, settings_of(play, name, ""))
            real = trained(play, said.settings, len(said.rehearsal.steps))
            ratios.append(real.seconds / said.step_seconds)
    return slower(machine, statistics.median(ratios))


def slower(machine: MachineProfile, times: float) -> MachineProfile:
    """Return a profile whose operations take so many times as long."""
    host = machine.host
    matmul, table, functions = host.matmul, host.elementwise, host.functions_per_second
    if matmul is None or matmul.fp32_grid is None or table is None or functions is None:
        raise ConfigError("a machine without fp32 matmuls", advice="calibrate it")
    grid = matmul.fp32_grid
    matmul = replace(
        matmul,
        fp32_grid=replace(grid, rows=tuple((*r[:-1], r[-1] / times) for r in grid.rows)),
        launch_seconds=replace(matmul.launch_seconds, value=matmul.launch_seconds.value * times),
    )
    table = replace(table, rows=tuple((n, rate / times) for n, rate in table.rows))
    functions = replace(functions, value=functions.value / times)
    host = replace(host, matmul=matmul, elementwise=table, functions_per_second=functions)
    return replace(machine, host=host)


SMALL = (  # their steps are hetero's own work for the most part, in different shares
    gpt(64, 6, 48, 0.5, activations="keep", chunk_bytes=2**15),
    gpt(96, 3, 32, 0.4, activations="recompute", chunk_bytes=2**16),
    gpt(48, 4, 64, 0.4, activations="offload", chunk_bytes=2**15),
    gpt(64, 4, 32, 0.4, checkpoint=True),
    convolutional(16, 5, 0.6, chunk_bytes=2**15),
)


def with_own_work(machine: MachineProfile) -> MachineProfile:
    """Return a profile with what hetero's own work costs: the rest of steps that hardly compute.

    Least squares over what operations and accesses there were, relative to each step.
    """
    rests, counts = [], []
    with machine_file(machine) as name:
        for play in SMALL:
            said = plan_of(play, settings_of(play, name, ""))
            real = trained(play, said.settings, len(said.rehearsal.steps))
            step = said.rehearsal.steps[-1]
            rests.append(1 - step.seconds / real.seconds)
            work = step.operations, accesses_of(step)
            counts.append([n / real.seconds for n in work])
    counted, access = least_squares(np.array(counts), np.array(rests))
    host = replace(machine.host, access=Measured(access, "run"), counted=Measured(counted, "run"))
    return replace(machine, host=host)


def accesses_of(step: RehearsedStep) -> int:
    counts = dict(step.counts)
    return counts.get("hit", 0) + counts.get("miss", 0)


def least_squares(counts: np.ndarray, rests: np.ndarray) -> tuple[float, float]:
    """Return the costs, none below 0, that explain the rests best."""
    both, *_ = np.linalg.lstsq(counts, rests, rcond=None)
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [max(0.0, float(column @ rests / (column @ column))) for column in counts.T]
    errors = [float(np.square(rests - cost * counts[:, i]).sum()) for i, cost in enumerate(alone)]
    return (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])


# -- a large plan --------------------------------------------------------------------------------


LARGE = (
    *("plan", "llama-3-70b", "--profile", "h100-sxm", "--precision", "bf16"),
    *("--sequence", "4096", "--host", "1400GiB"),
)
THOUSAND = ("plan", "llama-3-405b", "--profile", "h200-sxm", "--ranks", "1000")
CLI = "import sys; from hetero.cli import main; sys.argv[0] = 'hetero'; main()"
# What the kernel says of a child that has ended (ru_maxrss) begins with what its parent held.
TELL_PEAK = """import atexit, os
def tell():
    with open("/proc/self/status") as status:
        row = next(row for row in status if row.startswith("VmHWM"))
    os.write({fd}, row.split()[1].encode())
atexit.register(tell)
"""


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Of its own memory, whatever the process that started it held."""


def measured(program: str, *arguments: str) -> Ended:
    """Run a Python program in a fresh process, without what it prints."""
    told, tell = os.pipe()
    with open(told, "rb") as reading:
        began = time.perf_counter()
        command = [sys.executable, "-c", TELL_PEAK.format(fd=tell) + program, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=(tell,))
        os.close(tell)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        peak = 1024 * int(reading.read() or b"0")
    return Ended(process.returncode, seconds, usage.ru_utime + usage.ru_stime, peak)


def plan_70b(device: str | None = None) -> Figures:
    """Seconds and peak memory of a fresh process that plans a model of 70 billion parameters."""
    return cost_of(LARGE, most_seconds=30.0)


def plan_1000(device: str | None = None) -> Figures:
    """The same of 405 billion parameters, on a thousand ranks of several machines."""
    return cost_of(THOUSAND, most_seconds=60.0)


def cost_of(command: tuple[str, ...], most_seconds: float) -> Figures:
    ended = measured(CLI, *command)
    if ended.code not in (0, 1):  # it fits, or does not
        raise ConfigError(
            f"hetero {' '.join(command)} ended with {ended.code}",
            advice="run it by itself and see what it says",
        )
    rows = [
        Figure("wall time", ended.seconds, "s", "<", most_seconds),
        Figure("peak memory", ended.peak_bytes / GIB, "GiB", "<", 1.0),
    ]
    detail = {"command": f"hetero {' '.join(command)}", "cpu_seconds": ended.cpu_seconds}
    return Figures(rows, detail)


# -- a record of a run ---------------------------------------------------------------------------


def profile_cost(device: str | None = None, pairs: int = 31) -> Figures:
    """A step that is recorded over one whose event log is off; paired, median."""
    device = device or "cpu:sim"
    torch.manual_seed(0)
    shape = GPTConfig(width=256, layers=8, heads=8, context=128, checkpoint_blocks=False)
    model: Any = GPT(shape)
    hbm = 7 * sum(p.nbytes for p in model.parameters()) // 2  # the model does not stay
    model, optimizer = prepare_tuned(
        model, adamw(model), Config.load(device=device, hbm=hbm, activations="keep"), None
    )
    tokens = torch.zeros(
        4, 128, dtype=torch.long, device=engine_of(model).setup.device.torch_device
    )
    step = partial(train_step, model, optimizer, tokens)
    for _ in range(4):
        step()
    walls, works = [], []
    for pair in range(pairs):
        took = {}
        for on in (True, False) if pair % 2 else (False, True):
            took[on] = recorded_or_not(model, step, on)
        walls.append(took[True].wall / took[False].wall)
        works.append(took[True].work / took[False].work)
    rows = [Figure("step, recorded / not", statistics.median(walls), "ratio", "<=", 1.01)]
    detail = {"ratios": walls, "processor time": statistics.median(works)}
    return Figures(rows, {**detail, "mode": engine_of(model).residence.name})


class Took(NamedTuple):
    """Seconds of a step: on the clock, and of all threads' work."""

    wall: float
    work: float


def recorded_or_not(model: nn.Module, step: Callable[[], None], on: bool) -> Took:
    log = engine_of(model).setup.log
    with ExitStack() as stack:
        if on:
            stack.enter_context(tempfile_of_a_run(model))
        log.enabled = on
        work = time.process_time()
        wall = timed(step)
        found = Took(wall, time.process_time() - work)
        log.enabled = True
    return found


@contextmanager
def tempfile_of_a_run(model: nn.Module) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, recorded(model, folder):
        yield


# -- what is chosen when nobody chooses ----------------------------------------------------------


BUDGET_SHARES = (0.3, 0.4, 0.5, 0.8, 1.2)  # of parameters, gradients and states
DEPTHS = (1, 2, 4, None)
CHUNKS = (None, 2**22)
CHOICES = ("keep", "recompute", "offload")


def auto(device: str | None = None) -> Figures:
    """Nothing set over the best of a grid of settings, at five budgets; virtual clock."""
    machine = find("rtx4090")
    torch.manual_seed(0)
    shape = GPTConfig(width=1024, layers=6, heads=8, context=512, checkpoint_blocks=False)
    with torch.device("meta"):
        model = WithTargets(shape)
    tokens = torch.zeros(4, 512, dtype=torch.long)
    ratios, detail = [], {}
    for share in BUDGET_SHARES:
        hbm = int(4 * share * sum(p.nbytes for p in model.parameters()))
        seconds = partial(step_seconds, model, tokens, machine, hbm)
        chosen = seconds("auto", None, None)
        grid = {key: seconds(*key) for key in itertools.product(CHOICES, DEPTHS, CHUNKS)}
        best = min(grid, key=lambda key: grid[key])
        ratios.append(chosen / grid[best])
        detail[f"{share:g} of the states"] = {
            "auto_seconds": chosen,
            "best_seconds": grid[best],
            "best": dict(zip(("activations", "depth", "chunk_bytes"), best, strict=True)),
        }
    return Figures([Figure("auto / best of a grid", max(ratios), "ratio", "<=", 1.05)], detail)


def step_seconds(
    model: nn.Module,
    tokens: torch.Tensor,
    machine: MachineProfile,
    hbm: int,
    activations: str,
    depth: int | None,
    chunk_bytes: int | None,
) -> float:
    """Return the time of a settled step; endless where it does not fit."""
    twin = twin_of(model, torch.optim.AdamW(model.parameters()))
    config = Config.load(
        device="cuda", hbm=hbm, host=2**40, activations=activations, chunk_bytes=chunk_bytes
    )
    scene = Scene(
        model=twin.model,
        optimizer=twin.optimizer,
        args=(batch_twin(tokens),),
        kwargs={},
        loss=itself,
        config=config,
        profile=machine,
        depth=depth,
    )
    try:
        found = rehearse(scene)
    except BudgetError:
        return float("inf")
    return float("inf") if found.error is not None else found.step_seconds
