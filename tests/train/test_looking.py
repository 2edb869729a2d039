"""Modes that look at operations leave the bits of backwards as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.internals import DispatchMode, modes_on
from hetero.train.activations.meter import LiveBytes
from hetero.train.model.looking import LookingMode, bitwise, unseen_products

WIDTH, BATCH, STEPS = 9, 7, 3


class Looking(LookingMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return bitwise(func)(*args, **(kwargs or {}))


class Programs(DispatchMode):
    """A mode of the program's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Products(nn.Module):
    """Its backward rounds differently under a mode."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is not None:
            x = checkpoint(self.scaled, self.first(x), use_reentrant=self.reentrant)
        else:
            x = self.scaled(self.first(x))
        return self.last(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.tanh(x).add(1.5).prod(1, keepdim=True)


def loss_of(found: Tensor) -> Tensor:
    return found.tanh().add(1.5).prod(1).sum() + torch.masked.prod(found.sigmoid().add(0.5))


def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
    for number in range(STEPS):
        torch.manual_seed(number)
        loss_of(model(torch.randn(BATCH, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def prepared(model: nn.Module, folder: Path, **settings: Any) -> list[Tensor]:
    given = {"device": "cpu:sim", "hbm": "6KiB", "chunk_bytes": 256, **settings}
    model, optimizer = hetero.prepare(model, adam(model), **given)
    return train(model, optimizer)


def profiled(model: nn.Module, folder: Path) -> list[Tensor]:
    optimizer = adam(model)
    with hetero.profile(model, folder, optimizer=optimizer):
        return train(model, optimizer)


def watched(model: nn.Module, folder: Path) -> list[Tensor]:
    with hetero.watch(folder / "page.html"):
        return train(model, adam(model))


RUNS: dict[str, Callable[[nn.Module, Path], list[Tensor]]] = {
    "paged": prepared,
    "recompute": lambda model, folder: prepared(model, folder, activations="recompute"),
    "offload": lambda model, folder: prepared(model, folder, activations="offload"),
    "slices": lambda model, folder: prepared(model, folder, micro_batch=BATCH),
    "stays": lambda model, folder: prepared(model, folder, hbm=None),
    "profiled": profiled,
    "watched": watched,
}


@pytest.mark.campaign(seconds=0.5)
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("how", RUNS)
def test_a_model_of_products_trains_bitwise(
    how: str, reentrant: bool | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Products(reentrant=reentrant)
    ours = RUNS[how](copy.deepcopy(plain), tmp_path)

    assert all(map(torch.equal, train(plain, adam(plain)), ours))
    assert not modes_on()


def values() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, WIDTH).add(1.5).requires_grad_(True)


def slope(mode: Any = None, *, twice: bool = False) -> Tensor:
    x = values()
    with mode or torch.enable_grad():
        total = x.prod(1).sum()
        with unseen_products((total,)):
            (found,) = torch.autograd.grad(total, x, create_graph=twice)
        if twice:
            total = found.square().sum()
            with unseen_products((total,)):
                (found,) = torch.autograd.grad(total, x)
    return found


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_those_without_a_mode_that_only_looks(twice: bool) -> None:
    plain = slope(twice=twice)

    assert torch.equal(slope(Looking(), twice=twice), plain)
    assert not torch.equal(slope(Programs(), twice=twice), plain)  # torch's own, under a mode


def test_under_a_mode_of_the_program_its_formula_is_taken() -> None:
    with Programs():
        assert torch.equal(slope(Looking()), slope())


def test_a_graph_that_is_kept_keeps_no_hook() -> None:
    x = values()
    loss = x.prod(1).sum()
    with Looking(), unseen_products((loss,)):
        loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward(retain_graph=True)
    assert first is not None and torch.equal(first, x.grad)

    x.grad = None
    with Programs():
        loss.backward()
    assert not torch.equal(first, x.grad)


def test_a_pass_that_fails_leaves_the_modes_that_were_on() -> None:
    x = values()
    loss = x.prod(1).sum()
    x.register_hook(lambda _: 1 / 0)
    looking = Looking()
    with looking:
        with pytest.raises(ZeroDivisionError), unseen_products((loss,)):
            loss.backward()
        assert modes_on() == [looking]
    assert not modes_on()


def test_gradients_that_were_made_unseen_are_counted() -> None:
    rows = 2048
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0))
    model, optimizer = hetero.prepare(model, adam(model), device="cpu:sim", hbm="1MiB")
    seen: list[int] = []
    note = LiveBytes.note

    def noted(self: LiveBytes, found: Any, given: Any) -> None:
        if given == () and isinstance(found, tuple) and found[0] is not None:
            before = self.live
            note(self, found, given)
            seen.append(self.live - before)
        else:
            note(self, found, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveBytes, "note", noted)
        out = model(torch.randn(rows, WIDTH)).view(rows, WIDTH)
        out.tanh().add(1.5).prod(1).sum().backward()
    assert seen == [4 * rows * WIDTH]
    optimizer.step()


@pytest.mark.parametrize("casts", [False, True])
def test_a_mode_that_looks_leaves_bilinear_layers_their_bits(casts: bool) -> None:
    layer, x = nn.Bilinear(16, 16, 16), torch.randn(3, 5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        expected = layer(x, x)
        with Looking():
            found = layer(x, x)
    assert torch.equal(expected, found)
    assert torch.equal(layer(x, x), found) is not casts
