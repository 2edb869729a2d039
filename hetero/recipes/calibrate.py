"""The measurement behind `hetero calibrate`: probes repeated, summarised, written as a profile.

`hetero.recipes.probes` says what is measured. Here samples become figures (a median and a spread),
and figures become the profile of this machine, which passes the linter.
"""

from __future__ import annotations

import math
import platform
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from hetero.device import Accelerator, Device, open_device
from hetero.errors import ConfigError, StorageError
from hetero.io import Folder
from hetero.memory.pool import N_THREADS
from hetero.mounts import mount_of
from hetero.plan.hardware import (
    DTYPES,
    Direction,
    Duplex,
    Figure,
    Gpu,
    Host,
    Io,
    Link,
    Matmul,
    Nvme,
    Overlap,
    Peaks,
    Profile,
    Quality,
    Source,
    Table,
    Threads,
    dump,
    lint,
    load,
)
from hetero.plan.lint import card_of, entries, physical_gbps
from hetero.plan.rates import axes, grid_rate, side_of
from hetero.recipes.doctor import ask_driver
from hetero.recipes.probes import (
    GROUPS,
    LATENCY_BYTES,
    QUICK,
    Cliff,
    Group,
    Pace,
    Probe,
    Rig,
    attention_work,
    burn_in,
)
from hetero.recipes.work import SIZE
from hetero.types import Lane, format_bytes

FOLDER = "profiles"  # in the working directory
NOISY = 0.05  # a spread above it is told
DIGITS = 4  # of a measured number: more would be noise
RUN, SYSTEM, SPEC = "run", "sys", "spec"  # keys of sources
ISA = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "sve2")
COHERENT = ("GH200", "GB200", "GB300")  # joined to their host by C2C, not by PCIe
Watch = Callable[[str, str, int, int], None]
"""Told of each probe: its group, its key, how many groups are done, and how many there are."""


# -- samples -------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The samples of one probe."""

    key: str
    at: tuple[int, ...]
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median, to `DIGITS` digits."""
        return rounded(statistics.median(self.samples))

    @property
    def spread(self) -> float:
        """Return the interquartile range over the median."""
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        middle = statistics.median(self.samples)
        return rounded((high - low) / middle, 2) if middle else 0.0


def rounded(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def measure(probe: Probe, pace: Pace) -> Measured:
    """Take samples of a probe: those that warm up are thrown away."""
    for _ in range(pace.warm_ups):
        probe.sample()
    return Measured(probe.key, probe.at, tuple(probe.sample() for _ in range(pace.rounds)))


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything measured, and what could not be."""

    found: tuple[Measured, ...]
    notes: tuple[str, ...] = ()

    def figure(self, key: str) -> Figure | None:
        """Return what a probe without axes found."""
        found = self.of(key)
        return Figure(found[0].median, RUN, found[0].spread) if found else None

    def table(self, key: str) -> Table | None:
        """Return what a probe found along its axes."""
        found = self.of(key)
        rows = tuple((*map(float, each.at), each.median) for each in found)
        return Table(rows, RUN, max(each.spread for each in found)) if found else None

    def best(self, key: str) -> Figure | None:
        """Return the largest of what a probe found along its axes."""
        found = max(self.of(key), key=lambda each: each.median, default=None)
        return Figure(found.median, RUN, found.spread) if found else None

    def last(self, key: str) -> Figure | None:
        """Return what a probe found where its axes are largest."""
        found = self.of(key)
        return Figure(found[-1].median, RUN, found[-1].spread) if found else None

    def of(self, key: str) -> list[Measured]:
        """Return what was measured under a key, in ascending order of its axes."""
        return sorted((each for each in self.found if each.key == key), key=lambda each: each.at)


def take_readings(rig: Rig, groups: Mapping[str, Group], watch: Watch) -> Readings:
    """Measure group by group; one that fails is noted, and the others go on."""
    found: list[Measured] = []
    notes: list[str] = []
    for done, (name, group) in enumerate(groups.items()):
        watch(name, "", done, len(groups))
        try:
            for probe in group(rig):
                watch(name, label(probe.key, probe.at), done, len(groups))
                found.append(measure(probe, rig.pace))
        except (RuntimeError, MemoryError, StorageError) as error:
            notes.append(f"{name}: {str(error).splitlines()[0] or type(error).__name__}")
    watch("", "", len(groups), len(groups))
    return Readings(tuple(found), tuple(notes))


