"""Blocks that write to their weights, or show them, while they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.errors import StateError
from tests.equivalence.blocks import Run


class Meddles(nn.Linear):
    """A block that does something to its weights in two of its forwards."""

    turns = (4, 6)
    turn = 0
    keeps = False
    kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        if self.turn in self.turns:
            self.meddle()
        return super().forward(x)

    def meddle(self) -> None:
        """Meddle with the weights."""


class WritesCounted(Meddles):
    """torch counts its writes."""

    def meddle(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.75)


class WritesUncounted(Meddles):
    """It writes some of its weights through ``data``, which torch does not count."""

    def meddle(self) -> None:
        self.weight.data.clamp_(-0.05, 0.05)


class WritesGathered(Meddles):
    """It gathers its own weights inside of its access."""

    def meddle(self) -> None:
        with hetero.gathered(self.weight, write=True), torch.no_grad():
            self.weight.add_(0.01)


class WritesAgainstItsWord(Meddles):
    """It writes weights that it gathered to read, which is undone."""

    def meddle(self) -> None:
        with (
            pytest.raises(StateError, match="the write is undone"),
            hetero.gathered(self.weight),
            torch.no_grad(),
        ):
            self.weight.add_(1.0)


class Shows(Meddles):
    """Views of its weights outlive its access, and are written between two steps."""

    def meddle(self) -> None:
        if self.keeps:
            self.kept = (self.weight.detach(), self.bias.view(2, -1))


BLOCKS: list[type[Meddles]] = [
    *(WritesCounted, WritesUncounted, WritesGathered, WritesAgainstItsWord, Shows)
]


def nine_steps(run: Run) -> None:
    """Train; write through the views that blocks keep, and drop them in the end."""
    blocks: Any = run.model.blocks
    blocks[0].keeps = True
    for number in range(9):
        run.step(number, clip=1.0)
        for block in blocks:
            for view in block.kept:
                view.data[:1].mul_(0.5)
            if number == 7:
                block.kept = ()
