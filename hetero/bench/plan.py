"""How good plans are, and what they and records of runs cost (floor 4)."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.api import engine_of, prepare_tuned
from hetero.bench.engine import Figure, Figures, adamw, timed, train_step
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import BudgetError, ConfigError
from hetero.plan.hardware import Figure as Measured
from hetero.plan.hardware import Profile, dump, find
from hetero.recipes.calibrate import Run, look, profile_of, take_readings
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.probes import (
    LAUNCHES,
    MIB,
    QUICK,
    Group,
    Probe,
    Rig,
    host_memory,
    largest_side,
    link,
    matmul,
    overlaps,
    shapes,
    updates,
)
from hetero.rehearse.plan import Plan, plan
from hetero.rehearse.rehearsal import Scene, rehearse
from hetero.rehearse.twin import batch_twin, twin_of
from hetero.report.profile import profile as recorded
from hetero.train.meter import LiveBytes
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
    accesses: int


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
            ((96, 4, 64), (160, 6, 96), (192, 4, 128)),
            ((0.15, 2**14), (0.3, 2**15), (0.6, 2**16), (1.2, 2**16), (2.5, 2**17)),
        )
    ]
    for activations in ("keep", "recompute", "offload"):
        plays.append(gpt(128, 5, 96, 0.4, activations=activations, chunk_bytes=2**15))
        plays.append(gpt(128, 5, 96, 0.8, activations=activations, chunk_bytes=2**16))
    plays += [gpt(128, 5, 96, share, checkpoint=True) for share in (0.25, 0.5, 1.0)]
    plays += [convolutional(32, 5, share, chunk_bytes=2**14) for share in (0.3, 0.6, 3.0)]
    plays += [
        gpt(160, 5, 64, share, host=host, nvme=True)
        for share, host in ((0.3, 2**23), (0.5, 12 * 2**20), (0.8, 2**23))
    ]
    return plays


def predict(device: str | None = None) -> Figures:
    """Plans of 30 runs against the runs: bytes of every tier, and the time of a step."""
    machine = calibrated()
    rows = [against(play, machine) for play in tried()]
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
    access = machine.host.access_seconds
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Figures(figures, {"runs": rows, "access_us": 1e6 * access, "load": load})


def quantile(ascending: list[float], share: float) -> float:
    """Return the least value that a share of all are not above."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def against(play: Play, machine: Profile) -> dict[str, Any]:
    """Return what a plan says of a run, and what the run took."""
    with machine_file(machine) as name, tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        settings = settings_of(play, name, folder)
        said = plan_of(play, settings)
        real = trained(play, said.settings, len(said.rehearsal.steps))
    peaks = {tier.name: said.rehearsal.peaks[tier] for tier in TIERS}
    return {
        "name": play.name,
        "settings": {k: v for k, v in settings.items() if k not in ("nvme", "profile")},
        "planned": peaks,
        "real": real.peaks,
        "peak error": abs(peaks["HBM"] - real.peaks["HBM"]) / real.peaks["HBM"],
        "exact": all(peaks[tier] == real.peaks[tier] for tier in ("HOST", "NVME")),
        "planned_seconds": said.step_seconds,
        "real_seconds": real.seconds,
        "time error": abs(said.step_seconds - real.seconds) / real.seconds,
    }


def settings_of(play: Play, profile: str, folder: str) -> dict[str, Any]:
    n_bytes = sum(p.nbytes for p in play.build().parameters())
    where = {"nvme": folder} if "nvme" in play.settings else {}
    hbm = int(4 * play.share * n_bytes)
    return {"hbm": hbm, "device": "cpu:sim", "profile": profile, **play.settings, **where}


@contextmanager
def machine_file(machine: Profile) -> Iterator[str]:
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
    peaks = {tier.name: engine.ledger.peak(tier) for tier in TIERS}
    seconds = statistics.median(timed(partial(step, optimizer)) for _ in range(CLOCKED))
    counts = engine.stats.counts if engine.mode == "paged" else {}
    accesses = counts.get("hit", 0) + counts.get("miss", 0)
    engine.release()
    return Outcome(peaks, seconds, accesses)


