"""What goes down, when, and what comes back."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn

import hetero
from benchmarks.activations import FEATURES, UNITS, Modelled
from hetero.api import engine_of
from hetero.device import SimDevice
from hetero.errors import BudgetError
from hetero.types import Kind, Lane, Tier
from tests.equivalence.harness import adamw, same, values

D, ROWS = 32, 64
TENSOR = 4 * ROWS * D  # bytes of what passes from block to block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))


def deep(blocks: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def offloaded(model: nn.Module, **settings: Any) -> tuple[Any, Any]:
    settings = {"device": "cpu", "hbm": "8MiB", "chunk_bytes": 1024, **settings}
    return hetero.prepare(model, adamw(model), activations="offload", **settings)


def step(model: nn.Module, optimizer: Any, number: int, rows: int = ROWS) -> torch.Tensor:
    torch.manual_seed(number)
    loss = model(torch.randn(rows, D)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def moved(model: nn.Module) -> tuple[int, int]:
    n_bytes = engine_of(model).setup.offload.store.link.n_bytes
    return n_bytes[Lane.D2H], n_bytes[Lane.H2D]


def trains_alike(model: nn.Module, optimizer: Any, plain: nn.Module, rows: list[int]) -> None:
    reference = adamw(plain)
    for number, n in enumerate(rows):
        theirs = step(plain, reference, number, n)
        assert torch.equal(step(model, optimizer, number, n), theirs)
    same(values(plain), values(model), "weights")


BUDGETS = ["512KiB", "8MiB", None]
SEEDS = [None, *range(6)]  # of a simulated device; None: "cpu"


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("hbm", BUDGETS)
def test_all_that_the_blocks_save_goes_down_once_and_comes_back_once(
    hbm: str | None, seed: int | None
) -> None:
    plain = deep()
    device = "cpu" if seed is None else SimDevice(seed=seed, checked=True)
    model, optimizer = offloaded(copy.deepcopy(plain), device=device, hbm=hbm)

    trains_alike(model, optimizer, plain, [ROWS] * 4)

    down, up = moved(model)
    # of five blocks: x (the first one's is the user's), what gelu, dropout's mask and down save
    least = 4 * 5 * 2 * 4 * TENSOR
    assert least < down < 2 * least
    assert down == up


def test_sequences_that_grow_and_shrink_use_the_same_chunks() -> None:
    plain = deep()
    model, optimizer = offloaded(copy.deepcopy(plain))

    trains_alike(model, optimizer, plain, [64, 128, 16, 128, 64, 128])

    engine = engine_of(model)
    down, _ = moved(model)
    assert down > 5 * engine.setup.ledger.peak(Tier.HOST, Kind.ACTIVATION) / 2
    model, _ = hetero.release(model, optimizer)
    assert engine.setup.ledger.used(Tier.HOST, Kind.ACTIVATION) == 0


def test_what_host_does_not_hold_goes_to_disk(disk: Path) -> None:
    plain = deep(10)
    model, optimizer = offloaded(copy.deepcopy(plain), hbm="2MiB", host="2700KiB", nvme=disk)

    trains_alike(model, optimizer, plain, [256] * 4)

    ledger = engine_of(model).setup.ledger
    assert ledger.peak(Tier.NVME, Kind.ACTIVATION) > 0
    assert ledger.peak(Tier.HOST) <= 2700 * 1024


def test_without_a_disk_a_full_host_is_a_budget_error_that_says_how_much() -> None:
    model = deep(10)
    model, optimizer = offloaded(model, hbm="1MiB", host="1900KiB")

    with pytest.raises(BudgetError, match="of activations go to HOST") as refused:
        for number in range(3):
            step(model, optimizer, number, 256)

    assert refused.value.needed_bytes > 1900 * 1024


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("seed", range(6))
def test_what_was_fetched_ahead_and_is_not_needed_is_let_go_behind_its_copy(seed: int) -> None:
    """Backward stops in the last blocks, where the load of one before them is under way."""
    plain = deep()
    device = SimDevice(seed=seed, checked=True, lazy=0.05)
    model, optimizer = offloaded(copy.deepcopy(plain), device=device)
    torch.manual_seed(1)
    x = torch.randn(ROWS, D)
    for way in ("dropped", "from the end", "another graph"):
        loss, other = (model(x).square().mean() for _ in range(2))
        torch.autograd.grad(loss, list(model[4].parameters()), retain_graph=way != "dropped")
        if way == "another graph":
            other.backward()
        if way != "dropped":
            loss.backward()
        optimizer.zero_grad()
        del loss, other

    trains_alike(model, optimizer, plain, [ROWS] * 2)


def test_what_backward_needs_next_comes_up_while_it_computes() -> None:
    rate, samples = 300.0, 64
    device = SimDevice(h2d_bytes_per_second=rate, d2h_bytes_per_second=rate)
    model: Any = nn.Sequential(*(Modelled(device) for _ in range(UNITS)))
    model, optimizer = hetero.prepare(
        *(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        device=device,
        hbm="64MiB",
        chunk_bytes=4096,
        activations="offload",
    )
    seconds = []
    for _ in range(4):
        begin = device.now()
        model(torch.randn(samples, FEATURES)).sum().backward()
        seconds.append(device.now() - begin)
        optimizer.step()
        optimizer.zero_grad()

    engine = engine_of(model)
    went = moved(model)[0] / len(seconds) / UNITS  # bytes of a unit
    assert went > samples * FEATURES * 4 / 2 and samples / 2 < went / rate < samples
    compute = 2 * UNITS * samples
    assert engine.residence.name == "resident"  # so that the link has nothing else to carry
    assert seconds[-1] < compute + 2 * went / rate


def test_a_graph_that_is_kept_is_read_again_and_gives_the_same_gradients() -> None:
    model = deep()
    model, _ = offloaded(model)
    x = torch.randn(ROWS, D)
    loss = model(x).sum()
    seen = []
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        seen.append([p.grad.detach().clone() for p in model.parameters()])

    same(seen[0], seen[1], "gradients")
    same(seen[0], seen[2], "gradients")
    assert moved(model)[1] == 3 * moved(model)[0]


def test_a_graph_that_is_dropped_gives_its_chunks_back() -> None:
    model = deep()
    model, _ = offloaded(model)
    for _ in range(4):
        loss = model(torch.randn(ROWS, D)).sum()
        del loss
        gc.collect()

    peak = engine_of(model).setup.ledger.peak(Tier.HOST, Kind.ACTIVATION)
    assert peak < 2 * moved(model)[0] / 4 + 64 * 1024


class Writes(nn.Module):
    """Passes on what a later unit writes to, or does not."""

    def __init__(self, *, tracked: bool) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.second = nn.Linear(D, D)
        self.third = nn.Linear(D, D)
        self.tracked = tracked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))  # tanh saves y
        z = self.second(y)
        if self.tracked:
            y.mul_(2)
        else:
            y.data.mul_(2)
        return self.third(z) + y.detach()


def test_a_write_to_what_was_saved_is_an_error_as_in_torch() -> None:
    model, _ = offloaded(Writes(tracked=True), units=["first", "second", "third"])
    loss = model(torch.randn(ROWS, D)).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class WritesAndForgets(nn.Module):
    """Writes to what autograd saved, and holds it no longer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        y.mul_(2)
        return y.clone()


