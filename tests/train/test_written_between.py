"""What a program writes after a unit's forward, before its backward computes it again.

Plain torch goes on with what it saved. Ours gives the same bits, or says that it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of
from hetero.errors import StateError
from hetero.plan.activations import RECOMPUTE
from tests.equivalence.harness import same, stay_paged, values

WIDTH = 16
STEPS = 8
FROM = 5  # units are proven by then


class Block(nn.Module):
    """Reads a bias, a buffer, tensors in a list and a condition that autograd saves none of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("wide", torch.zeros(17_000, 1))
        self.more = [torch.zeros(WIDTH)]

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        moved = x - self.mean - self.more[0] + condition + self.wide[0]
        return x + self.down(torch.tanh(self.up(moved)).sin().cos())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, condition)
            self.hidden = x if number == 0 else self.hidden
        return self.head(x)


def blocks(model: Any) -> list[Any]:
    return list(model.blocks)


@torch.no_grad()
def bias(model: Any, x: Tensor, condition: Tensor) -> None:
    for block in blocks(model):
        block.up.bias.add_(0.05)


def data(model: Any, x: Tensor, condition: Tensor) -> None:
    for block in blocks(model):
        block.up.bias.data.mul_(1.1)


def assigned(model: Any, x: Tensor, condition: Tensor) -> None:
    for block in blocks(model):
        block.up.bias.data = block.up.bias.data * 1.1


def loaded(model: Any, x: Tensor, condition: Tensor) -> None:
    biases = {k: v * 1.1 for k, v in model.state_dict().items() if k.endswith("up.bias")}
    model.load_state_dict(biases, strict=False)


def shown(model: Any, x: Tensor, condition: Tensor) -> None:
    for name, value in model.state_dict().items():
        if name.endswith("up.bias"):
            value.mul_(1.1)


def given(model: Any, x: Tensor, condition: Tensor) -> None:
    condition.numpy()[:] = 0.5


def batch(model: Any, x: Tensor, condition: Tensor) -> None:
    x.numpy()[:] = 0.5


def hidden(model: Any, x: Tensor, condition: Tensor) -> None:
    model.hidden.data.mul_(0.5)


def wide(model: Any, x: Tensor, condition: Tensor) -> None:
    for block in blocks(model):
        block.wide.add_(0.1)


def buffer(model: Any, x: Tensor, condition: Tensor) -> None:
    for block in blocks(model):
        block.mean.lerp_(x.mean(0), 0.1)


def buffer_data(model: Any, x: Tensor, condition: Tensor) -> None:
    for block in blocks(model):
        block.mean.data.add_(0.1)


def listed(model: Any, x: Tensor, condition: Tensor) -> None:
    for block in blocks(model):
        block.more[0].add_(0.1)


def read(model: Any, x: Tensor, condition: Tensor) -> None:
    assert all(float(block.up.bias.data.norm()) for block in blocks(model))
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


Write = Callable[[Any, Tensor, Tensor], None]
REFUSED = [bias, data, assigned, loaded, shown, given, batch, hidden, wide]
SAME = [buffer, buffer_data, listed, read]


def started(prepared: bool, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    if prepared:
        given = {"device": "cpu:sim", "hbm": "440KiB", "chunk_bytes": 256, **settings}
        model, optimizer = hetero.prepare(model, optimizer, **given)
        stay_paged(engine_of(model))
    return model, optimizer


def forward(model: Any, number: int, write: Write) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(12, WIDTH, generator=generator)
    condition = torch.zeros(12, WIDTH)
    loss = model(x, condition).square().mean()
    if number >= FROM:
        write(model, x, condition)
    return loss


def step(model: Any, optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def recompute(model: Any) -> None:
    """Let units be computed again whose proofs hold, whatever is faster."""
    activations = engine_of(model).residence.activations
    for unit in list(activations.policies):
        if activations.proofs.holds(unit):
            activations.policies[unit] = RECOMPUTE


@pytest.mark.parametrize("write", SAME, ids=lambda f: f.__name__)
def test_what_is_copied_or_only_read_changes_no_bit(write: Write) -> None:
    plain, ours = started(False), started(True, activations="recompute")
    for number in range(STEPS):
        for model, optimizer in (plain, ours):
            step(model, optimizer, forward(model, number, write))
    same(values(plain[0]), values(ours[0]), "weights")


@pytest.mark.parametrize("activations", ["auto", "recompute"])
def test_what_a_state_dict_wrote_before_the_forward_is_no_write_of_the_unit(
    activations: str,
) -> None:
    plain, ours = started(False), started(True, activations=activations)
    for number in range(STEPS):
        for model, optimizer in (plain, ours):
            for name, value in model.state_dict().items():
                if name.endswith("bias"):
                    value.add_(0.01)
            step(model, optimizer, forward(model, number, read))
        recompute(ours[0])
    same(values(plain[0]), values(ours[0]), "weights")


@pytest.mark.parametrize("write", REFUSED, ids=lambda f: f.__name__)
def test_what_is_gone_is_refused(write: Write) -> None:
    model, optimizer = started(True, activations="recompute")
    for number in range(FROM):
        step(model, optimizer, forward(model, number, write))
    with pytest.raises(StateError, match=r"cannot be computed again: it .* written after"):
        forward(model, FROM, write).backward()


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("write", REFUSED, ids=lambda f: f.__name__)
def test_what_is_gone_is_refused_slice_by_slice(write: Write) -> None:
    model, optimizer = started(True, micro_batch=4)
    for number in range(FROM):
        step(model, optimizer, forward(model, number, write))
    with pytest.raises(StateError, match=r"micro_batch: unit .* written after"):
        forward(model, FROM, write).backward()


@pytest.mark.parametrize("write", [buffer, listed], ids=lambda f: f.__name__)
def test_what_is_copied_changes_no_slice(write: Write) -> None:
    runs = [started(True, micro_batch=4) for _ in range(2)]
    for number in range(STEPS):
        for (model, optimizer), late in zip(runs, (True, False), strict=True):
            loss = forward(model, number, write if late else read)
            loss.backward()
            if not late and number >= FROM:
                generator = torch.Generator().manual_seed(number)
                x = torch.randn(12, WIDTH, generator=generator)
                write(model, x, torch.zeros(12, WIDTH))
            optimizer.step()
            optimizer.zero_grad()
    same(values(runs[0][0]), values(runs[1][0]), "weights")


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("write", REFUSED, ids=lambda f: f.__name__)
def test_what_units_save_is_kept_once_one_was_refused(write: Write) -> None:
    plain, ours = started(False), started(True)
    refused = 0
    for number in range(STEPS):
        loss = forward(ours[0], number, write)
        try:
            step(*ours, loss)
        except StateError as error:
            assert "written after" in str(error) and "activations='auto'" not in str(error)
            ours[1].zero_grad()
            forward(plain[0], number, write)  # it was written once more than it was stepped
            step(*ours, forward(ours[0], number, write))
            refused += 1
        recompute(ours[0])
        step(*plain, forward(plain[0], number, write))
    assert refused == 1
    same(values(plain[0]), values(ours[0]), "weights")
