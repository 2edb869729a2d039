"""The measurement of `hetero calibrate`: repeat probes, summarise them, write a profile.

`hetero.recipes.probes` defines the measurements. Here samples become figures (a median and a
spread), and figures become the profile of this machine, which passes the linter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from hetero.cores import torch_threads
from hetero.device import open_device
from hetero.errors import ConfigError, StorageError
from hetero.mounts import mount_of
from hetero.parallel.launch import launch
from hetero.plan.figures import Figure, Table
from hetero.plan.hardware import dump, lint, load
from hetero.plan.lint import card_of, entries
from hetero.plan.machine import (
    DTYPES,
    Citation,
    Direction,
    Duplex,
    Gpu,
    Host,
    LinkRates,
    MachineProfile,
    Matmul,
    Overlap,
    Peaks,
    Quality,
    ThreadRates,
)
from hetero.plan.rates import axes, grid_rate, side_of
from hetero.recipes.doctor import usable_cores
from hetero.recipes.drive import Cliff, burn_in, drive, nvme_of
from hetero.recipes.facts import MachineFacts, host_name, look, used_bytes
from hetero.recipes.probes import (
    LATENCY_BYTES,
    QUICK,
    Group,
    Pace,
    Rig,
    attention_work,
    attentions,
    device_memory,
    elementwise,
    host_memory,
    launches,
    link,
    matmuls,
    overlaps,
    updates,
)
from hetero.recipes.readings import RUN, Readings, Samples, Watch, label, rounded, take_readings
from hetero.recipes.wires import Wiring, measure_wires, net_of
from hetero.types import Lane, format_bytes

PATIENCE_SECONDS = 24 * 3600.0
"""With the first rank, while it measures: a burn-in takes hours. Its death is noticed at once."""
FOLDER = "profiles"  # in the working directory
NOISY = 0.05  # a larger spread is reported
SYSTEM, SPEC = "sys", "spec"  # keys of sources


# -- the profile ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    pace: Pace
    seconds: float
    cliff: Cliff | None = None
    wiring: Wiring | None = None


def profile_of(facts: MachineFacts, readings: Readings, run: CalibrationRun) -> MachineProfile:
    profile = MachineProfile(
        name=facts.name,
        kind="measured",
        sources=sources(run, facts),
        gpu=gpu_of(facts, readings),
        link=link_of(facts, readings),
        host=host_of(facts, readings),
        nvme=nvme_of(readings, run.cliff, odirect=facts.odirect),
        net=net_of(readings, run.wiring),
        overlap=overlap_of(readings),
        quality=quality_of(facts, readings, run),
    )
    return with_spreads(profile)


def sources(run: CalibrationRun, facts: MachineFacts) -> tuple[Citation, ...]:
    pace = run.pace
    said = (
        f"hetero calibrate --{pace.name}, median of {pace.rounds} after {pace.warm_ups} to warm up"
    )
    if run.wiring is not None:
        said += f"; {run.wiring}"
    found = [Citation(RUN, said), Citation(SYSTEM, "what the operating system and the driver say")]
    if facts.accelerator is not None and card_of(facts.accelerator.name) is not None:
        found.append(Citation(SPEC, "vendor datasheet: dense, fp32 accumulate"))
    return tuple(found)


def gpu_of(facts: MachineFacts, readings: Readings) -> Gpu | None:
    """Return the device's section; its rate is the better of copy and triad."""
    triad, copy = readings.figure("gpu.triad"), readings.figure("gpu.copy")
    matmul = matmul_of(readings, on_cpu=False)
    if facts.accelerator is None or triad is None or copy is None or matmul is None:
        return None
    best = max(triad, copy, key=lambda figure: figure.value)
    return Gpu(
        name=facts.accelerator.name,
        arch=facts.accelerator.arch,
        count=max(1, facts.accelerators),
        sm=facts.accelerator.multiprocessors,
        hbm_bytes=Figure(facts.accelerator.total_bytes, SYSTEM),
        hbm_bytes_per_second=best,
        hbm_efficiency=Figure(rounded(triad.value / best.value), RUN, triad.spread),
        context_bytes=None if facts.context_bytes is None else Figure(facts.context_bytes, SYSTEM),
        tflops=peaks_of(facts.accelerator.name, matmul),
        matmul=matmul,
    )


def peaks_of(name: str, matmul: Matmul) -> Peaks:
    """Return a known card's dense rates, without those that a measurement exceeds."""
    card, found = card_of(name), {}
    for dtype in DTYPES if card is not None else ():
        peak, grid = getattr(card, dtype), matmul.grid(dtype)
        if peak is not None and grid is not None and max(r[-1] for r in grid.rows) <= peak * 1e12:
            found[dtype] = Figure(peak * 1e12, SPEC)
    return Peaks(**found)


