"""A CUDA device that is not there, or is too full or too small: typed errors, nothing left."""

from __future__ import annotations

import gc
from typing import Any, cast

import pytest
import torch

import hetero
from hetero.device import CudaDevice, cuda
from hetero.errors import BudgetError, ConfigError
from tests.emulator import fake
from tests.equivalence.blocks import Run


def model() -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    "reason",
    [
        "The NVIDIA driver on your system is too old (found version 11040).",
        "No CUDA GPUs are available",  # CUDA_VISIBLE_DEVICES is empty
    ],
)
def test_a_device_that_torch_does_not_see_is_refused_with_its_reason(
    hidden: None, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def refuse() -> None:
        raise RuntimeError(f"{reason}\nPlease update.")

    monkeypatch.setattr(torch.cuda, "init", refuse)

    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES") as caught:
        CudaDevice()
    assert reason in str(caught.value)


def test_without_a_visible_device_the_default_is_the_cpu(hidden: None) -> None:
    prepared = hetero.prepare(model())

    assert hetero.status(prepared).device == "cpu"


def test_a_device_that_another_process_has_for_itself_is_refused(
    emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: object) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(fake.cuda(), "Stream", refuse)

    with pytest.raises(ConfigError, match="busy or unavailable"):
        CudaDevice()


def test_a_device_for_which_torch_has_no_kernels_is_refused(
    emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a card that is newer or older than the build: streams and memory are there."""

    def refuse(*size: int, device: torch.device) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution\nCompile with")

    monkeypatch.setattr(cuda.torch, "ones", refuse, raising=False)

    with pytest.raises(ConfigError, match="no kernel image is available") as caught:
        CudaDevice()
    assert "get_arch_list" in caught.value.advice


def test_a_card_smaller_than_one_unit_is_refused_with_the_smallest_budget(emulator: None) -> None:
    gc.collect()
    with fake.limit(hbm=fake.allocated_bytes() + 10_000), pytest.raises(BudgetError) as caught:
        hetero.prepare(model(), device=fake.device(total_memory=fake.total_bytes()))

    assert caught.value.needed_bytes > 10_000
    assert fake.pinned_bytes() == 0


def test_memory_of_other_processes_is_not_given_away(
    emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake.device()
    monkeypatch.setattr(fake.cuda(), "mem_get_info", lambda place: (100_000, fake.total_bytes()))

    with pytest.raises(ConfigError, match="other processes"):
        hetero.prepare(model(), device=device, hbm="1GiB")


@pytest.mark.parametrize("is_expandable", [False, True])
def test_free_memory_in_pieces_is_told_with_the_allocator_s_way_out(
    emulator: None, is_expandable: bool
) -> None:
    device = fake.device(is_expandable=is_expandable)
    known = fake.load().hbm_limit()
    fake.load().limit_hbm(fake.allocated_bytes() + 60_000)  # and 64 GiB are free
    try:
        with pytest.raises(BudgetError) as caught:
            device.arena(100_000)
    finally:
        fake.load().limit_hbm(known)
    assert ("expandable_segments:True" in caught.value.advice) is not is_expandable
    assert ("in one piece" in str(caught.value).splitlines()[0]) is not is_expandable


def test_a_card_that_is_full_is_not_told_to_be_in_pieces(emulator: None) -> None:
    device = fake.device()
    with fake.limit(hbm=fake.allocated_bytes() + 60_000), pytest.raises(BudgetError) as caught:
        device.arena(100_000)
    assert "expandable" not in caught.value.advice


def test_a_card_that_fills_up_meanwhile_leaves_the_model_as_it_was(emulator: None) -> None:
    gc.collect()
    net, device = model(), fake.device()
    before = [param.clone() for param in net.parameters()]
    known = fake.load().hbm_limit()
    fake.load().limit_hbm(fake.allocated_bytes() + 60_000)  # and the driver told of more
    try:
        with pytest.raises(BudgetError, match="end other processes"):
            hetero.prepare(net, device=device, hbm=200_000)
    finally:
        fake.load().limit_hbm(known)
    gc.collect()

    assert all(map(torch.equal, net.parameters(), before))
    assert fake.pinned_bytes() == 0


def test_frames_that_another_process_has_taken_meanwhile_are_made_later(watched: None) -> None:
    assert trained(is_taken=False) == trained(is_taken=True)


def trained(*, is_taken: bool) -> bytes:
    """Train with more frames from the first border on, or from the second one."""
    run: Any = Run(fake.device(), homes_on_hbm=False, hbm=100_000)
    arena, known = run.engine.residence.manager.arena, fake.load().hbm_limit()
    had = arena.slab.n_bytes
    for number in range(5):
        run.backward(number)
        if is_taken and number == 0:
            fake.load().limit_hbm(fake.allocated_bytes() + 1_000)
        try:
            run.optimizer.step()
        finally:
            fake.load().limit_hbm(known)
        assert (arena.slab.n_bytes > had) is (not is_taken or number > 0)
        run.optimizer.zero_grad()
    return cast(bytes, run.bits())
