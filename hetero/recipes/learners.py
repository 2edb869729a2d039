"""Who makes the passes of a step: a plain loop here, a schedule of stages in `stages` (floor 4)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hetero.api import backward, company_of, no_sync
from hetero.export import materialised
from hetero.recipes.passes import Passes
from hetero.recipes.setup import Size, size_of
from hetero.recipes.task import Task, count
from hetero.recipes.text import Batch


class Learner(Protocol):
    """Makes the passes of a step, and those of an evaluation, with a prepared model."""

    def learn(self, batches: Sequence[Batch], step: int) -> list[torch.Tensor]:
        """Compute the gradients of a step's batches; returns the losses of this rank's, each the
        part of its batch in the mean over all tokens."""

    def told(self, losses: Sequence[torch.Tensor]) -> list[float]:
        """Return the losses of all ranks' batches, in the order of the batches. Collective."""

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """Return the mean loss of each batch. Collective."""

    def size(self) -> Size:
        """Return the size of the whole model. Collective."""

    def digest(self) -> str:
        """Return the SHA-256 of the whole model's weights that train. Collective."""


def weights_of(batches: Sequence[Batch], n_ranks: int) -> list[float | None]:
    """Return what each batch's mean loss is multiplied by, so that all tokens of a step weigh
    alike; None: it stays as it is. Gradients are means over ranks."""
    counts = [count(batch) for batch in batches]
    if len(batches) == 1:
        return [None]
    return [n / sum(counts) * n_ranks for n in counts]


@dataclass
class Loop:
    """A plain loop."""

    task: Task
    place: torch.device
    passes: Passes
    exchange: str
    """"pass" or "step": when ranks exchange gradients."""

    def learn(self, batches: Sequence[Batch], step: int) -> list[torch.Tensor]:
        weights, found = weights_of(batches, self.passes.size), []
        mine = self.passes.mine(batches)
        for number, batch in mine:
            self.passes.begin(step, number)
            kept = self.exchange == "step" and number != mine[-1][0]
            with no_sync(self.task.model) if kept else nullcontext():
                loss, weight = self.task.loss(batch, self.place), weights[number]
                if weight is not None:
                    loss = loss * weight
                backward(loss)  # loss.backward() with fp16's loss scaling
            found.append(loss.detach())
        return found

    def told(self, losses: Sequence[torch.Tensor]) -> list[float]:
        return self.passes.all([loss.item() / self.passes.size for loss in losses])

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        dealt = self.passes.dealt(batches)
        mine = [self.task.loss(batch, self.place).item() for _, batch in self.passes.mine(dealt)]
        return self.passes.all(mine)[: len(batches)]

    def size(self) -> Size:
        return size_of(self.task.model)

    def digest(self) -> str:
        return digest(self.task.model)


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of the weights that train, in the order of the state dict; all ranks of
    the model do so."""
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    gathers = company_of(model).size > 1
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        if name not in frozen:
            sha.update(raw(name, value, gathers=gathers).numpy().data)
    return sha.hexdigest()


def raw(name: str, value: torch.Tensor, *, gathers: bool) -> torch.Tensor:
    """Return the bytes of a value of a state dict, uint8 [bytes]; ``gathers``: all ranks that have
    parts of it do so."""
    flat = materialised(name, value, gathers=gathers).contiguous().view(-1)
    return flat.view(torch.uint8)