def matmul_of(readings: Readings, *, on_cpu: bool) -> Matmul | None:
    launch = readings.figure("matmul.launch")
    if launch is None:
        return None
    matmul = Matmul(
        launch_seconds=launch,
        fp32_grid=full(readings.table("matmul.fp32")),
        bf16_grid=full(readings.table("matmul.bf16")),
        fp16_grid=full(readings.table("matmul.fp16")),
    )
    return replace(
        matmul,
        attention=attention_of(matmul, readings, on_cpu, backward=False),
        attention_backward=attention_of(matmul, readings, on_cpu, backward=True),
    )


def attention_of(
    matmul: Matmul, readings: Readings, on_cpu: bool, *, backward: bool
) -> Figure | None:
    """Return the share of a matmul's rate that attention reaches."""
    found = readings.figure(f"attention.{'backward' if backward else 'forward'}")
    grid = matmul.fp32_grid if on_cpu else matmul.bf16_grid
    if found is None or grid is None:
        return None
    side = side_of(attention_work(on_cpu, backward=backward))
    share = found.value / grid_rate(grid.rows, side, side, side)
    return Figure(min(1.0, rounded(share)), RUN, found.spread)


def full(grid: Table | None) -> Table | None:
    """Return a grid, or None if its measurement was cut short."""
    if grid is None or len(grid.rows) < math.prod(map(len, axes(grid.rows))):
        return None
    return grid


def link_of(facts: MachineFacts, readings: Readings) -> LinkRates | None:
    """Return the link's section; a direction is never faster in duplex than alone."""
    h2d, d2h = (direction_of(facts, readings, lane) for lane in (Lane.H2D, Lane.D2H))
    duplex = [readings.figure(f"link.duplex.{lane.value}") for lane in (Lane.H2D, Lane.D2H)]
    if h2d is None or d2h is None or duplex[0] is None or duplex[1] is None:
        return None
    both = Duplex(
        h2d_bytes_per_second=at_most(duplex[0], h2d.bytes_per_second.value),
        d2h_bytes_per_second=at_most(duplex[1], d2h.bytes_per_second.value),
    )
    return LinkRates(h2d=h2d, d2h=d2h, duplex=both)


def direction_of(facts: MachineFacts, readings: Readings, lane: Lane) -> Direction | None:
    """Return one direction; its rate is that of the largest copies."""
    key = f"link.{lane.value}"
    small, *sized = readings.of(key) or [Samples(key, (), (0.0,))]
    if not sized:
        return None
    top, pageable = sized[-1], readings.figure(f"{key}.pageable")
    share = None if pageable is None else min(1.0, rounded(pageable.value / top.median))
    return Direction(
        type=facts.link_type,
        bytes_per_second=Figure(top.median, RUN, top.spread),
        latency_seconds=Figure(rounded(LATENCY_BYTES / small.median), RUN, small.spread),
        pageable_factor=None
        if share is None or pageable is None
        else Figure(share, RUN, pageable.spread),
        size_curve=size_curve(sized),
    )


def size_curve(sized: Sequence[Samples]) -> Table:
    """Return the share of the largest copies' rate by size: ascending, at most 1.

    Small copies within a processor's caches may be faster than large ones; they get at most the
    share of their larger neighbour. No share grows faster than the size, else a larger copy would
    finish sooner.
    """
    top, most, shares = sized[-1].median, 1.0, []
    for each in reversed(sized):
        most = min(most, each.median / top)
        shares.append(most)
    shares.reverse()
    for i in range(1, len(shares)):
        shares[i] = min(shares[i], shares[i - 1] * sized[i].at[0] / sized[i - 1].at[0])
    rows = tuple((float(m.at[0]), rounded(s)) for m, s in zip(sized, shares, strict=True))
    return Table(rows, RUN, max(each.spread for each in sized))


