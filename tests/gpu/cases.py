"""What a CUDA device has to do. `test_cuda` runs these on a real one, `tests/emulator` on another.

They ask for the fixture `gpu`. Numbers that only a real one has are in `test_cuda` alone.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import CudaDevice
from hetero.jobs import Worker
from hetero.recipes.probes import Ends
from hetero.train.engine.tuning import Tuning
from hetero.types import Lane
from tests.equivalence.harness import grads, paged, same, sgd, values
from tests.equivalence.zoo import CASES, Case, Loop

STEPS = 5
STEPS_ITSELF = {"kept_views"}  # its update is the CPU's, which is not claimed to be CUDA's
LAYERS = 12


@dataclass(frozen=True)
class Gpu:
    """A CUDA device, real or emulated."""

    place: str
    """Where its tensors are."""
    cuda: Any
    """`torch.cuda`, or what stands for it."""
    width: int
    """Of a layer; twelve of them outweigh what libraries take."""
    slack: int
    """Bytes for activations and what libraries take: cuBLAS has 32 MiB for each of two threads."""
    not_here: frozenset[str] = frozenset()
    """Cases of the zoo that it has no kernels for."""

    def device(self) -> CudaDevice:
        return CudaDevice()

    @property
    def layers_bytes(self) -> int:
        return 4 * LAYERS * self.width * (self.width + 1)

    def chunk_bytes(self, small: int) -> int:
        """Return chunks as large, for these layers, as ``small`` ones are for layers of 32."""
        return small * (self.width // 32) ** 2


def layers(gpu: Gpu) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(gpu.width, gpu.width) for _ in range(LAYERS)))


def batch(gpu: Gpu, number: int) -> Tensor:
    return torch.randn(4, gpu.width, generator=torch.Generator().manual_seed(number)).to(gpu.place)


def weights(model: nn.Module) -> bytes:
    return b"".join(value.cpu().numpy().tobytes() for value in values(model))


def test_slabs_are_page_locked_and_exactly_sized(gpu: Gpu) -> None:
    slab = gpu.device().slab(3 << 20)
    assert slab.registered and slab.n_bytes == 3 << 20
    assert slab.carve(4096, 8192).is_pinned()


@pytest.mark.parametrize("seed", range(5))
def test_copies_wait_for_what_they_are_behind(seed: int, gpu: Gpu) -> None:
    device = gpu.device()
    slab, arena = device.slab(1 << 24), device.arena(1 << 24)
    source = torch.arange(1 << 22, dtype=torch.int32) + seed
    slab.block.copy_(source.view(torch.uint8))
    gpu.cuda._sleep(50_000_000)  # compute is late; the copy must be after it
    done = device.mark()
    up = device.copy(Lane.H2D, arena.block, slab.block, (done,))
    slab_out = device.slab(1 << 24)
    down = device.copy(Lane.D2H, slab_out.block, arena.block, (up,))
    device.sync(down)
    assert torch.equal(slab_out.block, slab.block)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in STEPS_ITSELF], ids=lambda c: c.name
)
def test_a_model_trains_on_cuda_as_an_unbounded_one(case: Case, gpu: Gpu) -> None:
    """Losses and gradients of one step are torch's on CUDA, bit by bit; weights are compared
    between placements, below."""
    if case.name in gpu.not_here:
        return
    torch.manual_seed(11)
    plain = case.build()
    model = copy.deepcopy(plain)
    plain = plain.to(gpu.place)
    config = Config.load(device=gpu.device(), hbm=gpu.slack + (64 << 20), chunk_bytes=256)
    with paged():
        tuning = Tuning(homes_on_hbm=False)
        model, optimizer = prepare_tuned(model, sgd(model), config, tuning)
    theirs = Loop(plain, sgd(plain), data_of(case, gpu), 0, prepared=False)
    ours = Loop(model, optimizer, data_of(case, gpu), 0, prepared=True)
    same(losses(case, theirs), losses(case, ours), f"{case.name}: losses")
    same(*(on_cpu(grads(m)) for m in (plain, model)), f"{case.name}: gradients")
    assert engine_of(model).residence.manager.counts["fetch"] > 0
    hetero.release(model, optimizer)


def data_of(case: Case, gpu: Gpu) -> Tensor:
    return case.data(torch.Generator().manual_seed(0)).to(gpu.place)


def losses(case: Case, loop: Loop) -> list[Tensor | None]:
    torch.manual_seed(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return on_cpu(case.step(loop))


def on_cpu(tensors: list[Any]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().cpu() for tensor in tensors]


def trained(gpu: Gpu, share: float, chunk: int, tuning: Tuning) -> bytes:
    """Train with frames for a share of the parameters, and return the weights."""
    model = layers(gpu)
    hbm = gpu.slack + int(share * gpu.layers_bytes)
    config = Config.load(
        device=gpu.device(), hbm=hbm, chunk_bytes=gpu.chunk_bytes(chunk), activations="keep"
    )
    with paged():
        model, optimizer = prepare_tuned(model, sgd(model), config, tuning)
    for number in range(STEPS):
        model(batch(gpu, number)).square().mean().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert engine_of(model).residence.name == "paged"
    assert engine_of(model).setup.stats.counts["fetch"] > 0
    found = weights(model)
    hetero.release(model, optimizer)
    return found


def test_placement_gives_one_hash_on_cuda(gpu: Gpu) -> None:
    below = Tuning(homes_on_hbm=False)
    rows = ((0.3, 256, below), (0.5, 1024, below), (0.8, 512, below))
    assert len({trained(gpu, *row) for row in rows}) == 1


def test_updates_overlap_on_cuda_without_changing_a_bit(gpu: Gpu) -> None:
    tunings = [Tuning(worker=worker, homes_on_hbm=False) for worker in (None, Worker(0), Worker(4))]
    assert len({trained(gpu, 0.5, 256, tuning) for tuning in tunings}) == 1


def test_the_allocator_stays_under_the_budget(gpu: Gpu) -> None:
    model = layers(gpu)
    plain = copy.deepcopy(model)
    x = batch(gpu, 0)
    x.square().sum().item()
    before = gpu.cuda.memory_allocated()
    hbm = gpu.slack + gpu.layers_bytes // 2
    model, optimizer = hetero.prepare(model, sgd(model), device=gpu.device(), hbm=hbm)
    for step in range(STEPS):
        gpu.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:
            assert gpu.cuda.max_memory_allocated() - before <= hbm
    hetero.release(model, optimizer)
    for name, value in plain.state_dict().items():
        assert model.state_dict()[name].shape == value.shape
        assert not torch.equal(model.state_dict()[name].cpu(), value)


def masters_of(gpu: Gpu, precision: str, share: float | None, tuning: Tuning) -> bytes:
    """Train under a 2-byte precision, and return the masters; without a share, on the device."""
    model = layers(gpu)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    hbm = gpu.slack + int((8 if share is None else share) * gpu.layers_bytes)
    config = Config.load(
        device=gpu.device(), precision=precision, chunk_bytes=gpu.chunk_bytes(1024), hbm=hbm
    )
    with paged() if share is not None else warnings.catch_warnings():
        model, optimizer = prepare_tuned(model, plain, config, tuning)
    for number in range(STEPS):
        for part in range(2):
            x = batch(gpu, 10 * number + part)
            loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
            hetero.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.finish()
    assert engine.residence.name == ("resident" if share is None else "paged")
    segments = [segment for _, segment in engine.setup.blueprint.layout.home]
    found = [engine.setup.masters.value(segment).cpu().numpy().tobytes() for segment in segments]
    hetero.release(model, optimizer)
    return b"".join(found)


@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp16", marks=pytest.mark.campaign(seconds=4))]
)
def test_masters_are_the_same_wherever_their_updates_run(precision: str, gpu: Gpu) -> None:
    """The written formulas are IEEE, one rounding at a time: CPU and CUDA have the same bits."""
    tunings = [
        Tuning(homes_on_hbm=False),
        Tuning(homes_on_hbm=False, native=False),
        Tuning(homes_on_hbm=False, worker=Worker(0)),
        Tuning(homes_on_hbm=False, update_on_device=True),
        Tuning(),
    ]
    found = {masters_of(gpu, precision, 0.5, tuning) for tuning in tunings}
    found |= {masters_of(gpu, precision, 3.0, Tuning()), masters_of(gpu, precision, None, Tuning())}
    assert len(found) == 1


class Aside(nn.Module):
    """Two layers, of which one runs on a stream of its own, as shared experts do."""

    def __init__(self, gpu: Gpu, stream: Any) -> None:
        super().__init__()
        self.main, self.shared = (nn.Linear(gpu.width, gpu.width) for _ in range(2))
        self._cuda, self._stream = gpu.cuda, stream

    def forward(self, x: Tensor) -> Tensor:
        compute = self._cuda.current_stream()
        self._stream.wait_stream(compute)
        with self._cuda.stream(self._stream):
            aside = torch.tanh(self.shared(x))
        left = torch.tanh(self.main(x))
        compute.wait_stream(self._stream)
        x.record_stream(self._stream), aside.record_stream(compute)
        return torch.tanh(left + aside)  # backward reaches the weights of both parts at once


def asides(gpu: Gpu) -> nn.Module:
    torch.manual_seed(0)
    stream = gpu.cuda.Stream()
    return nn.Sequential(*(Aside(gpu, stream) for _ in range(LAYERS // 2)))


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_streams_of_a_model_s_own_change_no_gradient(activations: str, gpu: Gpu) -> None:
    plain, model = asides(gpu).to(gpu.place), asides(gpu)
    hbm = gpu.slack + gpu.layers_bytes // 2
    with paged():
        given = {"device": gpu.device(), "hbm": hbm, "activations": activations}
        model, _ = hetero.prepare(model, sgd(model), **given)
    for number in range(STEPS):
        losses = []
        for side in (plain, model):
            side.zero_grad()
            losses.append(side(batch(gpu, number)).square().mean())
            losses[-1].backward()
        same([losses[0]], [losses[1]], f"loss {number}")
        same(grads(plain), grads(model), f"gradients {number}")
    hetero.release(model)


def test_states_of_which_a_share_passes_through_hbm_can_be_copied(gpu: Gpu) -> None:
    """CUDA refuses to copy memory of which a part is page-locked."""
    model = layers(gpu)
    chunk, hbm = gpu.chunk_bytes(1024), gpu.slack + gpu.layers_bytes // 2
    known = Config.load(device=gpu.device(), precision="bf16", chunk_bytes=chunk, hbm=hbm)
    with paged():
        tuning = Tuning(homes_on_hbm=False, passing=0.5)
        model, optimizer = prepare_tuned(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), known, tuning
        )
    for number in range(STEPS):
        hetero.backward(model(batch(gpu, number).bfloat16()).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert "through HBM" in hetero.status(model).update_place
    for param in model.parameters():
        for state in optimizer.state[param].values():
            assert torch.equal(state.to(gpu.place).cpu(), state.cpu())
    hetero.release(model, optimizer)


def test_a_lane_is_timed_with_the_copies_that_it_does_beside_the_other_lane(gpu: Gpu) -> None:
    device = gpu.device()
    up = Ends(device.arena(1 << 22).block, device.slab(1 << 22).block)
    down = Ends(device.arena(1 << 22).block, device.slab(1 << 22).block)
    up.below.fill_(7)
    down.here.fill_(9)
    gpu.cuda.synchronize()
    beside = down.moves(Lane.D2H, 1 << 16)

    assert device.lane_seconds(Lane.H2D, up.moves(Lane.H2D, 1 << 16), beside) > 0
    assert up.here.eq(7).all() and down.below.eq(9).all()


NAMES = [name for name in globals() if name.startswith("test_")]
