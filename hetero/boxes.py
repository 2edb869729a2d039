"""In which order the elements of a tensor are saved: values alone (floor 0, no torch).

A tensor that ranks divide is cut along some of its dimensions into boxes. It is saved box by box,
so that what a rank has is one run of its elements, whatever the dimensions; a box is in row-major
order, or in another one of its dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

Side = tuple[int, int]
"""From the first element of a dimension to the one after the last."""
Box = tuple[Side, ...]
Order = tuple[int, ...]
"""Of a tensor's elements: its dimensions, slowest first; () is row-major."""
Cuts = tuple[tuple[int, ...], ...]
"""For each dimension, where it is cut, in rising order; () for a tensor that is whole."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the elements of a tensor follow each other."""

    shape: tuple[int, ...]
    order: Order = ()
    cuts: Cuts = ()

    @property
    def whole(self) -> Box:
        """The box that is all of it."""
        return tuple((0, size) for size in self.shape)

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """Yield each box, with the number of its first element."""
        cuts = self.cuts or ((),) * len(self.shape)
        sides = [list(pairwise((0, *at, size))) for at, size in zip(cuts, self.shape, strict=True)]
        first = 0
        for box in product(*sides):
            yield first, box
            first += numel_of(box)

    def first_of(self, box: Box) -> int:
        """Return the number of the first element of one of its boxes; 0 for an empty one."""
        if not numel_of(box):
            return 0
        return next(first for first, each in self.boxes() if each == box)

    def lies(self, box: Box) -> Box:
        """Return the sides of a box as its elements lie, the slowest dimension first."""
        return tuple(box[dim] for dim in self.order) if self.order else box


def numel_of(box: Box) -> int:
    return prod(sizes_of(box))


def sizes_of(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box)


def common(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common; None if that is nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < end for start, end in found) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box is in a tensor that is all of ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


def divided(side: Side, n_parts: int) -> list[Side]:
    """Return the parts of a side among ranks: equal, but the last ones shorter or empty."""
    start, end = side
    step = -(-(end - start) // n_parts)
    return [(min(start + i * step, end), min(start + (i + 1) * step, end)) for i in range(n_parts)]


def cuts_of(shape: Sequence[int], sides: Sequence[Sequence[Side]]) -> Cuts:
    """Return where a tensor is cut whose dimensions consist of these sides."""
    cuts = tuple(
        tuple(sorted({start for start, end in each if start < end} - {0})) for each in sides
    )
    return cuts if any(cuts) and prod(shape) > 0 else ()
