"""Checks profiles, rule by rule (no torch).

`broken` finds values that the formulas of `hetero.plan.machine` cannot use; `doubtful` finds
numbers that no machine has: sparse rates, bits for bytes, GB for GiB, rates above peaks.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from hetero.plan.figures import Figure, KeyForm, Table, form_of
from hetero.plan.machine import DTYPES, ONE_RAM, Direction, Dtype, Host, MachineProfile, Matmul
from hetero.plan.rates import Rows, axes

GIB = 2**30
ROUNDING = 1.01  # tolerance of measured shares
SLACK = 1.05  # rates above a datasheet, by clocks and rounding
CARD_BYTES = (0.95, 1.02)  # share of its nominal GiB that a driver reports
LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # a PCIe lane, one way
C2C_GBPS = 450.0  # NVLink-C2C, one way
DRIVE_GBPS = 16.0  # PCIe 5.0 x4
NVLINK_GBPS = 900.0  # the fifth generation, one way
NIC_GBPS = 100.0  # 800 Gb/s
SHARES = ("_eff", "_factor")
Rule = Callable[[MachineProfile], Iterator[str]]


class Card(NamedTuple):
    """A card's datasheet: dense, accumulated in fp32; 10**12 and 10**9 a second."""

    pattern: str
    gib: tuple[int, ...]
    hbm: float
    fp16: float
    fp32: float
    bf16: float | None = None
    fp8: float | None = None


CARDS = (
    Card(r"V100-SXM2", (16, 32), 900, fp16=125, fp32=15.7),
    Card(r"RTX 3090$", (24,), 936, bf16=71, fp16=71, fp32=35.6),
    Card(r"RTX 4090$", (24,), 1008, bf16=165.2, fp16=165.2, fp8=330.3, fp32=82.6),
    Card(r"RTX 5090$", (32,), 1792, bf16=209.5, fp16=209.5, fp8=419, fp32=104.8),
    Card(r"\bA100\b", (40, 80), 2039, bf16=312, fp16=312, fp32=19.5),
    Card(r"\bH100(?! NVL)\b", (64, 80, 96), 3350, bf16=989, fp16=989, fp8=1979, fp32=67),
    Card(r"\bH200\b", (141,), 4800, bf16=989, fp16=989, fp8=1979, fp32=67),
    Card(r"\bGH200\b", (96, 144), 4900, bf16=989, fp16=989, fp8=1979, fp32=67),
    Card(r"\bGB10\b", (128,), 273, bf16=125, fp16=125, fp32=31),
    Card(r"\bB200\b", (180, 192), 8000, bf16=2250, fp16=2250, fp8=4500, fp32=80),
)


def card_of(name: str) -> Card | None:
    """Return the datasheet of a GPU by its driver's name for it, None if unknown."""
    return next((card for card in CARDS if re.search(card.pattern, name)), None)


class ProfileEntry(NamedTuple):
    """A figure or a table of a profile, and its key in the file."""

    key: str
    item: Figure | Table
    form: KeyForm


def entries(section: Any, where: str = "") -> Iterator[ProfileEntry]:
    """Yield every figure and table of a section and its subsections."""
    for f in dataclasses.fields(section):
        value, form = getattr(section, f.name), form_of(f)
        if isinstance(value, (Figure, Table)):
            yield ProfileEntry(f"{where}{form.key}", value, form)
        elif dataclasses.is_dataclass(value):
            yield from entries(value, f"{where}{form.key}.")


def shown(entry: Figure | float, exponent: int) -> str:
    """Return a number in a file's unit."""
    value = entry.value if isinstance(entry, Figure) else entry
    return f"{value / 10**exponent:.6g}"


# -- values that the formulas cannot use ---------------------------------------------------------


def broken(profile: MachineProfile) -> list[str]:
    """Return the problems that make a profile unusable."""
    return [problem for rule in BROKEN for problem in rule(profile)]