def label(key: str, at: Sequence[int]) -> str:
    return f"{key} {' x '.join(map(str, at))}".rstrip()


# -- what the system says ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What needs no measuring."""

    name: str
    cores: int
    numa_nodes: int
    isa: tuple[str, ...]
    ram_bytes: int
    limit_bytes: int
    memlock_bytes: int | None
    """None: no limit."""
    device: str
    link_type: str
    accelerator: Accelerator | None = None
    accelerators: int = 0
    context_bytes: int | None = None
    driver: str = ""
    odirect: bool = False


def look(rig: Rig, used_before_bytes: int) -> Facts:
    """Return the facts of this machine; ``used_before_bytes`` of HBM were before this process."""
    driver, gpus, _ = ask_driver()
    accelerator = rig.device.facts()
    pcie = gpus[0].pcie.lower().replace(" ", "") if gpus else ""
    return Facts(
        name=host_name(),
        cores=rig.cores,
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        isa=instruction_sets(),
        ram_bytes=psutil.virtual_memory().total,
        limit_bytes=rig.limit_bytes,
        memlock_bytes=memlock_bytes(),
        device=rig.device.name,
        link_type="ram" if accelerator is None else link_type(accelerator.name, pcie),
        accelerator=accelerator,
        accelerators=len(gpus) if accelerator is not None else 0,
        context_bytes=context_bytes(rig.device, used_before_bytes),
        driver=driver,
        odirect=rig.folder is not None and is_direct(rig.folder),
    )


def host_name() -> str:
    """Return this machine's name as one that a file can have."""
    return re.sub(r"[^a-z0-9-]+", "-", platform.node().lower()).strip("-") or "machine"


def instruction_sets(path: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the vector extensions that matter to matmuls; none where that is unknown."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    has = set(line[1].split()) if line else set()
    return tuple(name for name in ISA if name in has)


def memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def link_type(gpu: str, pcie: str) -> str:
    """Return the type of a link as profiles name it; a virtual device may not say."""
    if any(name in gpu for name in COHERENT):
        return "c2c"
    return pcie if physical_gbps(pcie) is not None else "unknown"


def used_bytes() -> int:
    """Return what is used of the first device's HBM, as its driver counts; 0 without a driver."""
    _, gpus, _ = ask_driver()
    return gpus[0].total_bytes - gpus[0].free_bytes if gpus else 0


def context_bytes(device: Device, used_before_bytes: int) -> int | None:
    """Return what the driver took of HBM for this process's context and kernels."""
    total, free = device.total_bytes(), device.free_bytes()
    if total is None or free is None:
        return None
    return max(0, total - free - device.reserved_bytes() - used_before_bytes)


def is_direct(path: Path) -> bool:
    with Folder.open(path) as folder, folder.private() as file:
        return file.direct


# -- the profile ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a calibration went."""

    pace: Pace
    seconds: float
    cliff: Cliff | None = None


def profile_of(facts: Facts, readings: Readings, run: Run) -> Profile:
    """Return the profile that readings make."""
    profile = Profile(
        name=facts.name,
        kind="measured",
        sources=sources(run.pace, facts),
        gpu=gpu_of(facts, readings),
        link=link_of(facts, readings),
        host=host_of(facts, readings),
        nvme=nvme_of(facts, readings, run.cliff),
        overlap=overlap_of(readings),
        quality=quality_of(facts, readings, run),
    )
    return with_spreads(profile)


def sources(pace: Pace, facts: Facts) -> tuple[Source, ...]:
    said = (
        f"hetero calibrate --{pace.name}, median of {pace.rounds} after {pace.warm_ups} to warm up"
    )
    found = [Source(RUN, said), Source(SYSTEM, "what the operating system and the driver say")]
    if facts.accelerator is not None and card_of(facts.accelerator.name) is not None:
        found.append(Source(SPEC, "vendor datasheet: dense, fp32 accumulate"))
    return tuple(found)


def gpu_of(facts: Facts, readings: Readings) -> Gpu | None:
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
    """Return a known card's dense rates, but for those that something measured is above."""
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
    """Return a grid, None where measuring it broke off."""
    if grid is None or len(grid.rows) < math.prod(map(len, axes(grid.rows))):
        return None
    return grid


def link_of(facts: Facts, readings: Readings) -> Link | None:
    """Return the link's section; what one direction does beside the other is never more."""
    h2d, d2h = (direction_of(facts, readings, lane) for lane in (Lane.H2D, Lane.D2H))
    duplex = [readings.figure(f"link.duplex.{lane.value}") for lane in (Lane.H2D, Lane.D2H)]
    if h2d is None or d2h is None or duplex[0] is None or duplex[1] is None:
        return None
    both = Duplex(
        h2d_bytes_per_second=at_most(duplex[0], h2d.bytes_per_second.value),
        d2h_bytes_per_second=at_most(duplex[1], d2h.bytes_per_second.value),
    )
    return Link(h2d=h2d, d2h=d2h, duplex=both)


def direction_of(facts: Facts, readings: Readings, lane: Lane) -> Direction | None:
    """Return one direction: its rate is that of the largest copies."""
    key = f"link.{lane.value}"
    small, *sized = readings.of(key) or [Measured(key, (), (0.0,))]
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


def size_curve(sized: Sequence[Measured]) -> Table:
    """Return the share of the largest copies' rate by size: ascending, at most 1.

    Small copies within a processor's caches may be faster than large ones; they get no more than
    their larger neighbour. No share grows faster than the size, or larger copies would be done
    sooner.
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


def host_of(facts: Facts, readings: Readings) -> Host:
    """Return the host's section; ConfigError where what it needs could not be measured."""
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
        dram_bytes_per_second=dram,
        update_per_second=update,
        threads=Threads(dram=readings.table("host.dram"), update=readings.table("host.update")),
        elementwise=readings.table("host.elementwise"),
        functions_per_second=readings.figure("host.functions"),
        matmul=matmul_of(readings, on_cpu=True) if computes else None,
        **gemm,
    )


