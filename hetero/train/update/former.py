"""Working weights as their masters know them, where they were written since (floor 2).

[Note: what masters follow]  A write that torch does not count (through ``p.data``) makes the
elements that differ their own masters; those that have their bits again at the next update keep
theirs, so weights may make room for their averages meanwhile. Written weights come home earlier, at
moments that depend on budgets. Until the update this remembers what they were. If masters are read
before it (by a state dict, a checkpoint, by other ranks whenever they like), they follow for now,
and what they were is remembered, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Former(NamedTuple):
    """Weights as they were, from element ``start`` of their bucket on."""

    start: int
    weights: torch.Tensor
    low: torch.Tensor | None = None
    """The ``low`` of their masters, if that has followed them already."""

    @property
    def end(self) -> int:
        return self.start + self.weights.numel()

    def part(self, start: int, end: int) -> Former | None:
        """Return its elements in [start, end), if there are any."""
        start, end = max(start, self.start), min(end, self.end)
        if start >= end:
            return None
        place = slice(start - self.start, end - self.start)
        return Former(start, self.weights[place], None if self.low is None else self.low[place])

    def copy(self) -> Former:
        """Return it in memory of its own."""
        low = None if self.low is None else self.low.clone()
        return Former(self.start, self.weights.clone(), low)

    def without(self, start: int, end: int) -> Iterator[Former]:
        """Yield what it has outside of [start, end)."""
        if self.part(start, end) is None:
            yield self
            return
        for rest in (self.part(self.start, start), self.part(end, self.end)):
            if rest is not None:
                yield rest.copy()


class FormerWeights:
    """The former weights of parameters, by index; of an element, the first that it is told."""

    def __init__(self) -> None:
        self._of: dict[int, list[Former]] = {}

    def __iter__(self) -> Iterator[int]:
        """Iterate over the parameters of which it has any, in order."""
        return iter(sorted(self._of))

    def keep(self, index: int, start: int, weights: torch.Tensor) -> None:
        """Remember a parameter's weights from element ``start`` of its bucket on, apart from those
        remembered already, and from those that have no bytes."""
        if weights.is_meta:
            return
        parts = [Former(start, weights)]
        for known in self._of.get(index, ()):
            parts = [
                rest
                for part in parts
                for span in ((part.start, known.start), (known.end, part.end))
                if (rest := part.part(*span)) is not None
            ]
        for part in parts:
            self.put(index, part.copy())

    def put(self, index: int, former: Former) -> None:
        """Remember elements of which it has none."""
        self._of.setdefault(index, []).append(former)

    def to_ram(self, index: int) -> None:
        """Move what it has of a parameter to RAM."""
        for at, known in enumerate(self._of.get(index, ())):
            if known.weights.device.type != "cpu":
                low = None if known.low is None else known.low.cpu()
                self._of[index][at] = Former(known.start, known.weights.cpu(), low)

    def of(self, index: int, start: int, end: int) -> list[Former]:
        """Return what it has of a parameter's elements [start, end)."""
        parts = (known.part(start, end) for known in self._of.get(index, ()))
        return [part for part in parts if part is not None]

    def forget(self, index: int, start: int, end: int) -> None:
        """Forget elements [start, end) of a parameter."""
        rest = [r for known in self._of.get(index, ()) for r in known.without(start, end)]
        if rest:
            self._of[index] = rest
        else:
            self._of.pop(index, None)

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()