def kind_is_known(profile: MachineProfile) -> Iterator[str]:
    if profile.kind not in ("reference", "measured"):
        yield f"kind: {profile.kind!r} is not 'reference' or 'measured'"


def numbers_are_positive(profile: MachineProfile) -> Iterator[str]:
    for key, item, form in entries(profile):
        values = [item.value] if isinstance(item, Figure) else [x for row in item.rows for x in row]
        for value in values:
            if value < 0 or (value == 0 and not form.zero):
                yield f"{key}: {value:g} is {'negative' if value < 0 else 'zero'}"
        if item.spread < 0:
            yield f"{key}: a spread of {item.spread:g} is negative"


def tables_ascend(profile: MachineProfile) -> Iterator[str]:
    for key, item, form in entries(profile):
        if isinstance(item, Table) and len(form.exponents) == 2:
            xs = [row[0] for row in item.rows]
            if any(a >= b for a, b in pairwise(xs)):
                yield f"{key}: rows are not in ascending order"


def grids_are_full(profile: MachineProfile) -> Iterator[str]:
    for key, item, form in entries(profile):
        if isinstance(item, Table) and len(form.exponents) == 4:
            wanted = math.prod(len(axis) for axis in axes(item.rows))
            found = len({row[:-1] for row in item.rows})
            if found != wanted or found != len(item.rows):
                yield f"{key}: {len(item.rows)} rows, and {wanted} different (m, n, k) make a grid"


def something_computes(profile: MachineProfile) -> Iterator[str]:
    if profile.gpu is None:
        if not any(host_rated(profile.host, dtype) for dtype in DTYPES):
            yield "host.gemm_fp32_GFLOPS: without [gpu] the host computes, and has no matmul rate"
        return
    for dtype in DTYPES:
        peak, share = profile.gpu.tflops.of(dtype), profile.gpu.matmul.efficiency(dtype)
        if profile.gpu.matmul.grid(dtype) is None and (peak is None) != (share is None):
            lacking = f"tflops.{dtype}" if peak is None else f"matmul.{dtype}_eff"
            yield f"gpu.{lacking}: missing; a peak needs its efficiency or a grid, and vice versa"


def host_rated(host: Host, dtype: Dtype) -> bool:
    grid = host.matmul.grid(dtype) if host.matmul is not None else None
    return host.gemm(dtype) is not None or grid is not None


def machines_have_devices(profile: MachineProfile) -> Iterator[str]:
    inter = profile.net.inter if profile.net is not None else None
    if inter is not None and inter.devices_per_node < 1:
        yield f"net.inter.devices_per_node: a machine of {inter.devices_per_node} devices"


def one_ram_holds_the_device(profile: MachineProfile) -> Iterator[str]:
    gpu, ram = profile.gpu, profile.host.ram_bytes
    if gpu is not None and profile.has_one_ram and gpu.hbm_bytes.value > ram.value:
        yield f"gpu.hbm_bytes: a device in one RAM (link.h2d.type) has more than {ram.value:.0f}"


BROKEN: tuple[Rule, ...] = (
    kind_is_known,
    numbers_are_positive,
    machines_have_devices,
    tables_ascend,
    grids_are_full,
    something_computes,
    one_ram_holds_the_device,
)


# -- numbers that no machine has -----------------------------------------------------------------


def doubtful(profile: MachineProfile) -> list[str]:
    """Return the numbers of a profile that cannot be right."""
    return [problem for rule in DOUBTFUL for problem in rule(profile)]


def shares_are_shares(profile: MachineProfile) -> Iterator[str]:
    for key, item, _ in entries(profile):
        if isinstance(item, Figure) and key.endswith(SHARES) and item.value > 1:
            yield f"{key}: {item.value:g} is above 1, and it is a share"


def slowdowns_slow_down(profile: MachineProfile) -> Iterator[str]:
    for key, item, _ in entries(profile.overlap, "overlap."):
        if isinstance(item, Figure) and item.value < 1:
            yield f"{key}: {item.value:g} is below 1: nothing gets faster by what runs beside it"


