"""A tiled module is the module on tiles, with less in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hetero
from benchmarks.activations import held, peak_of
from hetero.errors import ConfigError


class MLP(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(8 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.drop(self.down(torch.relu(self.up(x)))) * scale


def by_hand(module: nn.Module, x: torch.Tensor, size: int, scale: float) -> torch.Tensor:
    return torch.cat([module(part, scale=scale) for part in x.split(size, 1)], 1)


@pytest.mark.parametrize("size", [1, 3, 5, 20, 64])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_tiled_module_is_the_module_on_tiles(size: int, dropout: float) -> None:
    plain = MLP(dropout=dropout).double()
    tiled = hetero.tile(copy.deepcopy(plain), dim=1, size=size)
    x = torch.randn(2, 20, 8, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()

    torch.manual_seed(1)
    expected = by_hand(plain, x, size, 0.5)
    expected.square().sum().backward()
    torch.manual_seed(1)
    found = tiled(y, scale=0.5)
    found.square().sum().backward()

    assert torch.equal(found, expected)
    assert torch.equal(y.grad, x.grad)
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_tile_is_all_that_exists_at_once() -> None:
    plain = MLP(16)
    x = torch.randn(1, 256, 16, requires_grad=True)
    peaks = []
    for module in (plain, hetero.tile(copy.deepcopy(plain), size=16)):

        def act(module: nn.Module = module) -> None:
            module(x).sum().backward()
            x.grad = None

        act()
        peaks.append(peak_of(act, [*held(module), x]))

    assert peaks[1] < peaks[0] / 3


def test_a_copy_of_a_tiled_module_calls_itself() -> None:
    tiled = hetero.tile(MLP(), size=2)
    twin = copy.deepcopy(tiled)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()

    assert not twin(torch.randn(1, 6, 8)).any()
    assert tiled(torch.randn(1, 6, 8)).any()


def test_a_tiled_module_trains_under_a_budget_as_without() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(hetero.tile(MLP(), size=4) for _ in range(4)))
    twin = copy.deepcopy(plain)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = hetero.prepare(
        twin,
        torch.optim.AdamW(twin.parameters(), lr=1e-2),
        device="cpu",
        hbm="200KiB",
        chunk_bytes=1024,
    )

    for number in range(4):
        x = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(number))
        losses = []
        for net, rule in ((plain, reference), (model, optimizer)):
            loss = net(x).square().sum()
            loss.backward()
            rule.step()
            rule.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


class Pooling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True)


def test_what_cannot_be_tiled_is_refused() -> None:
    with pytest.raises(ConfigError, match="size=0"):
        hetero.tile(MLP(), size=0)
    with pytest.raises(ConfigError, match="does not map positions"):
        hetero.tile(Pooling(), size=2)(torch.randn(1, 6, 8))
    patched = MLP()
    patched.forward = lambda x: x
    with pytest.raises(ConfigError, match="was replaced"):
        hetero.tile(patched, size=2)


class Mixer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = MLP(width, dropout=0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.softmax(self.attention(x), 1)
        return x + self.mlp(x)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mixer() for _ in range(4)))


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("hbm", ["64KiB", None])
@pytest.mark.parametrize("policy", ["auto", "keep", "recompute", "offload"])
def test_tiles_are_the_same_whatever_becomes_of_the_blocks_around_them(
    policy: str, hbm: str | None
) -> None:
    plain = blocks()
    twin = copy.deepcopy(plain)
    for block in plain:
        hetero.tile(block.mlp, size=5)
    model, optimizer = hetero.prepare(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
        device="cpu:sim",
        hbm=hbm,
        chunk_bytes=512,
        activations=policy,
        tile=5,
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    for number in range(4):
        found = []
        for side, opt in ((plain, reference), (model, optimizer)):
            torch.manual_seed(number)
            loss = side(torch.randn(2, 13, 8)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            found.append(loss.detach())
        assert torch.equal(*found)

    model, _ = hetero.release(model, optimizer)
    same = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_without_a_recognised_mlp_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    with pytest.raises(ConfigError, match="has an MLP"):
        hetero.prepare(model, device="cpu", tile=8)

    assert model(torch.ones(1, 4)).shape == (1, 4)
