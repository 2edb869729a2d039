"""Stages of a schedule, of which several of a rank may have one weight (floor 3).

torch's schedules divide the gradients of a stage by the number of micro-batches when that stage's
own backward passes are over. The gradient of a weight that another stage of the rank has, too (an
embedding's and a head's, in a V), is whole only after the last of both, and would be divided twice.
This imports torch's pipelining, which takes a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage


class Tied:
    """Which gradients of a rank's ``stages`` are whole, in a schedule's step."""

    def __init__(self, stages: nn.ModuleList) -> None:
        self._stages = stages
        self._n_ended = 0

    def begin(self) -> None:
        """A step begins."""
        self._n_ended = 0

    def whole(self, stage: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters whose last gradient came with the last one of a stage."""
        self._n_ended += 1
        users = Counter(id(param) for each in self._stages for param in each.parameters())
        yield from (param for param in stage.parameters() if users[id(param)] == 1)
        if self._n_ended == len(self._stages):
            yield from (param for param in self._stages.parameters() if users[id(param)] > 1)


class RankStage(PipelineStage):
    """A stage that divides each gradient of its rank once."""

    def __init__(self, *args: Any, tied: Tied, **given: Any) -> None:
        super().__init__(*args, **given)
        self._tied = tied

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._tied.begin()

    def scale_grads(self, grad_scale_factor: int) -> None:
        for param in self._tied.whole(self.submod):
            if grad_scale_factor != 1 and param.grad is not None:
                param.grad.div_(grad_scale_factor)