def nvme_of(facts: Facts, readings: Readings, cliff: Cliff | None) -> Nvme | None:
    """Return the drive's section.

    ``mixed_factor`` is what full-duplex transfers would take, over what reading and writing equally
    much at once took: 1 where they do not disturb each other, half where they take turns.
    """
    read, write, both = (readings.last(f"nvme.{name}") for name in ("read", "write", "mixed"))
    if read is None or write is None or both is None:
        return None
    factor = min(1.0, both.value / 2 / min(read.value, write.value))
    return Nvme(
        odirect=facts.odirect,
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


def latency_of(sized: Sequence[Measured]) -> Figure | None:
    """Return what a transfer takes beside its bytes: what small ones take beyond their share."""
    if len(sized) < 2:
        return None
    small, large = sized[0], sized[-1]
    seconds = small.at[0] / small.median - small.at[0] / large.median
    return Figure(rounded(max(0.0, seconds)), RUN, small.spread)


def overlap_of(readings: Readings) -> Overlap:
    """Return the slowdowns; less than 1 is noise, for nothing gets faster."""
    found = {f.name: readings.figure(f"overlap.{f.name}") for f in fields(Overlap)}
    return Overlap(**{k: None if v is None else at_least(v, 1.0) for k, v in found.items()})


def at_most(figure: Figure, most: float) -> Figure:
    return Figure(min(figure.value, most), figure.source, figure.spread)


def at_least(figure: Figure, least: float) -> Figure:
    return Figure(max(figure.value, least), figure.source, figure.spread)


def quality_of(facts: Facts, readings: Readings, run: Run) -> Quality:
    return Quality(
        measured_on=datetime.now(timezone.utc).date().isoformat(),
        device=facts.device,
        mode=run.pace.name,
        seconds=rounded(run.seconds, 3),
        notes=readings.notes,
        torch=torch.__version__,
        driver=facts.driver,
    )


def with_spreads(profile: Profile) -> Profile:
    """Return a profile whose quality section names the keys that varied too much."""
    spreads = {key: item.spread for key, item, _ in entries(profile)}
    noisy = tuple(key for key, spread in spreads.items() if spread > NOISY)
    worst = rounded(100 * max(spreads.values(), default=0.0), 3)
    return replace(profile, quality=replace(profile.quality, noisy=noisy, spread_percent=worst))


# -- the run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What to measure, and where to write it."""

    pace: Pace = QUICK
    device: str | None = None
    output: Path | None = None
    """File to write; None: profiles/ in the working directory, under the machine's name."""
    nvme: Path | None = None
    """Directory on the drive to measure; None: the working directory, if it is on a drive."""
    burn_in_bytes: int | None = None
    """Write so much to find where the drive slows down; None: do not wear it."""


class Row(NamedTuple):
    """One line of what was measured."""

    key: str
    value: str
    spread: str
    noisy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What came of it."""

    path: str
    profile: Profile
    problems: tuple[str, ...]
    """What the linter finds in it."""

    def rows(self) -> Iterator[Row]:
        """Yield every measured figure, and every row of a table, as people read them."""
        for key, item, form in entries(self.profile):
            unit = form.exponents[-1]
            noisy = item.spread > NOISY
            spread = f"{100 * item.spread:.1f} %" if item.spread else ""
            if isinstance(item, Figure):
                yield Row(key, f"{item.value / 10**unit:.4g}", spread, noisy)
                continue
            for *where, value in item.rows:
                name = label(key, [int(x) for x in where])
                yield Row(name, f"{value / 10**unit:.4g}", spread and f"to {spread}", noisy)

    def as_json(self) -> dict[str, Any]:
        """Return every figure, by its key and in bytes, seconds and operations per second."""
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
    """Watch nothing."""


def calibrate(options: CalibrateOptions, watch: Watch = silent) -> Calibration:
    """Measure this machine and write its profile; takes a minute, or eight with `FULL`."""
    # 1. what would fail in the end fails now
    path = writable(options.output or Path(FOLDER) / f"{host_name()}.toml")
    folder, note = drive_folder(options)
    # 2. measure
    began, used = time.perf_counter(), used_bytes()
    with closing(open_device(options.device)) as device:
        rig = Rig(device, options.pace, folder)
        readings = take_readings(rig, GROUPS, watch)
        facts = look(rig, used)
    cliff, trouble = find_cliff(options, folder, watch)
    # 3. write it down
    readings = Readings(readings.found, (*readings.notes, *note, *trouble))
    run = Run(pace=options.pace, seconds=time.perf_counter() - began, cliff=cliff)
    profile = profile_of(facts, readings, run)
    text = dump(profile)
    path.write_text(text, encoding="utf-8")
    return Calibration(path=str(path), profile=profile, problems=tuple(lint(text)))


def find_cliff(
    options: CalibrateOptions, folder: Path | None, watch: Watch
) -> tuple[Cliff | None, Iterable[str]]:
    """Return where the drive slows down, if that was asked for, and a note where it is unknown."""
    n_bytes = options.burn_in_bytes
    if n_bytes is None or folder is None:
        return None, ()
    watch("burn-in", "", len(GROUPS), len(GROUPS))
    try:
        cliff = burn_in(folder, n_bytes)
    except StorageError as error:
        return None, (f"burn-in: {error.args[0]}",)
    said = f"burn-in: {format_bytes(n_bytes)} were written at the drive's first rate"
    return cliff, () if cliff is not None else (said,)


def writable(path: Path) -> Path:
    """Return a path that can be written; ConfigError where it is not, or is a reference."""
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
    """Return the directory whose drive is measured, and a note where there is none.

    A directory that was asked for and is on a network or in RAM is a ConfigError.
    """
    path = options.nvme or Path.cwd()
    mount = mount_of(path)
    if path.is_dir() and not mount.is_ram and not mount.is_far:
        return path, ()
    what = f"is on {mount.kind or 'no known file system'}" if path.is_dir() else "is no directory"
    if options.nvme is not None:
        raise ConfigError(f"--nvme {path} {what}", advice="name a directory on a local drive")
    return None, (f"drive: the working directory {what}; name one with --nvme",)