def curves_are_shares(profile: MachineProfile) -> Iterator[str]:
    for key, way, _ in directions(profile):
        if way.size_curve is not None:
            yield from (f"{key}.size_curve: {why}" for why in curve_problems(way.size_curve.rows))


def curve_problems(rows: Rows) -> Iterator[str]:
    if any(share > 1 for _, share in rows):
        yield "a share of the rate is above 1"
    for (size, share), (larger, more) in pairwise(rows):
        if more < share:
            yield f"the share falls from {share:g} to {more:g}: it is not ascending"
        if more * size > ROUNDING * share * larger:
            yield f"a copy of {larger:g} bytes would be faster than one of {size:g}"


def rates_keep_below_peaks(profile: MachineProfile) -> Iterator[str]:
    for key, rate, peak in rates_and_peaks(profile):
        if rate is not None and peak is not None and rate.value > peak.value:
            yield f"{key}: {shown(rate, 9)} is above its peak, {shown(peak, 9)}"


def rates_and_peaks(profile: MachineProfile) -> Iterator[tuple[str, Figure | None, Figure | None]]:
    """Yield rates and their bounds: a peak, the lane alone, the drive's first rate."""
    host, link, nvme = profile.host, profile.link, profile.nvme
    yield "host.dram_GBps", host.dram_bytes_per_second, host.dram_peak_bytes_per_second
    yield "host.gemm_fp32_GFLOPS", host.gemm_fp32_per_second, host.fp32_peak_per_second
    for key, way, _ in directions(profile):
        yield f"{key}.GBps", way.bytes_per_second, way.peak_bytes_per_second
    if link is not None:
        both = link.duplex
        yield "link.duplex.h2d_GBps", both.h2d_bytes_per_second, link.h2d.bytes_per_second
        yield "link.duplex.d2h_GBps", both.d2h_bytes_per_second, link.d2h.bytes_per_second
    if nvme is not None:
        slow, fast = nvme.write_sustained_bytes_per_second, nvme.write_bytes_per_second
        yield "nvme.write_sustained_GBps", slow, fast


def grids_keep_below_peaks(profile: MachineProfile) -> Iterator[str]:
    for place, matmul, dtype, peak in peaks(profile):
        grid = matmul.grid(dtype)
        for *shape, rate in grid.rows if grid is not None else ():
            if rate > peak.value:
                sides = " x ".join(f"{side:g}" for side in shape)
                yield (
                    f"{place}.matmul.{dtype}_grid: {sides} at {shown(rate, 12)} TFLOPS is above"
                    f" the peak, {shown(peak, 12)}"
                )


def peaks(profile: MachineProfile) -> Iterator[tuple[str, Matmul, Dtype, Figure]]:
    """Yield every peak of a dtype, and the matmuls that must stay below it."""
    host, gpu = profile.host, profile.gpu
    if host.matmul is not None and host.fp32_peak_per_second is not None:
        yield "host", host.matmul, "fp32", host.fp32_peak_per_second
    for dtype in DTYPES if gpu is not None else ():
        peak = gpu.tflops.of(dtype) if gpu is not None else None
        if gpu is not None and peak is not None:
            yield "gpu", gpu.matmul, dtype, peak


def tflops_are_dense(profile: MachineProfile) -> Iterator[str]:
    card = card_of(profile.gpu.name) if profile.gpu is not None else None
    if profile.gpu is None or card is None:
        return
    for dtype in DTYPES:
        peak, dense = profile.gpu.tflops.of(dtype), getattr(card, dtype)
        if peak is not None and dense is None:
            yield f"gpu.tflops.{dtype}: {profile.gpu.name} has no {dtype} matmuls"
        elif peak is not None and peak.value > SLACK * dense * 1e12:
            yield (
                f"gpu.tflops.{dtype}: {shown(peak, 12)} is a sparse or fp16-accumulate rate;"
                f" dense, accumulated in fp32, it is {dense:g}"
            )


