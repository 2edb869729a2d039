"""The steps of a program, as they ended (floor 4)."""

from __future__ import annotations

import time
from typing import NamedTuple

import psutil
import torch

from hetero.device import allocated
from hetero.watch.picture import MemoryUse

MOST_ROWS = 512


class StepRow(NamedTuple):
    """A step."""

    step: int
    seconds: float
    live_bytes: int
    """On the device, as its allocator counts; the RAM of the process on a CPU."""
    batch_bytes: int
    """Of the tensors that its models were called with."""
    uses: dict[MemoryUse, int] | None
    """At its peak, if each of its allocations was seen."""


class StepRows:
    """Counts steps, and keeps some rows of a long run."""

    def __init__(self) -> None:
        self.count = 0
        """Whole steps: of an optimizer, after a forward or a backward."""
        self.rows: list[StepRow] = []
        self.computes = False
        """Whether the program computed since the last step."""
        self.batch_bytes = 0
        self._began = time.monotonic()
        self._every = 1  # of so many steps, one has a row
        self._process = psutil.Process()

    def end(self, place: torch.device, uses: dict[MemoryUse, int] | None) -> None:
        """End a step."""
        now = time.monotonic()
        if uses is not None or self.count % self._every == 0:
            seconds = now - self._began
            row = StepRow(self.count, seconds, self._live(place), self.batch_bytes, uses)
            self.rows.append(row)
        if len(self.rows) > MOST_ROWS:
            self._every *= 2
            self.rows = [r for r in self.rows if r.uses is not None or r.step % self._every == 0]
        self.count += 1
        self.computes, self.batch_bytes, self._began = False, 0, now

    def _live(self, place: torch.device) -> int:
        counts = allocated(place)
        return int(self._process.memory_info().rss) if counts is None else counts.now_bytes
