"""The CUDA path: streams, page-locking, the budget. Every test skips by name without a device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import CudaDevice
from hetero.jobs import Worker
from hetero.recipes.calibrate import CalibrateOptions, calibrate
from hetero.recipes.probes import Ends
from hetero.train.engine.tuning import Tuning
from hetero.types import Lane
from tests.equivalence.harness import compare_with, sgd, values
from tests.equivalence.zoo import BY_NAME, CASES, Case, Loop
from tests.recipes.test_calibrate import TINY

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NOT_HERE = {"unscaled", "autocast", "autocast_reused", "kept_views"}  # name the CPU, or step


@needs_cuda
def test_slabs_are_page_locked_and_exactly_sized() -> None:
    device = CudaDevice()
    slab = device.slab(3 << 20)
    assert slab.registered and slab.n_bytes == 3 << 20
    assert slab.carve(4096, 8192).is_pinned()


@needs_cuda
@pytest.mark.parametrize("seed", range(5))
def test_copies_wait_for_what_they_are_behind(seed: int) -> None:
    device = CudaDevice()
    slab, arena = device.slab(1 << 24), device.arena(1 << 24)
    source = torch.arange(1 << 22, dtype=torch.int32) + seed
    slab.block.copy_(source.view(torch.uint8))
    torch.cuda._sleep(50_000_000)  # compute is late; the copy must be behind it
    done = device.mark()
    up = device.copy(Lane.H2D, arena.block, slab.block, (done,))
    slab_out = device.slab(1 << 24)
    down = device.copy(Lane.D2H, slab_out.block, arena.block, (up,))
    device.sync(down)
    assert torch.equal(slab_out.block, slab.block)


@needs_cuda
@pytest.mark.parametrize("case", [c for c in CASES if c.name not in NOT_HERE], ids=lambda c: c.name)
def test_a_model_trains_on_cuda_as_an_unbounded_one(case: Case) -> None:
    """Losses and gradients are torch's on CUDA, bit by bit.

    The update runs at the HOST homes, which is not claimed to be CUDA's arithmetic; so one step is
    compared up to its gradients, and weights only between placements (below).
    """
    compare_with(case, "cuda")


@needs_cuda
def test_placement_gives_one_hash_on_cuda() -> None:
    hashes = set()
    for hbm, chunk in ((400_000, 256), (600_000, 1024), (900_000, 512)):
        torch.manual_seed(0)
        model = BY_NAME["clip_norm"].build()
        config = Config.load(device="cuda", hbm=hbm, chunk_bytes=chunk)
        model, optimizer = prepare_tuned(model, sgd(model), config, None)
        for number in range(5):
            data = BY_NAME["clip_norm"].data(torch.Generator().manual_seed(number)).cuda()
            BY_NAME["clip_norm"].step(Loop(model, optimizer, data, number, True))
            optimizer.step()
            optimizer.zero_grad()
        hashes.add(b"".join(v.cpu().numpy().tobytes() for v in values(model)))
        assert engine_of(model).residence.name == "paged"
    assert len(hashes) == 1


@needs_cuda
def test_the_allocator_stays_under_the_budget() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
    plain = copy.deepcopy(model)
    hbm = 64 << 20
    model, optimizer = hetero.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), device="cuda", hbm=hbm
    )
    x = torch.randn(64, 1024, device="cuda")
    before = torch.cuda.memory_allocated() - engine_of(model).residence.manager.arena.slab.n_bytes
    for step in range(5):
        torch.cuda.reset_peak_memory_stats()
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:
            assert torch.cuda.max_memory_allocated() - before <= hbm
    hetero.release(model, optimizer)
    for name, value in plain.state_dict().items():
        assert model.state_dict()[name].shape == value.shape
        assert not torch.equal(model.state_dict()[name], value)


def train_bf16(steps: int = 5, **settings: Any) -> tuple[bytes, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    precision = settings.pop("precision", "bf16")
    tuning = settings.pop("tuning", None)
    config = Config.load(device="cuda", precision=precision, chunk_bytes=1024, **settings)
    model, optimizer = prepare_tuned(model, plain, config, tuning)
    for number in range(steps):
        for part in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + part))
            loss = model(x.cuda().to(next(model.parameters()).dtype)).float().pow(2).mean()
            hetero.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.finish()
    masters = [
        engine.setup.masters.value(segment) for _, segment in engine.setup.blueprint.layout.home
    ]
    return b"".join(m.cpu().numpy().tobytes() for m in masters), engine


@needs_cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_the_same_wherever_their_updates_run(precision: str) -> None:
    """The written formulas are IEEE, one rounding at a time: CPU and CUDA have the same bits."""
    home, engine = train_bf16(hbm=60_000, precision=precision)
    assert engine.residence.name == "paged"
    for tuning in (Tuning(native=False), Tuning(worker=Worker(0)), Tuning(update_on_device=True)):
        assert train_bf16(hbm=90_000, precision=precision, tuning=tuning)[0] == home
    resident, engine = train_bf16(hbm=1 << 28, precision=precision)
    assert engine.residence.name == "resident"
    assert resident == home


@needs_cuda
def test_updates_overlap_on_cuda_without_changing_a_bit() -> None:
    hashes = set()
    for tuning in (Tuning(), Tuning(worker=Worker(0)), Tuning(worker=Worker(4))):
        case = BY_NAME["clip_norm"]
        torch.manual_seed(0)
        model = case.build()
        config = Config.load(device="cuda", hbm=500_000, chunk_bytes=256)
        model, optimizer = prepare_tuned(model, sgd(model), config, tuning)
        for number in range(6):
            data = case.data(torch.Generator().manual_seed(number)).cuda()
            case.step(Loop(model, optimizer, data, number, True))
            optimizer.step()
            optimizer.zero_grad()
        hashes.add(b"".join(v.cpu().numpy().tobytes() for v in values(model)))
    assert len(hashes) == 1


@needs_cuda
def test_a_lane_is_timed_with_the_copies_that_it_does_beside_the_other_lane() -> None:
    device = CudaDevice()
    up = Ends(device.arena(1 << 22).block, device.slab(1 << 22).block)
    down = Ends(device.arena(1 << 22).block, device.slab(1 << 22).block)
    up.below.fill_(7)
    down.here.fill_(9)
    torch.cuda.synchronize()
    beside = down.moves(Lane.D2H, 1 << 16)

    assert device.lane_seconds(Lane.H2D, up.moves(Lane.H2D, 1 << 16), beside) > 0
    assert up.here.eq(7).all() and down.below.eq(9).all()


@needs_cuda
def test_calibrating_cuda_writes_a_profile_without_a_problem(disk: Path) -> None:
    options = CalibrateOptions(pace=TINY, device="cuda", output=disk / "box.toml")
    result = calibrate(options)
    gpu, link = result.profile.gpu, result.profile.link

    assert result.problems == ()
    assert gpu is not None and link is not None
    assert gpu.name == torch.cuda.get_device_name()
    assert result.profile.matmul_seconds(64, 64, 64, "fp32") > 0
    assert result.profile.overlap.gemm_under_h2d is not None
    assert result.profile.overlap.update_under_dma is not None
