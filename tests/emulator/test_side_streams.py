"""A model that computes on streams of its own, joined as torch asks: same bits, and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.errors import StateError
from hetero.train.engine.tuning import Tuning
from tests.emulator import fake
from tests.emulator.harness import Side, adamw, check_smallest
from tests.equivalence.harness import paged

WIDTH = 24


class Aside(nn.Module):
    """A unit with two parts, of which one runs on a stream of its own, as shared experts do."""

    def __init__(self, side: Any) -> None:
        super().__init__()
        self.main, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._side = side

    def forward(self, x: Tensor) -> Tensor:
        cuda = fake.cuda()
        compute = cuda.current_stream()
        self._side.wait_stream(compute)
        with cuda.stream(self._side):
            aside = torch.tanh(self.shared(x))
        left = torch.tanh(self.main(x))
        compute.wait_stream(self._side)
        x.record_stream(self._side), aside.record_stream(compute)
        return torch.tanh(left + aside)  # backward reaches the weights of both parts at once


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        side = fake.cuda().Stream()
        self.units = nn.ModuleList(Aside(side) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def units(side: Side) -> None:
    torch.manual_seed(3)
    model, optimizer = side.prepare(Units(), adamw)
    for number in range(6):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).to(fake.PLACE)
        loss = model(x).square().sum()
        side.record("loss", loss)
        loss.backward()
        side.close_step(model, optimizer, number)


def apart(side: Side) -> None:
    """Train on one stream, and evaluate on another, by turns."""
    torch.manual_seed(3)
    model, optimizer = side.prepare(Units(), adamw)
    cuda, other = fake.cuda(), fake.cuda().Stream()
    for number in range(5):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).to(fake.PLACE)
        other.wait_stream(cuda.current_stream())
        with cuda.stream(other), torch.no_grad():
            side.record("evaluation", model(x))
        model(x).square().sum().backward()
        side.close_step(model, optimizer, number)


def by_a_rate_on_the_device(side: Side) -> None:
    """Train on a stream of its own, by a learning rate that lies and changes on the device."""
    torch.manual_seed(3)
    cuda, other = fake.cuda(), fake.cuda().Stream()
    rate = torch.tensor(0.1, device=fake.PLACE)
    model, optimizer = side.prepare(
        Units(), lambda m: torch.optim.SGD(m.parameters(), lr=rate, foreach=False)
    )
    other.wait_stream(cuda.current_stream())
    with cuda.stream(other):
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            model(
                torch.randn(3, WIDTH, generator=generator).to(fake.PLACE)
            ).square().sum().backward()
            side.close_step(model, optimizer, number)
            rate.mul_(0.5)
    cuda.current_stream().wait_stream(other)


def test_settings_on_the_device_are_those_of_their_step(watched: None) -> None:
    check_smallest(by_a_rate_on_the_device, activations="keep")


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("homes_on_hbm", [False, None])
@pytest.mark.parametrize("program", [units, apart], ids=lambda f: f.__name__)
def test_streams_of_a_model_s_own_are_kept_in_order(
    watched: None, program: Any, homes_on_hbm: bool | None, activations: str
) -> None:
    tuning = Tuning(homes_on_hbm=homes_on_hbm)
    ours = check_smallest(program, activations=activations, tuning=tuning)
    assert ours.counts["fetch"] > 0


def captured(monkeypatch: pytest.MonkeyPatch, stream: Any, call: Callable[[], object]) -> None:
    """Call something while its stream is captured, which must be refused."""
    cuda = fake.cuda()
    with monkeypatch.context() as patch, cuda.stream(stream):
        patch.setattr(cuda, "captures", True)
        with pytest.raises(StateError, match="a CUDA graph of a prepared model"):
            call()


@pytest.mark.parametrize("warm", [True, False], ids=["of the warm-up", "of its own"])
def test_a_graph_of_a_model_is_not_captured(
    watched: None, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """Its replays would read frames that hold other weights by then."""
    cuda = fake.cuda()
    model = hetero.prepare(Units(), device=fake.device(), hbm="16KiB", chunk_bytes=256)
    x, stream = torch.randn(3, WIDTH).to(fake.PLACE), cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with torch.no_grad(), cuda.stream(stream if warm else cuda.current_stream()):
        for _ in range(3):  # as torch's documentation asks for
            right = model(x)
    stream.wait_stream(cuda.current_stream())
    with torch.no_grad():
        for call in (lambda: model(x), lambda: model.units[1](x), model.units[2].main.weight.sum):
            captured(monkeypatch, stream, call)
    cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        assert torch.equal(model(x), right)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_graph_of_a_backward_or_a_step_is_not_captured(
    watched: None, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    cuda = fake.cuda()
    torch.manual_seed(3)
    with paged():
        model, optimizer = hetero.prepare(
            *((made := Units()), adamw(made)),
            device=fake.device(),
            hbm=100_000,
            activations=activations,
        )
    x, here = torch.randn(3, WIDTH).to(fake.PLACE), cuda.current_stream()
    for _ in range(3):
        loss = model(x).square().sum()
        captured(monkeypatch, here, loss.backward)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        captured(monkeypatch, here, optimizer.step)
        optimizer.step()
        optimizer.zero_grad()
    assert hetero.status(model).steps == 3
