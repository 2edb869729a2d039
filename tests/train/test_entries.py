"""Models without a forward of their own, whose parts a program calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.api import engine_of
from hetero.status import status
from hetero.train.model.units import entries_of, find_units
from tests.equivalence.blocks import OneMatrix

D, STEPS = 32, 6


class Stage(nn.Module):
    """A part with a forward of its own, and blocks."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OneMatrix(D) for _ in range(n_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def parts() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Stage(6), Stage(9)])


def test_blocks_are_the_units_of_parts_that_are_alike() -> None:
    names = [unit.name for unit in find_units(parts())]

    assert names == [*(f"0.blocks.{i}" for i in range(6)), *(f"1.blocks.{i}" for i in range(9))]


def test_the_parts_of_a_model_without_a_forward_are_called_in_its_place() -> None:
    model = parts()
    nested = nn.ModuleDict({"a": model, "b": nn.Dropout(), "c": OneMatrix(D)})

    assert entries_of(model) == list(model)
    assert entries_of(nested) == [*model, nested["c"]]
    assert entries_of(model[0]) == [model[0]]


class Attends(nn.Module):
    """Attention that torch computes by other kernels where its weights are plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


def test_the_only_block_of_a_list_is_a_unit() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Attends()])
            self.parts = nn.ModuleDict({"a": OneMatrix(D), "b": nn.Sequential(nn.Linear(D, D))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts["a"](self.blocks[0](x))
            return self.parts["b"](x)

    torch.manual_seed(0)
    plain = Model().eval()
    names = [unit.name for unit in find_units(plain)]
    model = hetero.prepare(copy.deepcopy(plain), device="cpu", hbm=60_000, chunk_bytes=256)

    with torch.no_grad():
        x = torch.randn(3, 5, D)
        assert torch.equal(plain(x), model(x))
    assert names == ["blocks.0", "parts.a", "parts.b"]


def trained(**settings: Any) -> tuple[list[torch.Tensor], Any]:
    """Train two parts, all forwards before all backwards; return weights and what status says."""
    model: Any = parts()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if settings:
        model, optimizer = hetero.prepare(model, optimizer, **settings)
    for step in range(STEPS):
        torch.manual_seed(step)
        made = []
        for _ in range(3):
            sent = model[0](torch.randn(4, D))
            received = sent.detach().requires_grad_()
            made.append((sent, received, model[1](received)))
        for sent, received, output in made:
            output.square().mean().backward()
            sent.backward(received.grad)
        optimizer.step()
        optimizer.zero_grad()
    weights = [value.clone() for value in model.state_dict().values()]
    return weights, (model if settings else None)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "auto"])
def test_parts_that_are_prepared_together_are_planned_as_one_step(activations: str) -> None:
    settings = {"device": "cpu:sim", "hbm": 56 * 1024, "chunk_bytes": 1024}
    theirs, _ = trained()
    mine, model = trained(activations=activations, **settings)
    seen = status(model)

    assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))
    assert seen.evictions >= 3
    assert seen.misses == 0
    assert seen.activation_bytes > 3 * 15 * 4 * D * 4  # what blocks of three passes save
    assert seen.schedule.count("\n") > 80  # accesses of both parts, three times up and down
    assert engine_of(model).setup.steps == STEPS
