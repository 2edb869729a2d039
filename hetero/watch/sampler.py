"""Which steps are seen allocation by allocation, and the largest of them (floor 4)."""

from __future__ import annotations

import torch

from hetero.train.access.entries import ProgramEntries
from hetero.watch.owners import module_names
from hetero.watch.picture import MemoryUse, Picture
from hetero.watch.program import Program
from hetero.watch.sample import Sample, may_open
from hetero.watch.stacks import Stacks

FIRST_AGAIN = 16  # turns sampled after the first two: this one, and each twice as late
LONGEST = 16  # forwards of a sample, where no optimizer's step ends it
SPARE = 16  # samples of larger batches at any time, and one more in so many steps


def is_due(turn: int) -> bool:
    """Whether a step is sampled that is no larger than those before it.

    The first makes the states, the second has them; later ones show what grows.
    """
    return turn < 2 or (turn >= FIRST_AGAIN and turn & (turn - 1) == 0)


def may_grow(turn: int, n_samples: int) -> bool:
    """Whether another larger batch may be sampled: where each is larger, not all are."""
    return n_samples < SPARE + turn // SPARE


class Sampler:
    """Opens and closes samples."""

    def __init__(self, program: Program, entries: ProgramEntries) -> None:
        self.open: Sample | None = None
        self.peak: Picture | None = None
        """The largest of all samples."""
        self.n_samples = 0
        self.why_not = ""
        """Why the last sample that ended early did."""
        self._program = program
        self._entries = entries
        self._stacks = Stacks()
        self._forwards = 0
        self._ending: Sample | None = None  # over, and its mode is not the innermost one

    def forward(self, step: int, *, begins: bool) -> None:
        """A forward begins, of a step that is sampled if it ``begins`` one."""
        self.close()
        if self.open is not None and self._forwards >= LONGEST:
            self.end()
        if begins and self.open is None and self._ending is None and may_open():
            self._begin(step)
        self._forwards += 1
        self.makes(MemoryUse.ACTIVATIONS)

    def makes(self, use: MemoryUse) -> None:
        """From here on the program makes memory for a use."""
        if self.open is not None:
            self.open.making = use

    def settle(self) -> None:
        """Gradients, or states, have their owners by now."""
        if self.open is not None:
            self.open.settle(self._program.owned())
            self.open.making = MemoryUse.OTHER

    def end(self) -> dict[MemoryUse, int] | None:
        """End the sample that is open; returns what its peak was of."""
        if self.open is None:
            return None
        if self.open.broken:
            self.why_not = self.open.broken
            self.drop()
            return None
        found = self.open.peak(f"at the peak of step {self.open.step}")
        if self.peak is None or found.n_bytes > self.peak.n_bytes:
            self.peak = found
        self.drop()
        return found.by_use()

    def drop(self) -> None:
        """Follow no allocation any more."""
        sample, self.open = self.open, None
        self._entries.path = None
        if sample is not None:
            sample.forget()
            self._ending = sample
        self.close()

    def close(self) -> None:
        """Close the mode of a sample that is over, if it is the innermost one by now."""
        if self._ending is not None and self._ending.close():
            self._ending = None

    def _begin(self, step: int) -> None:
        path = self._entries.path = []
        models = self._program.models()
        place: torch.device = self._program.place()
        self.open = Sample(step, place, self._stacks, path, module_names(models))
        self.open.open(self._program.owned())
        self._forwards = 0
        self.n_samples += 1
