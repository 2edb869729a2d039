"""Optimizers of an Accelerator (floor 4)."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hetero.train.update.optimizer import Optimizer


class HeteroOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types
    """A `hetero.Optimizer` that steps once gradients are complete."""

    def __init__(self, optimizer: Optimizer, scaler: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)

    @property
    def step_was_skipped(self) -> bool:
        """Whether loss scaling skipped the last step, hetero's or accelerate's."""
        return bool(self.optimizer.step_was_skipped or super().step_was_skipped)


def is_unprepared(thing: Any) -> bool:
    known = (AcceleratedOptimizer, Optimizer)
    return isinstance(thing, torch.optim.Optimizer) and not isinstance(thing, known)
