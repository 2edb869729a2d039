"""Checks of `hetero doctor`: versions, devices, links, memory, cores, disk.

Each gives a finding, a grade, and a fix in one line. None of them raises: a check that fails says
so.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from hetero.config import HostLimit, host_limit
from hetero.crc import crc32
from hetero.device import CudaDevice, Device, first_line, release_slab
from hetero.errors import ConfigError, StorageError
from hetero.io import Folder, aligned_buffer
from hetero.mounts import mount_of
from hetero.recipes.findings import Check, Examination, Level, check_python, check_system, graded
from hetero.train.update import kernel
from hetero.train.update.device_kernel import load_device
from hetero.types import Lane, format_bytes
from hetero.version import __version__

MIB, GIB = 2**20, 2**30
OLDEST_TORCH = (2, 9)
PROBE_BYTES = 256 * MIB  # of a copy whose rate is measured
PROBE_COPIES = 4
DISK_PROBE_BYTES, DISK_PIECE_BYTES = 128 * MIB, 8 * MIB
LARGEST_PROBE_BYTES = 8 * GIB  # page-locking more takes long and says little more
SLOW_LINK_BYTES_PER_SECOND = 8e9  # half of PCIe 4.0 x8


def examine() -> Examination:
    """Look at this machine; with CUDA this copies and page-locks some memory for a few seconds."""
    limit = host_limit()
    checks = [
        check_system(),
        check_python(),
        check_torch(),
        check_kernel(),
        check_crc(),
        *check_cuda(limit),
        check_ram(limit),
        check_cgroup(limit),
        check_cores(),
        check_omp(),
        check_disk(Path.cwd()),
    ]
    return Examination(tuple(checks))


# -- software ------------------------------------------------------------------------------------


def check_torch() -> Check:
    major, minor = torch.__version__.split(".")[:2]
    found = f"{torch.__version__}, built for {build()}; hetero {__version__}"
    good = (int(major), int(minor)) >= OLDEST_TORCH
    return graded("torch", good, found, "pip install 'torch>=2.9'", Level.RED)


def check_kernel() -> Check:
    found = "compiled" if kernel.load() is not None else "missing: torch does its work, same bits"
    fix = "for faster bf16 and fp16 updates, reinstall hetero where there is a C compiler"
    return graded("update kernel", kernel.load() is not None, found, fix)


def check_crc() -> Check:
    fast = crc32.__module__ != "zlib"
    found = "zlib-ng" if fast else "zlib, a tenth of zlib-ng's rate"
    return graded("checksums", fast, found, "for disks, pip install 'hetero[disk]'")


def build() -> str:
    """Return the platform that torch was built for."""
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "CPU" if torch.version.hip is None else f"ROCm {torch.version.hip}"


# -- CUDA ----------------------------------------------------------------------------------------


class DriverGpu(NamedTuple):
    """A device as the driver describes it."""

    name: str
    total_bytes: int | None
    """None where HBM is a part of RAM: the driver counts none then."""
    free_bytes: int | None
    pcie: str
    uuid: str = ""

    @property
    def used_bytes(self) -> int:
        """Bytes that processes use; 0 if the driver does not say."""
        return (self.total_bytes or 0) - (self.free_bytes or 0)


def check_cuda(limit: HostLimit) -> Iterator[Check]:
    """Yield the checks of the driver, the devices, the links and page-locking."""
    driver, gpus, problem = ask_driver()
    device = open_cuda()
    if isinstance(device, str):
        yield check_no_cuda(gpus, problem, device)
        return
    yield Check("driver", Level.GREEN, driver or f"unknown ({problem})")
    yield from (check_gpu(i, gpu) for i, gpu in enumerate(gpus))
    yield from (check_rate(device, lane) for lane in (Lane.H2D, Lane.D2H))
    yield check_device_kernel(device)
    yield check_memlock()
    yield check_page_locking(device, limit)
    device.close()


def ask_driver() -> tuple[str, list[DriverGpu], str]:
    """Return the driver's version, its devices, and the reason if there are none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
            ]
            version = text_of(pynvml.nvmlSystemGetDriverVersion())
            return version, [gpu_of(pynvml, handle) for handle in handles], ""
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # NVML raises errors of its own; their text is enough
        return "", [], str(error) or type(error).__name__


