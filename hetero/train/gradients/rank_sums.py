"""Sums over ranks, in the order of ranks (floor 2).

[Note: order of ranks]  Collectives move bytes; every sum is made here. For micro-step i and rank r
of N, a gradient is ((a(0,0)/N + a(0,1)/N) + ...) + a(k-1,N-1)/N, micro-step first: each product by
the number 1/N and each sum is rounded by itself, in fp32 for a weight with a master, else in the
parameter's dtype, and the first addend is a copy. So N ranks give the bits of one rank with N
micro-batches, whatever carries the bytes.

With groups of ranks (`sum_group`), the addends of each group add up in that way to a sum of its
own, in the same dtype, and these add up in the order of groups, micro-step first. That is another
order, and so other bits; the size of groups is a setting, and no matter of where ranks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from hetero.memory.extent import overlap
from hetero.memory.layout import Bucket

SUM_NUMEL = 2**18


class Sum(NamedTuple):
    """A run of this rank's share to which the same ranks add."""

    run: slice
    last: int
    """Position of the last gradient in it."""
    ranks: tuple[int, ...]
    adds: bool
    """Whether it adds to what an earlier pass left at home."""

    def precedes(self, other: Sum) -> bool:
        """Whether the other one is of the next gradient, and of the same ranks."""
        same = (self.ranks, self.adds) == (other.ranks, other.adds)
        return same and other.last == self.last + 1


def sum_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype in which a bucket's gradients add up."""
    return torch.float32 if bucket.has_master else bucket.dtype


def inside(sums: Iterable[Sum], part: slice) -> Iterator[Sum]:
    """Yield the pieces of sums within a part."""
    for each in sums:
        run = overlap(each.run, part)
        if run.start < run.stop:
            yield each._replace(run=run)


def groups_of(ranks: Iterable[int], sum_group: int) -> list[list[int]]:
    """Return ranks by their groups, in their order; a group that has none is left out."""
    return [list(group) for _, group in groupby(ranks, key=lambda rank: rank // sum_group)]


def add_up(
    total: torch.Tensor,
    each: Sum,
    values: Sequence[torch.Tensor],
    start: int,
    factors: Sequence[float],
    sum_group: int = 1,
) -> None:
    """Add the addends of a run, in the order of ranks; see [Note: order of ranks].

    ``values`` of each rank are from element ``start`` of the bucket on.
    """
    first = each.run.start
    for number, ranks in enumerate(groups_of(each.ranks, sum_group)):
        for at in range(first, each.run.stop, SUM_NUMEL):  # an addend stays in the cache
            end = min(at + SUM_NUMEL, each.run.stop)
            here = total[at - first : end - first]
            addends = [values[rank][at - start : end - start] for rank in ranks]
            if number == 0 and not each.adds:
                sum_into(here, addends, factors)
            else:
                here.add_(sum_into(torch.empty_like(here), addends, factors))


def sum_into(
    total: torch.Tensor, addends: Sequence[torch.Tensor], factors: Sequence[float]
) -> torch.Tensor:
    """Return ``total``, made the sum of addends, of which the first is a copy."""
    scaled(total.copy_(addends[0]), factors)
    for addend in addends[1:]:
        total.add_(scaled(addend.to(total.dtype, copy=True), factors))
    return total


def scaled(values: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    for factor in factors:
        values.mul_(factor)
    return values
