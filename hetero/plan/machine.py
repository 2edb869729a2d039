"""A machine's rates, every number with its source, and the times of work on it (no torch).

The sections are those of a profile file (`hetero.plan.hardware` reads and writes it), in bytes,
seconds and operations per second; a field's metadata holds the file's key and power of ten
(``hbm_GBps`` is ``hbm_bytes_per_second`` / 10**9). Counts (cores, drives) carry no source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hetero.errors import ConfigError
from hetero.plan.figures import Figure, Table, form, optional
from hetero.plan.rates import (
    curve_seconds,
    grid_rate,
    interpolated,
    side_of,
    wave_operations,
)
from hetero.types import Lane

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16", "fp8")
GIGA, TERA, MICRO = 9, 12, -6  # powers of ten
ONE_RAM = "ram"  # the type of a link within it


# -- sections ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """``[gpu.tflops]``: dense operations per second, accumulated in fp32."""

    bf16: Figure | None = optional("bf16", TERA)
    fp16: Figure | None = optional("fp16", TERA)
    fp8: Figure | None = optional("fp8", TERA)
    fp32: Figure | None = optional("fp32", TERA)

    def of(self, dtype: Dtype) -> Figure | None:
        found: Figure | None = getattr(self, dtype)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """``[gpu.matmul]``, ``[host.matmul]``: rates of matmuls, by shape or as a share of the peak."""

    launch_seconds: Figure = field(metadata=form("launch_us", MICRO, zero=True))
    """The host's overhead of one operation."""
    bf16_efficiency: Figure | None = optional("bf16_eff")
    fp16_efficiency: Figure | None = optional("fp16_eff")
    fp8_efficiency: Figure | None = optional("fp8_eff")
    fp32_efficiency: Figure | None = optional("fp32_eff")
    bf16_grid: Table | None = optional("bf16_grid", 0, 0, 0, TERA)
    """Rows (m, n, k, operations per second), every combination of the axes' values."""
    fp16_grid: Table | None = optional("fp16_grid", 0, 0, 0, TERA)
    fp8_grid: Table | None = optional("fp8_grid", 0, 0, 0, TERA)
    fp32_grid: Table | None = optional("fp32_grid", 0, 0, 0, TERA)
    attention: Figure | None = optional("attention_eff")
    """Rate of fused attention's forward, as a share of a square matmul of as many operations."""
    attention_backward: Figure | None = optional("attention_backward_eff")

    def efficiency(self, dtype: Dtype) -> Figure | None:
        found: Figure | None = getattr(self, f"{dtype}_efficiency")
        return found

    def grid(self, dtype: Dtype) -> Table | None:
        """Return the measured rates of matmuls of a dtype, by shape."""
        found: Table | None = getattr(self, f"{dtype}_grid")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """``[gpu]``: one of ``count`` equal devices."""

    name: str
    arch: str
    count: int = 1
    sm: int
    """Multiprocessors."""
    hbm_bytes: Figure = field(metadata=form("hbm_bytes"))
    hbm_bytes_per_second: Figure = field(metadata=form("hbm_GBps", GIGA))
    hbm_efficiency: Figure = field(metadata=form("hbm_eff"))
    """Share of it that element-wise work reaches."""
    context_bytes: Figure | None = optional("context_bytes", zero=True)
    """HBM that the driver's context and the kernels take."""
    nccl_bytes_per_communicator: Figure | None = optional("nccl_bytes_per_comm", zero=True)
    tflops: Peaks
    matmul: Matmul

    def matmul_seconds(self, m: int, n: int, k: int, dtype: Dtype) -> float:
        """Return 2mnk over the grid's rate of that shape (T2), or else `wave_operations` over the
        peak's share."""
        grid = self.matmul.grid(dtype)
        if grid is not None:
            return 2 * m * n * k / grid_rate(grid.rows, m, n, k)
        peak, share = self.tflops.of(dtype), self.matmul.efficiency(dtype)
        if peak is None or share is None:
            raise unsupported(dtype, self.name)
        return wave_operations(m, n, k, self.sm) / (peak.value * share.value)

    def memory_seconds(self, n_bytes: float) -> float:
        """Return the time of element-wise work that reads and writes ``n_bytes`` in all (T2)."""
        return n_bytes / (self.hbm_bytes_per_second.value * self.hbm_efficiency.value)

    def function_seconds(self, numel: int) -> float:
        """Return 0: activation functions wait for memory."""
        return 0.0

    def launch_seconds(self) -> float:
        """Return the overhead of one operation."""
        return self.matmul.launch_seconds.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """``[link.h2d]``, ``[link.d2h]``: copies between HOST and HBM, one way."""

    type: str = ""
    """"pcie4x16" and the like, "c2c", `ONE_RAM` if HBM is RAM, or "unknown"; of d2h "" is as
    h2d."""
    peak_bytes_per_second: Figure | None = optional("peak_GBps", GIGA)
    bytes_per_second: Figure = field(metadata=form("GBps", GIGA))
    """Of large copies from page-locked memory, with nothing else on the link."""
    latency_seconds: Figure = field(metadata=form("alpha_us", MICRO, zero=True))
    pageable_factor: Figure | None = optional("pageable_factor")
    size_curve: Table | None = optional("size_curve", 0, 0)
    """Rows (bytes of a copy, share of ``bytes_per_second`` that it reaches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplex:
    """``[link.duplex]``: the rate of each direction while the other one is saturated."""

    h2d_bytes_per_second: Figure = field(metadata=form("h2d_GBps", GIGA))
    d2h_bytes_per_second: Figure = field(metadata=form("d2h_GBps", GIGA))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """``[link]``: between HOST and HBM."""

    contention: Table | None = optional("contention", 0, GIGA)
    """Rows (devices that copy at once, bytes per second of each)."""
    h2d: Direction
    d2h: Direction
    duplex: Duplex


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRates:
    """``[host.threads]``: rows (threads, rate), where they were measured."""

    dram: Table | None = optional("dram_GBps", 0, GIGA)
    update: Table | None = optional("adam_Gparam_s", 0, GIGA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """``[host]``: processors and RAM; also the computing device if there is no other."""

    cores: int
    numa_nodes: int = 1
    isa: tuple[str, ...] = ()
    ram_bytes: Figure = field(metadata=form("ram_bytes"))
    limit_bytes: Figure | None = optional("limit_bytes")
    """Part of it that a process could take when it was measured; None: all of it."""
    memlock_bytes: Figure | None = optional("memlock_bytes", zero=True)
    """Bytes that a process may lock; None: no limit."""
    lock_bytes_per_second: Figure | None = optional("lock_GBps", GIGA)
    """New RAM that CUDA page-locks; None: unknown."""
    dram_peak_bytes_per_second: Figure | None = optional("dram_peak_GBps", GIGA)
    dram_bytes_per_second: Figure = field(metadata=form("dram_GBps", GIGA))
    """Read and written together by all threads; reads of bytes that are overwritten not counted."""
    update_per_second: Figure = field(metadata=form("adam_Gparam_s", GIGA))
    """Parameters that the update kernel updates."""
    fp32_peak_per_second: Figure | None = optional("fp32_peak_GFLOPS", GIGA)
    gemm_fp32_per_second: Figure | None = optional("gemm_fp32_GFLOPS", GIGA)
    gemm_bf16_per_second: Figure | None = optional("gemm_bf16_GFLOPS", GIGA)
    gemm_fp16_per_second: Figure | None = optional("gemm_fp16_GFLOPS", GIGA)
    access: Figure | None = optional("access_us", MICRO, zero=True)
    """Seconds of hetero's own work at a unit's access, if the same processor computes."""
    counted: Figure | None = optional("counted_us", MICRO, zero=True)
    """Seconds to inspect an operation or a view if no allocator counts: "cpu:sim"."""
    elementwise: Table | None = optional("elementwise_GBps", 0, GIGA)
    """Rows (bytes read and written, rate) of an operation that allocates its output: fresh memory
    is slower than the rate ``dram_GBps`` of memory in use."""
    functions_per_second: Figure | None = optional("functions_Gelem_s", GIGA)
    """Elements for which an activation function, or its derivative, is computed."""
    threads: ThreadRates = field(default_factory=ThreadRates)
    matmul: Matmul | None = None

    @property
    def access_seconds(self) -> float:
        """Cost of a unit's access to the launching thread; 0 if not measured."""
        return self.access.value if self.access is not None else 0.0

    @property
    def counted_seconds(self) -> float:
        """Cost of inspecting an operation; 0 if not measured."""
        return self.counted.value if self.counted is not None else 0.0

    def gemm(self, dtype: Dtype) -> Figure | None:
        found: Figure | None = getattr(self, f"gemm_{dtype}_per_second", None)
        return found

    def matmul_seconds(self, m: int, n: int, k: int, dtype: Dtype) -> float:
        """Return 2mnk over the grid's rate of that shape, or over that of large matmuls."""
        grid = self.matmul.grid(dtype) if self.matmul is not None else None
        if grid is not None:
            return 2 * m * n * k / grid_rate(grid.rows, m, n, k)
        rate = self.gemm(dtype)
        if rate is None:
            raise unsupported(dtype, "the processor")
        return 2 * m * n * k / rate.value

    def memory_seconds(self, n_bytes: float) -> float:
        """Return the time of element-wise work that reads and writes ``n_bytes`` in all."""
        if self.elementwise is not None:
            return n_bytes / interpolated(self.elementwise.rows, max(1.0, n_bytes))
        return n_bytes / self.dram_bytes_per_second.value

    def function_seconds(self, numel: int) -> float:
        """Return the time of an activation function's arithmetic; 0 if not measured."""
        rate = self.functions_per_second
        return numel / rate.value if rate is not None else 0.0

    def launch_seconds(self) -> float:
        """Return the overhead of one operation; 0 if not measured."""
        return self.matmul.launch_seconds.value if self.matmul is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Io:
    """``nvme.io``: how the rates were, or should be, reached."""

    engine: str = "threads"
    queue_depth: int = 1
    block_bytes: int = 2**22
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """``[nvme]``: ``devices`` equal drives, striped; rates are their total."""

    devices: int = 1
    odirect: bool = True
    read_bytes_per_second: Figure = field(metadata=form("read_GBps", GIGA))
    write_bytes_per_second: Figure = field(metadata=form("write_GBps", GIGA))
    """Into the drive's fast cache (pSLC), while it lasts."""
    write_sustained_bytes_per_second: Figure | None = optional("write_sustained_GBps", GIGA)
    """Past that cache."""
    slc_bytes: Figure | None = optional("slc_bytes")
    """Size of that cache; None: no measurement reached its end."""
    mixed_factor: Figure | None = optional("mixed_factor")
    """Share of its rate that each direction keeps while the other one is busy too."""
    read_latency_seconds: Figure | None = optional("read_alpha_us", MICRO, zero=True)
    """Of a transfer, on top of its bytes, with ``io``'s number in flight."""
    write_latency_seconds: Figure | None = optional("write_alpha_us", MICRO, zero=True)
    tbw_bytes: Figure | None = optional("tbw_bytes")
    """Bytes that may be written in the drive's life."""
    io: Io = field(default_factory=Io)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNet:
    """``[net.inter]``: between machines that are alike."""

    bytes_per_second: Figure = field(metadata=form("GBps", GIGA))
    """One way, of one device: its part of what its machine's network cards move."""
    latency_seconds: Figure | None = optional("alpha_us", MICRO, zero=True)
    """Of a message."""
    devices_per_node: int = 8
    """Devices on a machine, each of which is one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """``[net]``: between devices of one machine."""

    intra: str = "none"
    """The wire, as "nvlink4"; where it was measured what moved the bytes, "nccl" or "gloo"."""
    bytes_per_second: Figure | None = optional("GBps", GIGA)
    """One way, of one device; measured in an exchange of all."""
    latency_seconds: Figure | None = optional("alpha_us", MICRO, zero=True)
    """Of a small all-gather."""
    busbw: Table | None = optional("busbw", 0, GIGA)
    """Rows (bytes, bus bandwidth of collectives); measured with all-gathers of as many in all."""
    inter: InterNet | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """``[overlap]``: slowdown of the first while the second runs, 1 or more (T7)."""

    gemm_under_h2d: Figure | None = optional("gemm_under_h2d")
    gemm_under_d2h: Figure | None = optional("gemm_under_d2h")
    gemm_under_collective: Figure | None = optional("gemm_under_coll")
    gemm_under_update: Figure | None = optional("gemm_under_update")
    """On processors that compute and update at once."""
    update_under_dma: Figure | None = optional("adam_under_dma")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """``[quality]``: how a profile was measured."""

    measured_on: str = ""
    """UTC date."""
    device: str = ""
    mode: str = ""
    """"quick" or "full"."""
    seconds: float = field(default=0.0, metadata=form("seconds", zero=True))
    """Duration of the measurement."""
    spread_percent: float = field(default=0.0, metadata=form("spread_pct", zero=True))
    """The widest spread of all figures."""
    noisy: tuple[str, ...] = ()
    """Keys whose spread is above 5 %: not to be relied on."""
    notes: tuple[str, ...] = ()
    """Missing measurements, and the reasons."""
    torch: str = ""
    driver: str = ""


class Citation(NamedTuple):
    """A source of numbers: ``key = "text"`` under ``[src]``."""

    key: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """A machine, and the times of work on it. Seconds, bytes; formulas T2 to T7 of the planner."""

    name: str
    kind: str
    """"reference" (collected) or "measured" (on that machine)."""
    sources: tuple[Citation, ...]
    gpu: Gpu | None = None
    link: LinkRates | None = None
    host: Host
    nvme: DriveRates | None = None
    net: Net | None = None
    overlap: Overlap = field(default_factory=Overlap)
    quality: Quality = field(default_factory=Quality)

    @property
    def has_one_ram(self) -> bool:
        """Whether the device's memory is a part of RAM, so that its bytes are counted there."""
        return self.gpu is not None and self.link is not None and self.link.h2d.type == ONE_RAM

    @property
    def compute(self) -> Gpu | Host:
        """The device that models compute on."""
        return self.gpu if self.gpu is not None else self.host

    def matmul_seconds(self, m: int, n: int, k: int, dtype: Dtype = "bf16") -> float:
        """Return the time of an (m, k) by (k, n) matmul; ConfigError for an unknown dtype (T2).

        From the measured grid, interpolated in log space and constant beyond its borders; without
        one from the peak, its efficiency, and whole waves of tiles.
        """
        return self.compute.matmul_seconds(m, n, k, dtype)

    def memory_seconds(self, n_bytes: float) -> float:
        """Return the time of element-wise work that reads and writes ``n_bytes`` in all (T2)."""
        return self.compute.memory_seconds(n_bytes)

    def attention_seconds(self, flops: float, dtype: Dtype, *, backward: bool) -> float:
        """Return the time of a fused attention (T2): that of a square matmul of as many operations,
        over the share of its rate that attention reaches."""
        side = side_of(flops)
        matmul = self.compute.matmul
        share = matmul and (matmul.attention_backward if backward else matmul.attention)
        seconds = self.matmul_seconds(side, side, side, dtype)
        return seconds / share.value if share else seconds

    def op_seconds(self, compute_seconds: float, memory_seconds: float) -> float:
        """Return the time of one operation: the longer of both, and its launch (T2)."""
        return max(compute_seconds, memory_seconds) + self.compute.launch_seconds()

    def copy_seconds(
        self, lane: Lane, n_bytes: float, both_ways: bool = False, *, devices: int = 1
    ) -> float:
        """Return the time of one copy on `Lane.H2D` or `Lane.D2H` (T3).

        Args:
            both_ways: the other direction is saturated meanwhile.
            devices: number of devices that copy at once, including this one.

        Without a link section HBM is RAM, and a copy reads and writes it: 2n over its rate.
        """
        if self.link is None:
            return 2 * n_bytes * (2 if both_ways else 1) / self.host.dram_bytes_per_second.value
        way = self.link.h2d if lane is Lane.H2D else self.link.d2h
        rate = way.bytes_per_second.value
        if both_ways:
            duplex = self.link.duplex
            at_once = (
                duplex.h2d_bytes_per_second if lane is Lane.H2D else duplex.d2h_bytes_per_second
            )
            rate = min(rate, at_once.value)
        if self.link.contention is not None and devices > 1:
            rate = min(rate, interpolated(self.link.contention.rows, devices))
        curve = way.size_curve.rows if way.size_curve is not None else ()
        return curve_seconds(curve, n_bytes, rate, way.latency_seconds.value)

    def update_seconds(self, numel: int, bytes_touched: float) -> float:
        """Return the time of an optimizer step over ``numel`` parameters on HOST (T4). Bound by the
        kernel, or by the ``bytes_touched``: all it reads and writes."""
        kernel = numel / self.host.update_per_second.value
        return max(kernel, bytes_touched / self.host.dram_bytes_per_second.value)

    def read_seconds(self, n_bytes: float, *, both_ways: bool = False) -> float:
        """Return the time of a read from disk, while it also writes with ``both_ways`` (T5)."""
        nvme = self.drive()
        late = nvme.read_latency_seconds.value if nvme.read_latency_seconds is not None else 0.0
        return (late + n_bytes / nvme.read_bytes_per_second.value) / mixed(nvme, both_ways)

    def write_seconds(
        self, n_bytes: float, written_before_bytes: float = 0, *, both_ways: bool = False
    ) -> float:
        """Return the time of a write to disk: a bucket of fast bytes, then the slow rate (T5).
        ``written_before_bytes`` were written since the drive's cache was last empty."""
        nvme = self.drive()
        share = mixed(nvme, both_ways)
        late = nvme.write_latency_seconds.value if nvme.write_latency_seconds is not None else 0.0
        fast, slow = nvme.write_bytes_per_second, nvme.write_sustained_bytes_per_second
        if slow is None or nvme.slc_bytes is None:
            return (late + n_bytes / fast.value) / share
        left = min(n_bytes, max(0.0, nvme.slc_bytes.value - written_before_bytes))
        return (late + left / fast.value + (n_bytes - left) / slow.value) / share

    def drive(self) -> DriveRates:
        """Return the disk section, ConfigError if there is none."""
        if self.nvme is None:
            raise ConfigError(
                f"profile {self.name!r} has no [nvme]",
                advice="calibrate with --nvme DIR, or name a profile that has a drive",
            )
        return self.nvme


def unsupported(dtype: str, what: str) -> ConfigError:
    return ConfigError(
        f"{what} has no rate for {dtype} matmuls", advice="use another precision, or calibrate"
    )


def mixed(nvme: DriveRates, both_ways: bool) -> float:
    """Return the share of its rate that a direction keeps; half if not measured."""
    if not both_ways:
        return 1.0
    return nvme.mixed_factor.value if nvme.mixed_factor is not None else 0.5