CLOCKED = 5  # steps, of which the median counts


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
PLAINEST = {"width": 16, "layers": 6, "tokens": 16}  # nearly all of its steps is hetero's own work


def fp32_matmuls(rig: Rig) -> Iterator[Probe]:
    """Operations per second of fp32 matmuls, over a grid of shapes."""
    kind = torch.float32
    for m, n, k in shapes(largest_side(rig, kind), rig.pace.matmul_divisors):
        sample = rig.per_second(matmul(rig.device, kind, m, n, k), 2 * m * n * k)
        yield Probe("matmul.fp32", (m, n, k), sample)


def counted_launches(rig: Rig) -> Iterator[Probe]:
    """What an operation without work costs where every allocation is counted."""
    one = torch.zeros(1)

    def sample() -> float:
        with LiveBytes():
            return rig.seconds(lambda: one + 1, LAUNCHES) / LAUNCHES

    yield Probe("matmul.launch", (), sample)


def calibrated() -> Profile:
    """Return a profile of this machine as "cpu:sim" uses it, made with shapes of its own."""
    groups: dict[str, Group] = {
        "RAM": host_memory,
        "matmuls": fp32_matmuls,
        "launches": counted_launches,
        "link": link,
        "updates": updates,
        "overlap": overlaps,
    }
    began = time.perf_counter()
    with closing(open_device("cpu:sim")) as device:
        rig = Rig(device, PACE)
        readings = take_readings(rig, groups, lambda *_: None)
        facts = look(rig, 0)
    run = Run(pace=PACE, seconds=time.perf_counter() - began)
    machine = replace(profile_of(facts, readings, run), nvme=find("laptop-4c-avx2-ddr4").nvme)
    return with_accesses(with_source(machine))


def with_source(machine: Profile) -> Profile:
    """Return a profile that knows the sources of the drive that it borrowed."""
    known = {source.key for source in machine.sources}
    more = [s for s in find("laptop-4c-avx2-ddr4").sources if s.key not in known]
    return replace(machine, sources=(*machine.sources, *more))


def with_accesses(machine: Profile) -> Profile:
    """Return a profile with what an access costs: the rest of a step that hardly computes."""
    play = gpt(PLAINEST["width"], PLAINEST["layers"], PLAINEST["tokens"], 0.5, chunk_bytes=1024)
    with machine_file(machine) as name:
        said = plan_of(play, settings_of(play, name, ""))
        real = trained(play, said.settings, len(said.rehearsal.steps))
    rest = max(0.0, real.seconds - said.step_seconds) / max(1, real.accesses)
    return replace(machine, host=replace(machine.host, access=Measured(rest, "run")))


# -- a large plan --------------------------------------------------------------------------------


LARGE = (
    *("plan", "llama-3-70b", "--profile", "h100-sxm", "--precision", "bf16"),
    *("--sequence", "4096", "--host", "1400GiB"),
)
CLI = "import sys; from hetero.cli import main; sys.argv[0] = 'hetero'; main()"


def plan_70b(device: str | None = None) -> Figures:
    """Seconds and peak memory of a fresh process that plans a model of 70 billion parameters."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", CLI, *LARGE], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ConfigError(
            f"hetero {' '.join(LARGE)} ended with {process.returncode}",
            advice="run it by itself and see what it says",
        )
    rows = [
        Figure("wall time", seconds, "s", "<", 30.0),
        Figure("peak memory", usage.ru_maxrss * 1024 / GIB, "GiB", "<", 1.0),
    ]
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Figures(rows, {"command": f"hetero {' '.join(LARGE)}", "cpu_seconds": cpu_seconds})


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
    tokens = torch.zeros(4, 128, dtype=torch.long, device=engine_of(model).device.torch_device)
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
    return Figures(rows, {**detail, "mode": engine_of(model).mode})


class Took(NamedTuple):
    """Seconds of a step: on the clock, and of all threads' work."""

    wall: float
    work: float


def recorded_or_not(model: nn.Module, step: Callable[[], None], on: bool) -> Took:
    log = engine_of(model).log
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
    machine: Profile,
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
