"""Stages of a schedule, whose gradients become a mean over micro-batches (floor 3).

torch's schedules divide the gradients of a stage by the number of micro-batches when that stage's
own backward passes are over. The gradient of a weight that another stage of the rank has, too (an
embedding's and a head's, in a V), is whole only after the last of both, and would be divided twice.
So would gradients that wait for an optimizer's step since an earlier one of the schedule.
This imports torch's pipelining, which takes a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage

from hetero.errors import StateError


class Means:
    """The gradients of a rank's stages, in a schedule's step.

    Args:
        stages: of the rank, prepared or not.
        divides: whether the schedule divides them.
    """

    def __init__(self, stages: nn.ModuleList, *, divides: bool) -> None:
        self._stages = stages
        self._divides = divides
        self._n_begun = self._n_ended = 0

    def begin(self) -> None:
        """A step begins."""
        self._n_begun = self._n_ended = 0

    def backward(self) -> None:
        """A backward pass begins; StateError if it adds to what is divided already."""
        self._n_begun += 1
        if self._n_begun > 1 or not self._divides:
            return
        for name, param in self._stages.named_parameters():
            if param.grad is not None and bool(param.grad.any()):
                raise StateError(
                    f"the gradient of {name!r} waits for an optimizer's step, and this step of the"
                    " schedule would divide it by the number of micro-batches a second time",
                    advice="step the optimizer first; or pass scale_grads=False to schedule(), with"
                    " a loss divided by all micro-batches of an optimizer's step",
                )

    def whole(self, stage: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters whose last gradient came with the last one of a stage."""
        self._n_ended += 1
        users = Counter(id(param) for each in self._stages for param in each.parameters())
        yield from (param for param in stage.parameters() if users[id(param)] == 1)
        if self._n_ended == len(self._stages):
            yield from (param for param in self._stages.parameters() if users[id(param)] > 1)


class RankStage(PipelineStage):
    """A stage that divides each gradient of its rank once."""

    def __init__(self, *args: Any, means: Means, **given: Any) -> None:
        super().__init__(*args, **given)
        self._means = means

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._means.begin()

    def backward_one_chunk(self, *args: Any, **given: Any) -> Any:
        self._means.backward()
        return super().backward_one_chunk(*args, **given)

    def scale_grads(self, grad_scale_factor: int) -> None:
        for param in self._means.whole(self.submod):
            if grad_scale_factor != 1 and param.grad is not None:
                param.grad.div_(grad_scale_factor)