def gpu_of(nvml: Any, handle: Any) -> DriverGpu:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = memory.total, memory.free
    except nvml.NVMLError:  # not supported: a GB10
        total = free = None
    try:
        width = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        pcie = f"PCIe {nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)} x{width}"
    except nvml.NVMLError:
        pcie = "PCIe unknown"  # a virtual device does not say
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return DriverGpu(text_of(name), total, free, pcie, text_of(uuid).removeprefix("GPU-"))


def text_of(said: str | bytes) -> str:
    """Return what NVML said; its older bindings give bytes."""
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def open_cuda() -> CudaDevice | str:
    """Return the CUDA device, or why torch has none."""
    try:
        return CudaDevice()
    except (ConfigError, RuntimeError) as error:
        return first_line(error)


def check_no_cuda(gpus: list[DriverGpu], problem: str, why: str) -> Check:
    if not gpus:
        found = f"none ({problem or 'no device'}); hetero runs on the CPU and on cpu:sim"
        return Check("cuda", Level.YELLOW, found, "nothing, unless this machine has an NVIDIA GPU")
    found = f"{gpus[0].name} is there, and torch, built for {build()}, cannot use it: {why}"
    fix = "install a CUDA build of torch that fits the driver and the card, or end what uses it"
    return Check("cuda", Level.RED, found, fix)


def check_gpu(index: int, gpu: DriverGpu) -> Check:
    if gpu.total_bytes is None or gpu.free_bytes is None:
        found = f"{gpu.name}, {gpu.pcie}, HBM is a part of RAM"
        return Check(f"gpu {index}", Level.GREEN, found)
    free, total = format_bytes(gpu.free_bytes), format_bytes(gpu.total_bytes)
    found = f"{gpu.name}, {gpu.pcie}, HBM {free} free of {total}"
    mostly_free = gpu.free_bytes > gpu.total_bytes / 2
    return graded(f"gpu {index}", mostly_free, found, "end other processes on it, or set hbm=")


def check_rate(device: Device, lane: Lane) -> Check:
    """Return the measured rate of copies on a lane."""
    name = f"{lane.value} rate"
    try:
        rate = measure(device, lane)
    except RuntimeError as error:
        return Check(name, Level.YELLOW, str(error).splitlines()[0], "free some device memory")
    fix = "check the slot's PCIe width and the memlock limit: page-locked memory copies faster"
    return graded(name, rate >= SLOW_LINK_BYTES_PER_SECOND, f"{rate / 1e9:.1f} GB/s", fix)


def measure(device: Device, lane: Lane) -> float:
    """Return bytes per second of large copies, after one warm-up copy."""
    slab, arena = device.slab(PROBE_BYTES), device.arena(PROBE_BYTES)
    ends = (slab.block, arena.block)
    source, target = ends if lane is Lane.H2D else ends[::-1]
    try:
        device.sync(device.copy(lane, target, source))
        began = device.now()
        for _ in range(PROBE_COPIES):
            ticket = device.copy(lane, target, source)
        device.sync(ticket)
        return PROBE_COPIES * PROBE_BYTES / (device.now() - began)
    finally:
        release_slab(slab)


def check_device_kernel(device: Device) -> Check:
    """Return whether updates are compiled for the device: AdamW's in bf16 is tried."""
    problem = load_device().try_out(device.torch_device)
    found = f"torch does its work, same bits ({problem})" if problem else "compiled by NVRTC"
    fix = "for faster updates on the device, install a CUDA build of torch, which brings NVRTC"
    return graded("device update kernel", not problem, found, fix)


def check_memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else format_bytes(soft)
    # the driver locks pages itself, so a low limit may have no effect: the next check shows
    return graded("memlock limit", unlimited, found, "ulimit -l unlimited")


