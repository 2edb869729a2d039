"""Mappings that stay out of forked children: theirs are not where these were."""

from __future__ import annotations

import ctypes
import gc
import mmap
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hetero
from hetero.device import Slab
from hetero.device.face import map_slab
from hetero.errors import ForkedProcessError
from hetero.forks import is_absent, keep_out, let_in
from tests.children import in_child
from tests.emulator import fake

MIB = 2**20


def kept_out(n_bytes: int = 4 * MIB) -> Slab:
    slab = map_slab(n_bytes)
    assert slab.mapping is not None
    slab.block.fill_(7)
    keep_out(slab.mapping)
    return slab


class Cycle:
    """Garbage that goes when the collector comes."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.me = self


def maps_and_collects() -> bool:
    made = [mmap.mmap(-1, MIB) for _ in range(16)]
    for each in made:
        each[:] = b"x" * MIB
    gc.collect()
    return all(each[:] == b"x" * MIB for each in made)


def test_a_child_that_drops_its_parents_memory_keeps_its_own() -> None:
    Cycle(kept_out())
    assert in_child(maps_and_collects) == 0


def test_so_does_a_child_of_a_child_that_ends_as_programs_do() -> None:
    slab = kept_out()

    def ends() -> bool:
        return in_child(maps_and_collects) == 0 and slab.is_absent

    assert in_child(ends) == 0
    assert not slab.is_absent


def test_nothing_of_a_child_is_where_its_parents_memory_was() -> None:
    slab = kept_out()
    first, end = slab.block.data_ptr(), slab.block.data_ptr() + slab.n_bytes

    def stays_away() -> bool:
        made = [mmap.mmap(-1, MIB) for _ in range(16)]
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in made]
        return not any(first < start + MIB and start < end for start in starts)

    assert in_child(stays_away) == 0
    assert in_child(lambda: bool(slab.block[0] == 7)) == -signal.SIGSEGV  # never other numbers
    assert bool((slab.block == 7).all())


def test_a_mapping_that_is_let_in_again_is_there() -> None:
    slab = kept_out()
    assert slab.mapping is not None
    let_in(slab.mapping)
    assert in_child(lambda: not slab.is_absent and bool((slab.block == 7).all())) == 0


def test_what_another_thread_drops_meanwhile_is_kept() -> None:
    """Slabs come and go while children are forked."""
    stop = threading.Event()

    def make() -> None:
        while not stop.is_set():
            Cycle(kept_out(MIB))
            gc.collect()

    thread = threading.Thread(target=make)
    thread.start()
    try:
        assert [in_child(maps_and_collects) for _ in range(6)] == [0] * 6
    finally:
        stop.set()
        thread.join()


def test_only_what_was_kept_out_is_absent() -> None:
    slab, other = kept_out(), map_slab(MIB)
    assert in_child(lambda: is_absent(slab.mapping) and not is_absent(other.mapping)) == 0
    assert in_child(lambda: not is_absent(None) and not map_slab(MIB).is_absent) == 0


class Touches(Dataset[float]):
    """Samples that are made with a weight of the model, in a worker."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return float(self.read().sum())


@pytest.mark.parametrize("what", ["state dict", "state", "nothing"])
def test_a_worker_that_reads_homes_is_told_and_the_training_goes_on(
    emulator: None, what: str
) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss = model(torch.ones(4, 64, device=fake.PLACE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().cpu()

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
    model, optimizer = hetero.prepare(
        *(plain, torch.optim.AdamW(plain.parameters())),
        device=fake.device(),
        hbm=100_000,
        chunk_bytes=4096,
    )
    param = next(iter(model.parameters()))
    before = trained(model, optimizer)
    reads: dict[str, Callable[[], torch.Tensor]] = {
        "state dict": lambda: next(iter(model.state_dict().values())),
        "state": lambda: optimizer.state[param]["exp_avg"],
        "nothing": lambda: torch.ones(3),
    }
    batches = DataLoader(Touches(reads[what]), num_workers=1, multiprocessing_context="fork")
    if what == "nothing":
        assert [float(each) for each in batches] == [3.0, 3.0]
    else:
        with pytest.raises(ForkedProcessError, match="shared RAM, which its parent keeps"):
            list(batches)
    assert trained(model, optimizer) < before