def test_a_write_to_what_only_graphs_hold_is_an_error_as_in_torch() -> None:
    plain = nn.Sequential(WritesAndForgets(), Block())
    model, _ = offloaded(copy.deepcopy(plain))
    for side in (plain, model):
        loss = side(torch.randn(ROWS, D)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_that_torch_does_not_see_reaches_backward_as_it_would() -> None:
    plain = Writes(tracked=False)
    model, _ = offloaded(copy.deepcopy(plain), units=["first", "second", "third"])
    x = torch.randn(ROWS, D)
    for side in (plain, model):
        side(x).sum().backward()

    same([p.grad for p in plain.parameters()], [p.grad.clone() for p in model.parameters()], "g")


def test_second_derivatives_are_right() -> None:
    plain = deep(3)
    model, _ = offloaded(copy.deepcopy(plain))
    found = []
    for side in (plain, model):
        torch.manual_seed(5)
        x = torch.randn(ROWS, D, requires_grad=True)
        (grad,) = torch.autograd.grad(side(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append([p.grad.detach().clone() for p in side.parameters()])

    same(found[0], found[1], "gradients of gradients")


@pytest.mark.parametrize("activations", ["auto", "keep", "offload"])
def test_tangents_of_zeros_have_no_memory_to_send_down(activations: str) -> None:
    """Forward-mode AD: torch saves zeros that are nowhere."""

    def trained(prepared: bool) -> list[torch.Tensor]:
        model: Any = deep()
        optimizer: Any = adamw(model)
        if prepared:
            given = {"device": "cpu", "hbm": "8MiB", "chunk_bytes": 1024}
            model, optimizer = hetero.prepare(model, optimizer, activations=activations, **given)
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(ROWS, D)
            with fwAD.dual_level():
                model(fwAD.make_dual(x, torch.ones_like(x))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    same(trained(False), trained(True), "weights")