def host_of(facts: MachineFacts, readings: Readings) -> Host:
    """Return the host's section; ConfigError if a figure that it needs could not be measured."""
    dram, update = readings.best("host.dram"), readings.best("host.update")
    if dram is None or update is None:
        why = "; ".join(readings.notes)
        raise ConfigError(f"RAM and updates could not be measured: {why}", advice="free some RAM")
    computes = facts.accelerator is None
    gemm = {
        f"gemm_{dtype}_per_second": readings.last(f"matmul.{dtype}") if computes else None
        for dtype in ("fp32", "bf16", "fp16")
    }
    memlock = facts.memlock_bytes
    return Host(
        cores=facts.cores,
        numa_nodes=facts.numa_nodes,
        isa=facts.isa,
        ram_bytes=Figure(facts.ram_bytes, SYSTEM),
        limit_bytes=Figure(facts.limit_bytes, SYSTEM),
        memlock_bytes=None if memlock is None else Figure(memlock, SYSTEM),
        lock_bytes_per_second=readings.figure("host.lock"),
        dram_bytes_per_second=dram,
        update_per_second=update,
        threads=ThreadRates(dram=readings.table("host.dram"), update=readings.table("host.update")),
        elementwise=readings.table("host.elementwise"),
        functions_per_second=readings.figure("host.functions"),
        matmul=matmul_of(readings, on_cpu=True) if computes else None,
        **gemm,
    )


def overlap_of(readings: Readings) -> Overlap:
    """Return the slowdowns; a value below 1 is noise."""
    found = {f.name: readings.figure(f"overlap.{f.name}") for f in fields(Overlap)}
    return Overlap(**{k: None if v is None else at_least(v, 1.0) for k, v in found.items()})


def at_most(figure: Figure, most: float) -> Figure:
    return Figure(min(figure.value, most), figure.source, figure.spread)


def at_least(figure: Figure, least: float) -> Figure:
    return Figure(max(figure.value, least), figure.source, figure.spread)


def quality_of(facts: MachineFacts, readings: Readings, run: CalibrationRun) -> Quality:
    return Quality(
        measured_on=datetime.now(timezone.utc).date().isoformat(),
        device=facts.device,
        mode=run.pace.name,
        seconds=rounded(run.seconds, 3),
        notes=readings.notes,
        torch=torch.__version__,
        driver=facts.driver,
    )


def with_spreads(profile: MachineProfile) -> MachineProfile:
    """Return a profile whose quality section names the keys with too large a spread."""
    spreads = {key: item.spread for key, item, _ in entries(profile)}
    noisy = tuple(key for key, spread in spreads.items() if spread > NOISY)
    worst = rounded(100 * max(spreads.values(), default=0.0), 3)
    return replace(profile, quality=replace(profile.quality, noisy=noisy, spread_percent=worst))


GROUPS: dict[str, Group] = {
    "device memory": device_memory,
    "RAM": host_memory,
    "matmuls": matmuls,
    "launches": launches,
    "attention": attentions,
    "element-wise work": elementwise,
    "link": link,
    "updates": updates,
    "overlap": overlaps,
    "drive": drive,
}


# -- the run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    pace: Pace = QUICK
    device: str | None = None
    output: Path | None = None
    """File to write; None: profiles/ in the working directory, under the machine's name."""
    nvme: Path | None = None
    """Directory on the drive to measure; None: the working directory, if it is on a drive."""
    burn_in_bytes: int | None = None
    """Bytes to write to find where the drive slows down; None: do not wear it."""


class FigureRow(NamedTuple):
    """One line of the figures."""

    key: str
    value: str
    spread: str
    noisy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    path: str
    profile: MachineProfile
    problems: tuple[str, ...]
    """The linter's findings."""

    def rows(self) -> Iterator[FigureRow]:
        """Yield every measured figure, and every row of a table, as text for people."""
        for key, item, form in entries(self.profile):
            unit = form.exponents[-1]
            noisy = item.spread > NOISY
            spread = f"{100 * item.spread:.1f} %" if item.spread else ""
            if isinstance(item, Figure):
                yield FigureRow(key, f"{item.value / 10**unit:.4g}", spread, noisy)
                continue
            for *where, value in item.rows:
                name = label(key, [int(x) for x in where])
                yield FigureRow(name, f"{value / 10**unit:.4g}", spread and f"to {spread}", noisy)

    def as_json(self) -> dict[str, Any]:
        """Return every figure by its key, in bytes, seconds or operations per second."""
        found = [
            {"key": key, "value": item.value, "source": item.source, "spread": item.spread}
            for key, item, _ in entries(self.profile)
            if isinstance(item, Figure)
        ]
        quality = self.profile.quality
        return {
            "path": self.path,
            "name": self.profile.name,
            "seconds": quality.seconds,
            "noisy": list(quality.noisy),
            "notes": list(quality.notes),
            "problems": list(self.problems),
            "figures": found,
        }


def silent(group: str, probe: str, done: int, groups: int) -> None:
    """Ignore the progress."""