def check_page_locking(device: Device, limit: HostLimit) -> Check:
    """Page-lock blocks until one is refused, and give them back at once."""
    most = min(LARGEST_PROBE_BYTES, limit.n_bytes // 4)
    n_bytes, blocks = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the refusal, which is what is asked for
        while n_bytes + PROBE_BYTES <= most:
            blocks.append(device.slab(PROBE_BYTES))
            if not blocks[-1].registered:
                break
            n_bytes += PROBE_BYTES
    for block in blocks:
        release_slab(block)
    found = f"{format_bytes(n_bytes)} of RAM, {format_bytes(most)} was the most to try"
    fix = (
        f"set pinned={n_bytes // MIB}MiB, or lift the limit: ulimit -l, a container's --ulimit"
        " memlock=-1, memory= of .wslconfig; the rest is copied through stages"
    )
    return graded("page-locking", n_bytes + PROBE_BYTES > most, found, fix)


# -- memory, cores, disk -------------------------------------------------------------------------


def check_ram(limit: HostLimit) -> Check:
    total = psutil.virtual_memory().total
    found = f"{format_bytes(limit.n_bytes)} to take, of {format_bytes(total)}"
    level = Level.YELLOW if limit.n_bytes >= GIB else Level.RED
    return graded(
        "ram", limit.n_bytes >= 4 * GIB, found, "end other processes, or set host=", level
    )


def check_cgroup(limit: HostLimit) -> Check:
    """Return the source of the RAM limit, such as a container."""
    return Check("ram limit", Level.GREEN, f"set by {limit.source}")


def check_cores() -> Check:
    cores, threads = usable_cores(), torch.get_num_threads()
    found = f"{cores} usable, torch computes with {threads} threads"
    fix = f"set OMP_NUM_THREADS={cores}, or torch.set_num_threads({cores})"
    return graded("cores", 1 <= threads <= cores, found, fix)


def usable_cores() -> int:
    """Return the cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def check_omp() -> Check:
    names = sorted(n for n in os.environ if n.startswith(("OMP_", "MKL_", "KMP_", "GOMP_")))
    found = ", ".join(f"{name}={os.environ[name]}" for name in names) or "no OMP_, MKL_ or KMP_"
    alone = os.environ.get("OMP_NUM_THREADS") == "1" and usable_cores() > 1
    return graded("omp settings", not alone, found, "unset OMP_NUM_THREADS to use all cores")


def check_disk(path: Path) -> Check:
    """Look at the drive of the working directory: room for checkpoints and homes, and its rate."""
    free, mount = shutil.disk_usage(path).free, mount_of(path)
    found = f"{format_bytes(free)} free in {path} ({mount.kind or 'unknown file system'})"
    if mount.is_ram:
        return Check("disk", Level.YELLOW, found, "that is RAM: name a drive with nvme=")
    try:
        direct, rates = disk_rates(path)
    except StorageError as error:
        return Check("disk", Level.YELLOW, f"{found}; {error.args[0]}", "name another directory")
    found += f"; {rates}, {'direct' if direct else 'through the page cache'}"
    if mount.is_far or not direct:
        return Check("disk", Level.YELLOW, found, "nvme= wants a local drive with direct I/O")
    return graded("disk", free >= 10 * GIB, found, "free some space for checkpoints and nvme=")


def disk_rates(path: Path) -> tuple[bool, str]:
    """Return whether files are opened direct, and the drive's write and read rates as text."""
    buffer = aligned_buffer(DISK_PIECE_BYTES)
    with Folder.open(path) as folder, folder.private() as file:
        file.reserve(DISK_PROBE_BYTES)
        seconds = []
        for move in (file.write, file.read):
            began = time.perf_counter()
            for start in range(0, DISK_PROBE_BYTES, DISK_PIECE_BYTES):
                move(start, buffer)
            seconds.append(time.perf_counter() - began)
        write, read = (DISK_PROBE_BYTES / s / 1e9 for s in seconds)
        return file.direct, f"writes {write:.2g} GB/s, reads {read:.2g} GB/s"
