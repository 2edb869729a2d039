"""A machine of a profile as a device without bytes, and the times of what it does (floor 4)."""

from __future__ import annotations

from functools import partial

from hetero.config import Config
from hetero.device import lane_threads
from hetero.dry import DryDevice
from hetero.errors import ConfigError
from hetero.plan.machine import MachineProfile
from hetero.plan.rates import interpolated
from hetero.rehearse.mirror import ranks_of
from hetero.train.engine.blueprint import Blueprint
from hetero.types import Lane

THREAD_BYTES_PER_SECOND = 20e9  # read and written by one thread, where it was not measured


def device_for(config: Config, profile: MachineProfile) -> DryDevice:
    """Return a device as the settings name it: CUDA where the profile has a GPU and none is named.

    Its memory is the profile's, or a budget if that is more: one may ask about a larger machine.
    Raises ConfigError for a CUDA device on a machine without one.
    """
    kind = config.device or ("cuda" if profile.gpu is not None else "cpu:sim")
    gpu = profile.gpu if kind == "cuda" else None
    if kind == "cuda" and gpu is None:
        raise ConfigError(
            f"device='cuda', and profile {profile.name!r} has no [gpu]",
            advice="name a profile with a GPU, as profile='rtx4090'",
        )
    hbm = None
    if gpu is not None:
        context = gpu.context_bytes
        hbm = int(gpu.hbm_bytes.value - (context.value if context is not None else 0))
    ram = int((profile.host.limit_bytes or profile.host.ram_bytes).value)
    hbm = None if hbm is None else max(hbm, config.hbm or 0)
    n_ranks = ranks_of(config.mesh, profile).n_here
    n_here = 1 if gpu is not None else n_ranks  # which compute, and copy, by the same processors

    def copy_seconds(lane: Lane, n_bytes: int, both_ways: bool) -> float:
        return n_here * profile.copy_seconds(lane, n_bytes, both_ways, devices=n_ranks)

    ram = max(ram, n_ranks * (config.host or 0))
    return DryDevice(
        is_cuda=gpu is not None,
        same_ram=kind == "cpu",
        shares_ram=gpu is not None and profile.has_one_ram,
        hbm_bytes=hbm,
        ram_bytes=ram,
        copy_seconds=copy_seconds,
        copies_here=kind == "cpu:sim",
        touch_seconds=lambda n_bytes: n_here * profile.memory_seconds(n_bytes),
        stage_seconds=partial(stage_seconds, profile),
    )


def stage_seconds(profile: MachineProfile, n_bytes: int) -> float:
    """Return the time in which a lane's threads copy bytes in RAM, which reads and writes them."""
    threads = lane_threads(profile.host.cores)
    table = profile.host.threads.dram
    ram = profile.host.dram_bytes_per_second.value
    rate = threads * THREAD_BYTES_PER_SECOND if table is None else interpolated(table.rows, threads)
    return 2 * n_bytes / min(ram, rate)


def update_seconds(profile: MachineProfile, blueprint: Blueprint, numel: int) -> float:
    """Return the time of a step over ``numel`` parameters on HOST (T4).

    If processors compute, too, one of them launches while the others update.
    """
    seconds = profile.update_seconds(numel, numel * touched_by_update(blueprint))
    table = profile.host.threads.update
    if profile.gpu is not None or table is None:
        return seconds
    threads = max(1, profile.host.cores - 1)
    return max(seconds, numel / interpolated(table.rows, threads))


def touched_by_update(blueprint: Blueprint) -> float:
    """Return the bytes that a step reads and writes for a parameter, the mean of all.

    A gradient is read; weight, master and states are read and written: 28 of AdamW in fp32, 26
    with split masters (T4).
    """
    n_bytes = numel = 0
    for bucket in blueprint.layout.buckets:
        if bucket.trainable:
            costs, size = blueprint.costs[bucket.id], bucket.dtype.itemsize
            n_bytes += bucket.numel * (size + 2 * (size + costs.master + costs.state))
            numel += bucket.numel
    return n_bytes / numel if numel else 0.0


def disk_seconds(profile: MachineProfile, lane: Lane, n_bytes: int, both_ways: bool) -> float:
    """Return the time of a transfer; the drive's cache is taken to be full (T5)."""
    if lane is Lane.READ:
        return profile.read_seconds(n_bytes, both_ways=both_ways)
    cache = profile.drive().slc_bytes
    before = 0.0 if cache is None else cache.value
    return profile.write_seconds(n_bytes, before, both_ways=both_ways)
