"""Sums over ranks at homes on a device (floor 2).

Addends come up from RAM rank after rank, through a ring of two, and are added on a lane next to
compute: by the operations of `rank_sums`, so the bits do not depend on where a home is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hetero.device import Device, Ticket
from hetero.memory.home import Home
from hetero.memory.link import Link
from hetero.train.gradients.rank_sums import Sum, groups_of, scaled
from hetero.types import Kind, Lane

SLOTS = 2
"""Addends that come up, or are added, at once."""
Take = Callable[[torch.Tensor], object]


class SumSpace(NamedTuple):
    """The bytes of a device that sums there take, next to the homes."""

    slot_bytes: int = 0
    """Of an addend on its way up."""
    partial_bytes: int = 0
    """Of a sum of some ranks, or an addend as it is added."""

    @property
    def n_bytes(self) -> int:
        return SLOTS * (self.slot_bytes + self.partial_bytes)


class DeviceSums:
    """Adds addends that lie in RAM to homes on a device; its workspace is charged already."""

    def __init__(self, device: Device, link: Link, space: SumSpace) -> None:
        self._device = device
        self._link = link
        self._space = space
        self._slab = device.arena(space.n_bytes)
        self._free: list[Ticket | None] = [None] * SLOTS  # the last use of each slot
        self._n_up = 0

    def add(
        self,
        home: Home,
        sums: Iterable[Sum],
        values: Sequence[torch.Tensor],
        start: int,
        *,
        factors: Sequence[float],
        sum_group: int,
        after: Ticket,
        bucket: int,
    ) -> None:
        """Add as `rank_sums.add_up` does, after a ticket; returns when all of it is done."""
        last = after
        for each in sums:
            here = slice(each.run.start - start, each.run.stop - start)
            total = home.part(each.run)
            group_total, addend = (self._partial(n, total) for n in range(2))
            for number, ranks in enumerate(groups_of(each.ranks, sum_group)):
                begins = number == 0 and not each.adds
                into = total if begins else group_total
                for place, rank in enumerate(ranks):
                    take = (
                        partial(begin, into, factors)
                        if place == 0
                        else partial(go_on, into, addend, factors)
                    )
                    last = self._bring(values[rank][here], take, last, bucket)
                if not begins:
                    last = self._on_side(partial(total.add_, group_total), (last,), total)
        self._link.sync(last, kind=Kind.GRAD, bucket=bucket)

    def pass_time(self, n_bytes: int, bucket: int) -> None:
        """Let the time pass in which so many bytes come up."""
        there, here = (self._device.arena(n_bytes).carve(0, n_bytes) for _ in range(2))
        self._link.sync(self._up(here, there, (), bucket), kind=Kind.GRAD, bucket=bucket)

    def _partial(self, number: int, like: torch.Tensor) -> torch.Tensor:
        first = SLOTS * self._space.slot_bytes + number * self._space.partial_bytes
        return self._slab.carve(first, like.nbytes).view(like.dtype)

    def _bring(self, addend: torch.Tensor, take: Take, before: Ticket, bucket: int) -> Ticket:
        """Let an addend come up, and be taken after a ticket; returns the ticket of that."""
        number = self._n_up % SLOTS
        self._n_up += 1
        slot = self._slab.carve(number * self._space.slot_bytes, addend.nbytes)
        free = self._free[number]
        up = self._up(slot, addend.view(torch.uint8), () if free is None else (free,), bucket)
        taken = self._on_side(partial(take, slot.view(addend.dtype)), (up, before), addend)
        self._free[number] = taken
        return taken

    def _on_side(
        self, work: Callable[[], object], after: Iterable[Ticket], addend: torch.Tensor
    ) -> Ticket:
        n_bytes = 3 * addend.nbytes  # it and a total are read, a total is written
        return self._device.on_side_stream(Lane.REDUCE, work, after, n_bytes)

    def _up(
        self, here: torch.Tensor, there: torch.Tensor, after: Iterable[Ticket], bucket: int
    ) -> Ticket:
        return self._link.move(
            *(Lane.H2D, here, there), kind=Kind.GRAD, after=after, bucket=bucket, why="addend"
        )


def begin(total: torch.Tensor, factors: Sequence[float], addend: torch.Tensor) -> None:
    """Let a sum begin with an addend."""
    scaled(total.copy_(addend), factors)


def go_on(
    total: torch.Tensor, room: torch.Tensor, factors: Sequence[float], addend: torch.Tensor
) -> None:
    """Add one more."""
    total.add_(scaled(room.copy_(addend), factors))
