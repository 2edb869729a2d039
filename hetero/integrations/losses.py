"""Losses that Trainer's filter keeps out of its log (floor 4)."""

from __future__ import annotations

import math
import warnings

import torch


class Losses:
    """The losses since the last log that `logging_nan_inf_filter` keeps out of it.

    Trainer logs the mean of the others, which is 0.0 if there are none.
    """

    def __init__(self) -> None:
        self.n_finite = 0
        self.n_filtered = 0
        self._warned = False

    def saw(self, loss: torch.Tensor, step: int) -> None:
        """Count a loss; warn at the first that is filtered."""
        if bool(torch.isfinite(loss)):
            self.n_finite += 1
            return
        self.n_filtered += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the loss of step {step + 1} is {loss.item()}; logging_nan_inf_filter keeps it out"
                " of the logged loss, and hetero/filtered_losses counts it. Lower the learning"
                " rate, or look at the data of that step",
                stacklevel=2,
            )

    def told(self, logs: dict[str, float]) -> dict[str, float]:
        """Return logs with the count of filtered losses, and reset it."""
        found = dict(logs)
        if self.n_filtered:
            found["hetero/filtered_losses"] = self.n_filtered
            if not self.n_finite:
                found["loss"] = math.nan
        self.n_finite = self.n_filtered = 0
        return found
