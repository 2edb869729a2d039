"""The HBM budget, measured from outside: this auditor shares no code with the ledger."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice, Slab
from hetero.errors import BudgetError
from tests.campaigns.core_copies import LEAST, loss_of_many
from tests.campaigns.harness import Net
from tests.equivalence.harness import adamw, measure
from tests.equivalence.zoo import BY_NAME, Case, Loop

AUDITED = ["tied", "attention", "convolutional", "checkpoint", "checkpoint_inside", "reused"]


class Auditor(TorchDispatchMode):
    """Counts every live storage that an operation makes outside the declared memory."""

    def __init__(self, declared: list[torch.Tensor]) -> None:
        super().__init__()
        self.spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in declared]
        self.seen: set[int] = set()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and type(tensor).__name__ != "LazyGrad":
                self.count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        at, key, n_bytes = storage.data_ptr(), storage._cdata, storage.nbytes()
        if key in self.seen or any(start <= at < end for start, end in self.spans):
            return
        self.seen.add(key)
        self.live += n_bytes
        weakref.finalize(storage, self.forget, key, n_bytes)

    def forget(self, key: int, n_bytes: int) -> None:
        self.seen.discard(key)
        self.live -= n_bytes


class HostTelling(SimDevice):
    """Tells the auditor of HOST memory, and of frames, that are made while it listens."""

    auditor: Auditor | None = None

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.slabs: list[torch.Tensor] = []

    def slab(self, n_bytes: int, *, travels: bool = True) -> Slab:
        slab = super().slab(n_bytes, travels=travels)
        self.slabs.append(slab.block)
        self._tell(slab)
        return slab

    def arena(self, n_bytes: int) -> Slab:
        slab = super().arena(n_bytes)
        self._tell(slab)
        return slab

    def _tell(self, slab: Slab) -> None:
        if self.auditor is not None:
            at = slab.block.data_ptr()
            self.auditor.spans.append((at, at + slab.n_bytes))


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("name", AUDITED)
def test_frames_and_activations_stay_under_the_budget_at_every_operation(name: str) -> None:
    case: Case = BY_NAME[name]
    budget = measure(case, adamw, 256)
    hbm = budget.of(0.4)
    torch.manual_seed(11)
    model = case.build()
    device = HostTelling(seed=1)
    config = Config.load(device=device, hbm=hbm, chunk_bytes=256)
    model, optimizer = prepare_tuned(model, adamw(model), config, None)
    engine = engine_of(model)
    highest = 0
    for number in range(5):
        arena = engine.residence.manager.arena.slab.block
        with Auditor([*device.slabs, arena]) as auditor:
            device.auditor = auditor
            data = case.data(torch.Generator().manual_seed(number))
            case.step(Loop(model, optimizer, data, number, True))
        frames = engine.residence.manager.arena.frames.limit * engine.setup.blueprint.granule_bytes
        optimizer.step()  # divides HBM anew
        optimizer.zero_grad()
        buffers = sum(b.nbytes for b in model.buffers())
        if number >= 1:  # the first step measures with the fewest frames
            assert auditor.peak + frames + buffers <= hbm, (number, auditor.peak, frames, hbm)
            highest = max(highest, auditor.peak)
    assert highest > 0.3 * engine.setup.budget.activation_bytes


class Counting(HostTelling):
    """Counts the memory of frames for as long as it is mapped."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def arena(self, n_bytes: int) -> Slab:
        slab = super().arena(n_bytes)
        assert slab.mapping is not None
        if n_bytes:
            self._mapped.add(slab.mapping)
        return slab

    @property
    def mapped_bytes(self) -> int:
        return sum(len(mapping) for mapping in self._mapped)


def test_views_of_all_weights_take_the_room_of_activations_and_give_it_back() -> None:
    hbm, device = LEAST["cpu:sim"] + 60_000, Counting()
    config = Config.load(device=device, hbm=hbm, chunk_bytes=256, activations="keep")
    net = Net(3)
    model, optimizer = prepare_tuned(net, adamw(net), config, None)
    engine = engine_of(model)
    loss_of_many(model, 0).backward()
    optimizer.step()  # which maps an arena of exactly the frames
    arena = device.mapped_bytes
    for number in range(3):
        optimizer.zero_grad()
        held = [param.detach() for param in model.parameters()]
        assert sum(view.nbytes for view in held) < device.mapped_bytes <= hbm
        assert device.mapped_bytes > arena + 30_000
        del held
        with Auditor([*device.slabs, engine.residence.manager.arena.slab.block]) as auditor:
            device.auditor = auditor
            loss = loss_of_many(model, number)
            assert device.mapped_bytes == arena
            held = [param.detach() for param in model.parameters()]  # beside what the graph holds
            assert arena < device.mapped_bytes <= hbm - auditor.live
            del held
            loss.backward()
            assert device.mapped_bytes == arena
            assert auditor.peak + arena <= hbm
        optimizer.step()


def test_the_arena_is_a_mapping_of_exactly_the_budget() -> None:
    case = BY_NAME["tied"]
    model = case.build()
    config = Config.load(device="cpu:sim", hbm=100_000, chunk_bytes=256)
    model, _ = prepare_tuned(model, adamw(model), config, None)
    engine = engine_of(model)
    arena = engine.residence.manager.arena.slab
    assert 100_000 - engine.setup.blueprint.granule_bytes < arena.n_bytes <= 100_000
    assert arena.mapping is not None and len(arena.mapping) == arena.n_bytes
    start = arena.block.data_ptr()
    with engine.residence.runtime.lend((0, 1), "test"):
        for bucket in (0, 1):
            for view in engine.residence.manager.replicas[bucket].views:
                assert start <= view.data_ptr() <= start + arena.n_bytes - view.nbytes
    assert ctypes.string_at(start, 1) is not None


def test_more_than_the_budget_cannot_be_pinned() -> None:
    case = BY_NAME["tied"]
    model = case.build()
    config = Config.load(device="cpu:sim", hbm=30_000, chunk_bytes=256)
    model, _ = prepare_tuned(model, adamw(model), config, None)
    engine = engine_of(model)
    everything = tuple(b.id for b in engine.setup.blueprint.layout.buckets)
    with pytest.raises(BudgetError, match="needs"):
        engine.residence.manager.pin(everything, "test")
    assert all(r.pins == 0 for r in engine.residence.manager.replicas.values())
    engine.residence.manager.pin((0,), "test")
