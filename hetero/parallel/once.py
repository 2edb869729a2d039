"""Schedules in whose steps ranks exchange gradients once (floor 3).

A schedule's step makes a backward pass for each micro-batch of each of the rank's stages. All but
the last one keep their gradients on the rank, where they add up; the last one exchanges the sums,
unit by unit, as it makes them. This imports torch's pipelining, which takes a second.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from hetero.parallel.means import RankStage
from hetero.train.model.units import MARK


class Once:
    """Which backward pass of a step is the rank's last one.

    Args:
        stages: of the rank, prepared or not.
        n_passes: backward passes of a step.
    """

    def __init__(self, stages: nn.ModuleList, n_passes: int) -> None:
        self._stages = stages
        self._n_passes = n_passes
        self._n = 0

    def begin(self) -> None:
        """A step begins."""
        self._n = 0

    def backward(self) -> AbstractContextManager[None]:
        """Return a block for the next backward pass."""
        self._n += 1
        engines = (vars(each).get(MARK) for each in (self._stages, *self._stages))
        engine: Any = next((each for each in engines if each is not None), None)
        if engine is None or self._n == self._n_passes:
            return nullcontext()
        kept: AbstractContextManager[None] = engine.no_sync()
        return kept


class OnceStage(RankStage):
    """A stage whose rank exchanges gradients in its last backward pass of a step."""

    def __init__(self, *args: Any, once: Once, **given: Any) -> None:
        super().__init__(*args, **given)
        self._once = once

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._once.begin()

    def backward_one_chunk(self, *args: Any, **given: Any) -> Any:
        with self._once.backward():
            return super().backward_one_chunk(*args, **given)
