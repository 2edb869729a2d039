"""What held memory at one moment (floor 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hetero.watch.stacks import Line


class MemoryUse(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    BUFFERS = "buffers"
    ACTIVATIONS = "activations"
    WORKSPACES = "workspaces"
    OTHER = "other"


MEANING = {
    MemoryUse.PARAMETERS: "weights of modules and of optimizers",
    MemoryUse.GRADIENTS: "p.grad",
    MemoryUse.STATES: "what optimizers keep of each parameter",
    MemoryUse.BUFFERS: "tensors of modules that are no parameters",
    MemoryUse.ACTIVATIONS: "made in forward or by the loss: held until backward, or temporaries",
    MemoryUse.WORKSPACES: "made in backward or by an optimizer, neither gradient nor state",
    MemoryUse.OTHER: "batches, and what else the program holds",
}
OUTSIDE = "(outside of modules)"


class Holding(NamedTuple):
    """Storages of one use, one module and one place in the program."""

    use: MemoryUse
    module: str
    operation: str
    """That made them; empty where that was not seen."""
    stack: tuple[Line, ...]
    n_bytes: int
    n_tensors: int


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is known to have held memory at one moment."""

    when: str
    step: int
    """Whole steps before it."""
    holdings: tuple[Holding, ...]
    """The largest first."""
    has_stacks: bool
    """Whether each allocation was seen; if not, only what has an owner is here."""

    @property
    def n_bytes(self) -> int:
        return sum(holding.n_bytes for holding in self.holdings)

    def by_use(self) -> dict[MemoryUse, int]:
        """Return the bytes of each use that has some, the largest first."""
        sums: Counter[MemoryUse] = Counter()
        for holding in self.holdings:
            sums[holding.use] += holding.n_bytes
        return {use: n for use, n in sums.most_common() if n}

    def by_module(self) -> list[tuple[str, dict[MemoryUse, int]]]:
        """Return the bytes of each module by use, the largest module first."""
        rows: dict[str, Counter[MemoryUse]] = {}
        for holding in self.holdings:
            rows.setdefault(holding.module, Counter())[holding.use] += holding.n_bytes
        return sorted(
            ((m, dict(row)) for m, row in rows.items()), key=lambda r: -sum(r[1].values())
        )


class HeldStorage(NamedTuple):
    """One storage, before equal ones are added up."""

    use: MemoryUse
    module: str
    operation: str
    stack: tuple[Line, ...]
    n_bytes: int


def picture(when: str, step: int, parts: Iterable[HeldStorage], *, has_stacks: bool) -> Picture:
    """Return the picture of these storages."""
    sizes: Counter[tuple[MemoryUse, str, str, tuple[Line, ...]]] = Counter()
    counts: Counter[tuple[MemoryUse, str, str, tuple[Line, ...]]] = Counter()
    for part in parts:
        if part.n_bytes:
            sizes[part[:4]] += part.n_bytes
            counts[part[:4]] += 1
    rows = (Holding(*key, n, counts[key]) for key, n in sizes.most_common())
    return Picture(when, step, tuple(rows), has_stacks)
