"""Copies of memory that is not page-locked: through stages, in order, with the same bits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.config import Config
from hetero.device import (
    CpuDevice,
    Device,
    SimDevice,
    Slab,
    StagedTicket,
    Staging,
    Ticket,
    stages_bytes,
)
from hetero.dry import DryDevice
from hetero.errors import ConfigError, TransferError
from hetero.jobs import Job
from hetero.types import Lane, noop
from tests.emulator import fake

KIB = 2**10


def random_bytes(n_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)


def staging_on(device: Device, n_threads: int, largest_bytes: int = 64 * KIB) -> Staging:
    staging = Staging(device.copy, device.sync, device.slab, n_threads=n_threads)
    staging.open(stages_bytes(largest_bytes))
    return staging


def sync(device: Device, staging: Staging, ticket: Ticket) -> None:
    assert isinstance(ticket, StagedTicket)
    staging.wait(ticket)
    if ticket.queued is not None:
        device.sync(ticket.queued)


# -- the stages alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 50_000, 400_001])
def test_bytes_go_up_and_down_through_stages_unchanged(seed: int, n_bytes: int) -> None:
    device = SimDevice(seed=seed, checked=True)
    staging = staging_on(device, n_threads=0)
    source, here, back = random_bytes(n_bytes, seed), *torch.zeros(2, n_bytes, dtype=torch.uint8)

    up = staging.copy(Lane.H2D, here, source, ())
    down = staging.copy(Lane.D2H, back, here, (up,))
    sync(device, staging, down)

    assert torch.equal(back, source)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_many_copies_by_threads_come_in_the_order_of_their_lane(n_threads: int) -> None:
    device = CpuDevice()
    staging = staging_on(device, n_threads)
    sources = [random_bytes(100_000, seed) for seed in range(20)]
    here, *homes = torch.zeros(21, 100_000, dtype=torch.uint8)
    down: Ticket | None = None
    for source, home in zip(sources, homes, strict=True):  # all of them through the same place
        up = staging.copy(Lane.H2D, here, source, () if down is None else (down,))
        down = staging.copy(Lane.D2H, home, here, (up,))
    staging.finish()

    assert all(map(torch.equal, homes, sources))


def test_a_copy_of_page_locked_memory_waits_for_staged_ones_of_its_lane() -> None:
    order: list[int] = []

    def queue(lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket]) -> Ticket:
        order.append(src.numel())
        return Ticket(lane, 0.0, done=True)

    staging = Staging(queue, lambda ticket: None, CpuDevice().slab, n_threads=1)
    staging.open(stages_bytes(8192))
    pieces = [torch.zeros(n, dtype=torch.uint8) for n in (8192, 8192, 5, 5)]
    staging.copy(Lane.H2D, pieces[0], pieces[1], ())
    last = staging.copy(Lane.H2D, pieces[2], pieces[3], (), staged=False)
    assert isinstance(last, StagedTicket)
    staging.wait(last)

    assert order == [4096, 4096, 0, 5]


def test_a_copy_that_fails_is_a_typed_error_and_the_next_one_goes_on() -> None:
    broken = [True]

    def queue(lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket]) -> Ticket:
        if broken[0]:
            raise RuntimeError("the device fell off the bus")
        return CpuDevice().copy(lane, dst, src)

    staging = Staging(queue, lambda ticket: None, CpuDevice().slab)
    here, there = torch.zeros(100, dtype=torch.uint8), random_bytes(100, 0)
    first = staging.copy(Lane.H2D, here, there, ())
    assert isinstance(first, StagedTicket)
    with pytest.raises(TransferError, match="fell off the bus"):
        staging.wait(first)
    broken[0] = False
    second = staging.copy(Lane.H2D, here, there, ())
    assert isinstance(second, StagedTicket)
    staging.wait(second)

    assert torch.equal(here, there)


def test_a_ring_is_as_large_as_is_useful_and_as_the_limit_allows() -> None:
    assert stages_bytes(2**30) == 64 * 2**20
    assert stages_bytes(2**20) == 4 * 2**20
    assert stages_bytes(100) == 8 * 4096
    assert stages_bytes(2**30, 2**20) == 2**20


@pytest.mark.parametrize(("accepted", "n_bytes"), [(0, 256 * KIB), (150 * KIB, 128 * KIB)])
def test_a_ring_is_smaller_if_that_helps_to_page_lock_it(accepted: int, n_bytes: int) -> None:
    """Where nothing may be page-locked, pieces of a page would cost a copy each for nothing."""

    def slab(n_bytes: int) -> Slab:
        found = CpuDevice().slab(n_bytes)
        found.unlock = noop if n_bytes <= accepted else None
        return found

    device = CpuDevice()
    staging = Staging(device.copy, device.sync, slab, n_threads=0)
    staging.open(stages_bytes(64 * KIB))
    assert staging.n_bytes == n_bytes


# -- training on an emulated device --------------------------------------------------------------


def train(
    steps: int = 4, parts: int = 1, clip: bool = True, **settings: Any
) -> tuple[list[torch.Tensor], Any]:
    """Train on the emulated device and return the weights, and the status before release."""
    gc.collect()  # the frames of a model that was released
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"device": fake.device(), "hbm": 400_000, "chunk_bytes": 4096, **settings}
    model, optimizer = hetero.prepare(model, optimizer, **settings)
    for number in range(steps):
        for part in range(parts):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * number + part))
            model(x.to(fake.PLACE)).pow(2).mean().backward()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    status = hetero.status(model)
    hetero.release(model, optimizer)
    return [p.detach().cpu().clone() for p in model.parameters()], status


def asynchronous_pageable() -> list[str]:
    return [what for what in fake.copies() if "asynchronous" in what and "pageable" in what]


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pinned", [8 * 4096, 100 * KIB])
@pytest.mark.parametrize(
    "settings",
    [{}, {"parts": 2}, {"activations": "offload"}, {"updates": "backward", "clip": False}],
    ids=["plain", "sums", "offload", "early"],
)
def test_a_budget_of_page_locked_memory_changes_no_bit(
    watched: None, settings: dict[str, Any], pinned: int, seed: int
) -> None:
    fake.start(seed)
    before = fake.pinned_bytes()
    whole, free = train(**settings)
    weights, bounded = train(pinned=pinned, **settings)

    assert all(map(torch.equal, weights, whole))
    assert 0 < bounded.locked_bytes <= pinned < free.locked_bytes
    assert asynchronous_pageable() == []
    assert fake.pinned_bytes() <= before


@pytest.mark.parametrize(
    "accepted",
    [
        0,
        pytest.param(60 * KIB, marks=pytest.mark.campaign(seconds=1.5)),
        pytest.param(120 * KIB, marks=pytest.mark.campaign(seconds=1.5)),
    ],
)
def test_memory_that_cuda_refuses_half_way_is_staged_and_nothing_stays_registered(
    watched: None, accepted: int
) -> None:
    gc.collect()
    whole, _ = train()
    before = fake.pinned_bytes()
    with fake.limit(pinned=before + accepted), pytest.warns(UserWarning, match="refused"):
        weights, bounded = train()

    assert all(map(torch.equal, weights, whole))
    assert bounded.locked_bytes <= accepted
    assert fake.pinned_bytes() == before
    if accepted:  # else the stages are pageable, too
        assert asynchronous_pageable() == []


def test_states_are_not_page_locked(watched: None) -> None:
    gc.collect()
    _, free = train()
    home = 5 * 4096  # of a unit's weights, or of their gradients

    assert free.locked_bytes == 6 * 2 * home + stages_bytes(home)


def test_stages_are_charged_and_given_back(emulator: None) -> None:
    model = hetero.prepare(torch.nn.Linear(8, 8), device=fake.device(), hbm=200_000, host=2**20)

    assert hetero.status(model).tiers["HOST"]["pool"] == 8 * 4096
    hetero.release(model)
    assert fake.pinned_bytes() == 0


@pytest.mark.parametrize(("pinned", "told"), [(2**60, "may take"), (100, "32768 bytes or more")])
def test_a_budget_of_page_locked_memory_that_cannot_be_is_refused(
    emulator: None, pinned: int, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        hetero.prepare(torch.nn.Linear(8, 8), device=fake.device(), hbm=200_000, pinned=pinned)


def test_the_budget_is_bytes_or_a_text() -> None:
    assert Config.load(pinned="512MiB").pinned == 512 * 2**20


@pytest.mark.parametrize(("stage", "link", "slowest"), [(10.0, 5.0, 5.0), (5.0, 10.0, 5.0)])
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_a_modelled_copy_takes_the_slower_of_threads_and_lane(
    lane: Lane, stage: float, link: float, slowest: float
) -> None:
    device = DryDevice(
        is_cuda=True,
        ram_bytes=2**30,
        copy_seconds=lambda lane, n, busy: n / link,
        stage_seconds=lambda n: n / stage,
    )
    device.open_stages(8 * 100, pinned=800)
    home, frames = device.slab(10_000).carve(0, 10_000), device.arena(10_000).carve(0, 10_000)
    ends = (frames, home) if lane is Lane.H2D else (home, frames)

    first, second = device.copy(lane, *ends), device.copy(lane, *ends)

    assert 10_000 / slowest <= first.end <= 10_000 / slowest + 100 / stage + 100 / link
    assert second.end <= 2 * first.end


def test_a_model_without_a_budget_is_rehearsed_as_before() -> None:
    device = DryDevice(
        is_cuda=True,
        ram_bytes=2**30,
        copy_seconds=lambda lane, n, busy: n / 5.0,
        stage_seconds=lambda n: n / 1.0,
    )
    device.open_stages(8 * 100, pinned=None)
    home, frames = device.slab(1000).carve(0, 1000), device.arena(1000).carve(0, 1000)

    assert device.copy(Lane.H2D, frames, home).end == 200.0


def test_a_report_tells_how_much_is_page_locked(emulator: None, tmp_path: Path) -> None:
    model = hetero.prepare(torch.nn.Linear(8, 8), device=fake.device(), hbm=200_000)
    page = tmp_path / "report.html"
    hetero.report(model, page)

    assert f"{hetero.status(model).locked_bytes // KIB} KiB" in page.read_text()
    assert "page-locked" in page.read_text()
    hetero.release(model)


def hold(gate: threading.Event) -> None:
    gate.wait()


def test_a_lane_of_the_device_stays_in_order(watched: None) -> None:
    device = fake.device()
    device.open_stages(8 * 4096, None)
    locked, pageable = device.slab(4096), device.slab(10_000, travels=False)
    frames, others = device.arena(10_000), device.arena(4096)
    gate = threading.Event()
    before = StagedTicket(Lane.D2H)  # of a copy that is long in coming
    before.job = Job([partial(hold, gate)])

    first = device.copy(Lane.H2D, frames.block, pageable.block, (before,))
    second = device.copy(Lane.H2D, others.block, locked.block)
    third = device.copy(Lane.D2H, locked.block, frames.block[:4096], (first, second))

    early = [t for t in (first, second, third) for _ in range(50) if device.query(t)]
    gate.set()  # or the thread would never end
    device.sync(second)
    assert early == [] and isinstance(first, StagedTicket) and first.job.done
    device.sync(third)
    device.close_stages()
