"""Page-locked slabs, on an emulated CUDA device: what is refused, what forks, what goes."""

from __future__ import annotations

import mmap
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero.device import CudaDevice, Move, Slab, release_slab
from hetero.device.face import PROBE_BYTES
from hetero.errors import BudgetError
from hetero.types import Lane
from tests.emulator import fake
from tests.emulator.shim import Event

MIB = 2**20


def flags_of(slab: Slab) -> set[str]:
    """Return the kernel's flags of a slab's mapping."""
    at, flags = slab.block.data_ptr(), set[str]()
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found is not None:
            here = int(found[1], 16) <= at < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            flags = set(line.split()[1:])
    return flags


def pages_in_ram(slab: Slab) -> int:
    """Return how many whole pages of a slab are in RAM."""
    size = mmap.PAGESIZE
    first = -(-slab.block.data_ptr() // size)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        rows = os.pread(file.fileno(), 8 * (slab.n_bytes // size - 1), 8 * first)
    return int((np.frombuffer(rows, dtype=np.uint64) >> np.uint64(63)).sum())


def test_a_refusal_leaves_the_slab_pageable_and_tells_once(emulator: None) -> None:
    device = fake.device()
    room = fake.pinned_bytes() + MIB
    with fake.limit(pinned=room), pytest.warns(UserWarning, match="refused to page-lock 1 MiB"):
        locked, refused = device.slab(MIB), device.slab(MIB)

    assert locked.registered and not refused.registered
    with fake.limit(pinned=room), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not device.slab(MIB).registered
    target = device.arena(MIB).block
    target.zero_()  # a launch after it fails no more
    device.sync(device.copy(Lane.H2D, target, refused.block.fill_(3)))
    assert bool((target == 3).all())


def test_page_locked_memory_stays_out_of_forks_until_it_is_released(emulator: None) -> None:
    slab = fake.device().slab(MIB)

    assert "dc" in flags_of(slab)  # not copied
    release_slab(slab)
    assert not slab.registered and "dc" not in flags_of(slab)


def test_threads_touch_pages_before_cuda_locks_them(emulator: None) -> None:
    device = fake.device()
    assert pages_in_ram(device.slab(MIB)) == MIB // mmap.PAGESIZE - 1
    with fake.limit(pinned=fake.pinned_bytes()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device.slab(MIB)  # is refused, and tells where the wall is
        assert not pages_in_ram(device.slab(MIB))  # that costs RAM when it is used


def test_a_slab_that_goes_waits_for_the_copies_that_use_it(watched: None) -> None:
    device = fake.device()
    slab, target = device.slab(MIB), device.arena(MIB)
    device.copy(Lane.H2D, target.block, slab.block)
    del slab


def late_kernels(device: CudaDevice) -> None:
    """Queue work on compute's stream that takes and gives back memory of the allocator's."""
    busy = torch.ones(MIB, dtype=torch.uint8, device=device.torch_device)
    busy.add_(1)


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_lanes_use_new_device_memory_after_those_who_had_it_before(
    watched: None, lane: Lane
) -> None:
    device = fake.device()
    slab = device.slab(MIB)
    late_kernels(device)
    here = device.arena(MIB).block
    target, source = (here, slab.block) if lane is Lane.H2D else (slab.block, here)
    device.sync(device.copy(lane, target, source))


def test_measuring_a_link_writes_to_no_memory_that_kernels_still_use(watched: None) -> None:
    device = fake.device()
    late_kernels(device)
    for lane in (Lane.H2D, Lane.D2H):
        assert device.copy_seconds(lane, MIB) > 0


def test_measuring_copies_within_the_device_makes_none_over_the_link(watched: None) -> None:
    device = fake.device()
    made = fake.copies()
    late_kernels(device)
    assert device.copy_seconds(Lane.D2D, MIB) > 0
    assert fake.copies() == made
    assert device.copy_seconds(Lane.D2H, MIB) > 0
    assert fake.copies() != made


def test_a_lane_is_as_fast_as_its_fastest_copy(
    emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that did nothing wakes up while its link is measured."""
    device = fake.device()
    times = iter([16.0, 8.0, 2.0, 1.0, 1.0])
    monkeypatch.setattr(Event, "elapsed_time", lambda begin, end: next(times))
    assert device.copy_seconds(Lane.D2D, PROBE_BYTES) == pytest.approx(0.001)
    assert next(times, None) is None


def test_device_memory_that_goes_serves_others_after_the_lanes(watched: None) -> None:
    device = fake.device()
    slab = device.slab(MIB)
    arena = device.arena(MIB)
    device.copy(Lane.H2D, arena.carve(0, MIB), slab.block)
    del arena


def test_device_memory_that_goes_serves_others_after_all_streams_that_computed_on_it(
    watched: None,
) -> None:
    """A program may prepare a model on one stream, and train it on another."""
    device = fake.device()
    before = device.arena(MIB)
    side = fake.cuda().Stream()
    side.wait_stream(fake.cuda().default_stream())
    with fake.cuda().stream(side):
        before.block.add_(1)
        device.mark()
        fake.cuda().default_stream().wait_stream(side)
    after = device.arena(MIB)
    side.wait_stream(fake.cuda().default_stream())
    with fake.cuda().stream(side):
        for arena in (before, after):
            arena.block.add_(1)
    del arena, before, after


def test_pages_that_others_have_locked_are_no_wall(emulator: None) -> None:
    device = fake.device()
    slab = device.slab(MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device.lock(slab.block) is None
        assert device.slab(2 * MIB).registered


def test_a_device_that_is_not_the_current_one_has_slabs_of_its_own(
    watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of "cuda:1", and of threads of ours there: each thread's current device is the first."""
    device = fake.device()
    monkeypatch.setattr(fake.cuda(), "elsewhere", 1)
    monkeypatch.setattr(fake.cuda(), "contexts", set())
    monkeypatch.delattr(fake.cuda()._thread, "device", raising=False)
    slab, arena = device.slab(MIB), device.arena(MIB)
    pageable = torch.full((MIB,), 6, dtype=torch.uint8)
    device.sync(device.copy(Lane.H2D, arena.carve(0, MIB), slab.block.fill_(5)))
    assert bool((arena.block == 5).all())
    device.sync(device.copy(Lane.H2D, arena.carve(0, MIB), pageable))  # in threads of the lane
    assert bool((arena.block == 6).all())
    up, down = Move(arena.block, slab.block), Move(device.slab(MIB).block, device.arena(MIB).block)
    assert device.copy_seconds(Lane.D2H, MIB) > 0
    assert device.lane_seconds(Lane.H2D, [up], [down]) > 0
    assert fake.cuda().contexts == {0}


def test_memory_that_the_driver_lacks_is_said_whichever_allocator_torch_has(
    emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake.device()
    monkeypatch.setattr(fake.cuda(), "backend", "cudaMallocAsync")
    with (
        fake.limit(hbm=fake.allocated_bytes() + MIB),
        pytest.raises(BudgetError, match="are not free on") as caught,
    ):
        device.arena(2 * MIB)
    assert "expandable_segments" not in caught.value.advice


def test_memory_that_torch_may_not_take_is_not_free(
    emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake.device(total_memory=64 * MIB)
    held = fake.allocated_bytes()
    monkeypatch.setattr(fake.cuda(), "fraction", 0.5)
    assert device.memory.free_bytes() == 32 * MIB - held
    arena = device.arena(MIB)
    assert device.memory.free_bytes() == 31 * MIB - held
    del arena
