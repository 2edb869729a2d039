"""What is remembered of a unit that was computed again: which paths gave the same bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from hetero.train.activations import proof
from hetero.train.activations.proof import PATIENCE, Digests, Proof


class View(NamedTuple):
    param: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def digests(*tensors: torch.Tensor) -> Digests:
    found = Digests()
    for tensor in tensors:
        found.saw(tensor)
    return found


def test_the_same_bits_make_no_difference_whatever_memory_they_lie_in() -> None:
    x = torch.randn(4, 6)

    assert digests(x, x.t()).difference(digests(x.clone(), x.clone().t())) == ""


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0, 4.0]),
        torch.tensor([2.0, 1.0, 3.0]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([1, 2, 3]),
    ],
    ids=["a number", "their order", "the shape", "the dtype", "integers"],
)
def test_other_bits_are_a_difference(other: torch.Tensor) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])

    assert "tensor 1 of 2" in digests(x, x).difference(digests(x, other))


def test_a_zero_and_a_negative_zero_are_other_bits() -> None:
    assert digests(torch.zeros(2)).difference(digests(-torch.zeros(2))) != ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("numel", [1, 7, 64, 1000])
def test_a_device_sees_each_bit_and_each_pair_of_signs(
    dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PIECE", 96)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = proof._sums(x)
    raw = x.clone().view(torch.uint8)
    top = dtype.itemsize - 1  # its highest byte
    for at in range(0, raw.numel(), 37):
        for mask in (1, 16, 128):
            raw[at] ^= mask
            assert not torch.equal(proof._sums(raw.view(dtype)), found)
            raw[at] ^= mask
    for other in range(1, numel, 13):
        pair = [top, other * dtype.itemsize + top]
        raw[pair] ^= 128
        assert not torch.equal(proof._sums(raw.view(dtype)), found)
        raw[pair] ^= 128
    assert torch.equal(proof._sums(raw.view(dtype)), found)


def test_where_a_tensor_begins_in_its_memory_is_no_difference() -> None:
    x = torch.arange(100, dtype=torch.int16)

    assert torch.equal(proof._sums(x[1:99]), proof._sums(x[1:99].clone()))


def test_more_or_fewer_tensors_are_a_difference() -> None:
    x = torch.ones(2)

    assert digests(x, x).difference(digests(x)) == "saved 1 tensors and not 2"


def test_another_view_of_a_parameter_is_a_difference() -> None:
    first, second = Digests(), Digests()
    first.saw_view(View(0, 0, (2, 3), (3, 1)))
    second.saw_view(View(0, 6, (2, 3), (3, 1)))

    assert first.difference(second) != ""


def test_a_path_is_pure_when_it_was_computed_twice_alike() -> None:
    proof = Proof()
    path = proof.take(["training"])
    assert proof.is_open and not proof.holds

    proof.conclude(path, "")

    assert proof.holds and not proof.is_open
    proof.take(["evaluation"])
    assert proof.is_open and not proof.holds


def test_a_path_that_failed_once_is_never_pure() -> None:
    proof = Proof()
    path = proof.take(["training"])
    proof.conclude(path, "made other bits")

    proof.conclude(path, "")

    assert not proof.holds and not proof.is_open


def test_a_path_without_room_is_tried_again_a_few_times() -> None:
    proof = Proof()
    path = proof.take(["training"])
    for _ in range(PATIENCE - 1):
        proof.conclude(path, None)
        assert proof.is_open

    proof.conclude(path, None)

    assert not proof.is_open and not proof.holds