def calibrate(options: CalibrateOptions, watch: Watch = silent) -> Calibration:
    """Measure this machine and write its profile; takes a minute, or eight with `FULL`.

    Ranks that a launcher started call it together. The first one measures its machine while the
    others wait, then all measure what joins them. The first one writes; all return the same.
    """
    with launch(PATIENCE_SECONDS) as ranks:
        alone = ranks.first(partial(measure_machine, options, watch, ranks.size), "the machine")
        found, wiring = measure_wires(ranks, options.pace, options.device, at_the_end(watch))
        return ranks.first(partial(write, alone, found, wiring), "the profile")


def at_the_end(watch: Watch) -> Watch:
    """Return a watch of what comes after all groups."""
    return lambda group, probe, done, groups: watch(group, probe, len(GROUPS), len(GROUPS))


class Machine(NamedTuple):
    """What was measured of a machine, and the path of its profile."""

    path: Path
    pace: Pace
    began: float
    facts: MachineFacts
    readings: Readings
    cliff: Cliff | None


def measure_machine(options: CalibrateOptions, watch: Watch, n_ranks: int) -> Machine:
    """Measure this machine with all its cores."""
    # 1. fail now on anything that would fail at the end
    path = writable(options.output or Path(FOLDER) / f"{host_name()}.toml")
    folder, note = drive_folder(options)
    # 2. measure
    began, used = time.perf_counter(), used_bytes()
    with closing(open_device(options.device)) as device, threads_alone(n_ranks):
        rig = Rig(device, options.pace, folder)
        readings = take_readings(rig, GROUPS, watch)
        facts = look(rig, used)
    cliff, trouble = find_cliff(options, folder, watch)
    readings = Readings(readings.found, (*readings.notes, *note, *trouble))
    return Machine(path, options.pace, began, facts, readings, cliff)


def threads_alone(n_ranks: int) -> AbstractContextManager[None]:
    """Let torch use the threads of a process that is alone: torchrun leaves each rank one."""
    if n_ranks == 1 or torch.get_num_threads() > 1:
        return nullcontext()
    cores = usable_cores()
    return torch_threads(min(cores, psutil.cpu_count(logical=False) or cores))


def write(machine: Machine, found: Readings, wiring: Wiring | None) -> Calibration:
    """Write the profile of a machine and what joins its ranks."""
    readings = machine.readings.joined(found)
    seconds = time.perf_counter() - machine.began
    run = CalibrationRun(pace=machine.pace, seconds=seconds, cliff=machine.cliff, wiring=wiring)
    profile = profile_of(machine.facts, readings, run)
    text = dump(profile)
    machine.path.write_text(text, encoding="utf-8")
    return Calibration(path=str(machine.path), profile=profile, problems=tuple(lint(text)))


def find_cliff(
    options: CalibrateOptions, folder: Path | None, watch: Watch
) -> tuple[Cliff | None, Iterable[str]]:
    """Return where the drive slows down, if requested, and a note if that is unknown."""
    n_bytes = options.burn_in_bytes
    if n_bytes is None or folder is None:
        return None, ()
    at_the_end(watch)("burn-in", "", 0, 1)
    try:
        cliff = burn_in(folder, n_bytes)
    except StorageError as error:
        return None, (f"burn-in: {error.args[0]}",)
    said = f"burn-in: {format_bytes(n_bytes)} were written at the drive's first rate"
    return cliff, () if cliff is not None else (said,)


def writable(path: Path) -> Path:
    """Return a writable path; ConfigError if it is not writable, or is a reference."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        said = f"output {path}: {error.strerror}"
        raise ConfigError(said, advice="name another --output") from error
    if there and is_reference(path):
        raise ConfigError(f"{path} is a reference profile", advice="name another --output")
    return path


def is_reference(path: Path) -> bool:
    try:
        return load(path).kind == "reference"
    except ConfigError:
        return False


def drive_folder(options: CalibrateOptions) -> tuple[Path | None, Iterable[str]]:
    """Return the directory whose drive is measured, and a note if there is none.

    Raises ConfigError for a requested directory that is on a network or in RAM.
    """
    path = options.nvme or Path.cwd()
    mount = mount_of(path)
    if path.is_dir() and not mount.is_ram and not mount.is_far:
        return path, ()
    what = f"is on {mount.kind or 'no known file system'}" if path.is_dir() else "is no directory"
    if options.nvme is not None:
        raise ConfigError(f"--nvme {path} {what}", advice="name a directory on a local drive")
    return None, (f"drive: the working directory {what}; name one with --nvme",)
