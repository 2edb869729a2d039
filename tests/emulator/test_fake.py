"""The emulator itself: it finds what it is for, and nothing else."""

from __future__ import annotations

import pytest
import torch

import hetero
from hetero.device import CudaDevice, Ticket
from hetero.types import Lane
from tests.emulator import fake


@pytest.fixture
def started(emulator: None) -> None:
    fake.start()


def kinds() -> set[str]:
    fake.stop()
    return {finding.kind for finding in fake.found()}


def new_frames() -> torch.Tensor:
    """Return memory of the allocator's, which the lanes are not ordered after."""
    return torch.empty(4096, dtype=torch.uint8, device=fake.PLACE)


def test_a_model_trains_with_the_bits_of_plain_torch(watched: None) -> None:
    def train(prepared: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if prepared:
            model, optimizer = hetero.prepare(model, optimizer, device=fake.device(), hbm=20_000)
        else:
            fake.on_device(model)
        for number in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
            model(x.to(fake.PLACE)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.detach().cpu().clone() for value in model.state_dict().values()]

    for ours, plain in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, plain)


def test_a_fetch_that_compute_does_not_wait_for_is_found(started: None) -> None:
    device = fake.device()
    below, frames = device.slab(4096), device.arena(4096)
    ready = device.copy(Lane.H2D, frames.block, below.block, (device.mark(),))
    frames.block.sum()
    assert kinds() == {"read before ready on the device"}
    device.sync(ready)


def test_a_fetch_that_compute_waits_for_is_right(watched: None) -> None:
    device = fake.device()
    below, frames = device.slab(4096), device.arena(4096)
    device.wait(device.copy(Lane.H2D, frames.block, below.block, (device.mark(),)))
    frames.block.sum()
    device.close()


def test_a_write_over_bytes_that_compute_reads_is_found(started: None) -> None:
    device = fake.device()
    below, frames = device.slab(4096), device.arena(4096)
    allocated = device.mark()
    device.close()
    frames.block.sum()
    device.copy(Lane.H2D, frames.block, below.block, (allocated,))
    assert kinds() == {"overwritten while it is read on the device"}


def test_a_host_that_reads_before_a_copy_landed_is_found(started: None) -> None:
    device = fake.device()
    below, frames = device.slab(4096), device.arena(4096)
    device.copy(Lane.D2H, below.block, frames.block, (device.mark(),))
    below.block.sum()
    assert kinds() == {"host touches what a copy has yet to write"}


def test_a_write_by_a_lane_that_is_not_after_the_allocation_is_found(started: None) -> None:
    device = fake.device()
    below = device.slab(4096)
    torch.ones(8, device=fake.PLACE).sum()
    frames = new_frames()
    device.copy(Lane.H2D, frames, below.block)
    assert "write after write on the device" in kinds()


def test_memory_that_goes_under_a_copy_is_found(started: None) -> None:
    device = fake.device()
    below, frames = device.slab(4096), new_frames()
    device.copy(Lane.D2H, below.block, frames, (device.mark(),))
    del frames
    assert kinds() == {"given back to the allocator while a lane uses it"}


def test_page_locked_memory_that_goes_under_a_copy_is_found(started: None) -> None:
    device = fake.device()
    below, frames = device.slab(4096), device.arena(4096)
    device.copy(Lane.D2H, below.block, frames.block, (device.mark(),))
    fake.cuda().cudart().cudaHostUnregister(below.block.data_ptr())
    assert kinds() == {"page-locked memory is unregistered while a copy uses it"}


def test_memory_that_the_allocator_keeps_for_a_lane_may_go_under_a_copy(watched: None) -> None:
    device = fake.device()
    below, frames = device.slab(4096), new_frames()
    frames.record_stream(device._lanes.streams[Lane.D2H])
    device.copy(Lane.D2H, below.block, frames, (device.mark(),))
    del frames
    device.close()


def recorded_under_a_copy(device: CudaDevice, *, waits: bool) -> Ticket:
    """Free memory under a copy, after another stream was recorded on it; return the copy's ticket.
    That stream waited for the copy, or did not."""
    other, below, frames = fake.cuda().Stream(), device.slab(4096), new_frames()
    ticket = device.copy(Lane.D2H, below.block, frames, (device.mark(),))
    if waits:
        with fake.cuda().stream(other):
            device.wait(ticket)
    frames.record_stream(other)
    del frames
    return ticket


def test_memory_may_go_that_waits_for_a_stream_which_waits_for_the_copy(watched: None) -> None:
    device = fake.device()
    device.sync(recorded_under_a_copy(device, waits=True))


def test_memory_that_waits_for_a_stream_which_does_not_wait_for_the_copy_is_found(
    started: None,
) -> None:
    device = fake.device()
    device.sync(recorded_under_a_copy(device, waits=False))
    assert kinds() == {"given back to the allocator while a lane uses it"}


def test_a_refusal_of_the_runtime_is_told_by_the_next_launch(watched: None) -> None:
    with fake.limit(pinned=0):
        assert fake.cuda().cudart().cudaHostRegister(0, 4096, 0) != 0
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        torch.ones(3, device=fake.PLACE)
    torch.ones(3, device=fake.PLACE)


def test_each_lane_has_a_name_and_a_stream(watched: None) -> None:
    streams = [s.cuda_stream for _ in range(3) for s in fake.device()._lanes.streams.values()]
    assert len({*streams}) == len(streams) and 0 not in streams


def test_a_wait_of_the_host_is_counted(watched: None) -> None:
    torch.ones(3, device=fake.PLACE).sum().item()
    assert [stall.what for stall in fake.stalls()] == ["item"]


def test_an_asynchronous_copy_of_pageable_memory_is_counted(watched: None) -> None:
    torch.ones(3, device=fake.PLACE).copy_(torch.ones(3), non_blocking=True)
    assert fake.copies() == {"asynchronous copy up of pageable memory": 1}


def test_operations_on_two_devices_are_refused(watched: None) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=fake.PLACE) + torch.ones(3)


def test_hbm_has_the_size_that_it_is_given(watched: None) -> None:
    with fake.limit(hbm=fake.allocated_bytes() + 4096):
        assert fake.device().memory.total_bytes() == fake.total_bytes()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8192, dtype=torch.uint8, device=fake.PLACE)
    torch.empty(8192, dtype=torch.uint8, device=fake.PLACE)


def test_backward_runs_in_a_thread_of_the_device(watched: None) -> None:
    import threading

    threads = []
    x = torch.ones(2, device=fake.PLACE, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: threads.append(threading.current_thread()))
    y.sum().backward()
    assert threads != [threading.main_thread()]