def links_are_known(profile: MachineProfile) -> Iterator[str]:
    for key, _, kind in directions(profile):
        if physical_gbps(kind) is None:
            yield f"{key}.type: {kind!r} is no type of link; as pcie4x16, c2c, ram, unknown"


def bytes_are_not_bits(profile: MachineProfile) -> Iterator[str]:
    for key, rate, most, whose in physical(profile):
        if rate is not None and rate.value > most * 1e9:
            yield f"{key}: {shown(rate, 9)} is above the {most:g} GB/s {whose}: gigabits?"


def physical(profile: MachineProfile) -> Iterator[tuple[str, Figure | None, float, str]]:
    """Yield rates of links, memory, drives and nets, with the maximum of their kind."""
    gpu, nvme, net = profile.gpu, profile.nvme, profile.net
    for key, way, kind in directions(profile):
        most, whose = physical_gbps(kind) or math.inf, f"that {kind} can move"
        yield f"{key}.GBps", way.bytes_per_second, most, whose
        yield f"{key}.peak_GBps", way.peak_bytes_per_second, most, whose
    if gpu is not None and (card := card_of(gpu.name)) is not None:
        yield "gpu.hbm_GBps", gpu.hbm_bytes_per_second, SLACK * card.hbm, "of its kind"
    if nvme is not None and profile.kind == "reference":
        most = DRIVE_GBPS * nvme.devices
        yield "nvme.read_GBps", nvme.read_bytes_per_second, most, "of its kind"
        yield "nvme.write_GBps", nvme.write_bytes_per_second, most, "of its kind"
    if net is not None:
        yield "net.GBps", net.bytes_per_second, NVLINK_GBPS, "of its kind"
        if net.inter is not None:
            yield "net.inter.GBps", net.inter.bytes_per_second, NIC_GBPS, "of one network card"


def gib_are_not_gb(profile: MachineProfile) -> Iterator[str]:
    if profile.gpu is None:
        return
    name, n_bytes = profile.gpu.name, profile.gpu.hbm_bytes.value
    card, (least, most) = card_of(name), CARD_BYTES
    if card is None:
        if n_bytes % 10**9 == 0:
            yield f"gpu.hbm_bytes: {n_bytes:.0f} is round in GB, and memory comes in GiB"
    elif not any(least * gib * GIB <= n_bytes <= most * gib * GIB for gib in card.gib):
        sizes = " or ".join(str(gib) for gib in card.gib)
        yield (
            f"gpu.hbm_bytes: {n_bytes:.0f} is {n_bytes / GIB:.2f} GiB, and {name} has about"
            f" {sizes} GiB: GB for GiB?"
        )


def directions(profile: MachineProfile) -> Iterator[tuple[str, Direction, str]]:
    """Yield the key, the section and the type of each direction of the link."""
    if profile.link is not None:
        kind = profile.link.h2d.type
        yield "link.h2d", profile.link.h2d, kind
        yield "link.d2h", profile.link.d2h, profile.link.d2h.type or kind


def physical_gbps(kind: str) -> float | None:
    """Return GB/s that a type of link can move one way, None for an unknown type."""
    match = re.fullmatch(r"pcie([1-6])x(1|2|4|8|16)", kind)
    if match:
        return LANE_GBPS[int(match[1])] * int(match[2])
    return {"c2c": C2C_GBPS, ONE_RAM: math.inf, "unknown": math.inf}.get(kind)


DOUBTFUL: tuple[Rule, ...] = (
    shares_are_shares,
    slowdowns_slow_down,
    curves_are_shares,
    rates_keep_below_peaks,
    grids_keep_below_peaks,
    tflops_are_dense,
    links_are_known,
    bytes_are_not_bits,
    gib_are_not_gb,
)
