"""Ranks that make collectives to be timed: those of a machine, and one of every machine (floor 3).

Gloo moves what lies in RAM, NCCL what lies on CUDA devices, one a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from hetero.device import n_accelerators
from hetero.errors import ConfigError
from hetero.parallel.gathers import all_gather, swap
from hetero.parallel.gloo import local_ranks
from hetero.parallel.launch import Launch

Carrier = Literal["gloo", "nccl"]
TIMEOUT_SECONDS = 120.0
"""For a collective; NCCL connects its devices in the first one."""
Call = Callable[[], None]


class Machines(NamedTuple):
    """Where the ranks of a launch are; those of a machine have numbers in a row."""

    n_machines: int
    ranks_each: int


def machines_of(ranks: Launch) -> Machines:
    """Return where the ranks are; ConfigError on all where machines have unlike numbers of them."""
    told = ranks.each(lambda: min(ranks.size, local_ranks() or ranks.size), "ranks of a machine")
    if len(set(told)) > 1 or ranks.size % told[0]:
        numbers = ", ".join(map(str, sorted(set(told))))
        raise ConfigError(
            f"{ranks.size} ranks, and {numbers} on a machine: a profile is of machines alike",
            advice="start as many ranks on each machine, as torchrun --nproc-per-node does",
        )
    return Machines(ranks.size // told[0], told[0])


def carrier_of(ranks: Launch, machines: Machines, *, on_cuda: bool) -> Carrier:
    """Return what moves bytes: NCCL where every rank has a CUDA device of its own.

    Args:
        on_cuda: whether this rank measures CUDA devices, if there are any.
    """
    has_one = on_cuda and dist.is_nccl_available() and n_accelerators() >= machines.ranks_each
    return "nccl" if all(ranks.each(lambda: has_one, "devices of a machine")) else "gloo"


class Circle:
    """A rank, and others with which it makes collectives.

    Calls block inside torch: looks again and again would take processors from what is timed (two
    ranks on two cores: a quarter of a gather's rate). Those of NCCL return when they are queued.

    Args:
        members: their numbers; a rank that is none of them takes no part.
        place: where the bytes are that they move.
    """

    def __init__(
        self, ranks: Launch, members: range, carrier: Carrier, place: torch.device
    ) -> None:
        allowed = timedelta(seconds=TIMEOUT_SECONDS)
        self.size = len(members)
        self._number = members.index(ranks.rank) if ranks.rank in members else None
        self._place = place
        self._ranks = ranks
        self._group: dist.ProcessGroup = dist.new_group(
            list(members), timeout=allowed, backend=carrier
        )

    def gather(self, n_bytes: int) -> Call:
        """Return a call that fills ``n_bytes`` in place, of which each has an equal part."""
        if self._number is None:
            return nothing
        whole = self._memory(n_bytes)
        mine = whole.view(self.size, -1)[self._number]
        return lambda: self._ranks.finish(all_gather(whole, mine, self._group), "a gather")

    def exchange(self, n_bytes: int) -> Call:
        """Return a call in which each sends an equal part of ``n_bytes`` to every one, as gradients
        go home."""
        if self._number is None:
            return nothing
        sent, found = (list(self._memory(n_bytes).view(self.size, -1)) for _ in range(2))

        def call() -> None:
            self._ranks.finish(swap(found, sent, self._group), "an exchange")

        return call

    def _memory(self, n_bytes: int) -> torch.Tensor:
        return torch.ones(n_bytes, dtype=torch.uint8, device=self._place)  # with all pages present

    def close(self) -> None:
        if self._number is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


def nothing() -> None:
    """Take no part."""


class Circles:
    """Those of a launch; the same ranks open and close them alike.

    Args:
        carrier: what moves bytes between places.
        place: as of `Circle`.
    """

    def __init__(
        self, ranks: Launch, machines: Machines, carrier: Carrier, place: torch.device
    ) -> None:
        n_machines, n_local = machines
        self.ranks = ranks
        self.machines = machines
        self.carrier = carrier
        self.near = Circle(ranks, range(n_local), carrier, place) if n_local > 1 else None
        """Ranks of the first machine; None if it has one."""
        rows = [range(at, ranks.size, n_local) for at in range(n_local if n_machines > 1 else 0)]
        self._far = [Circle(ranks, row, carrier, place) for row in rows]

    @property
    def far(self) -> Circle | None:
        """Ranks of this one's number on every machine; None if there is one machine."""
        return self._far[self.ranks.rank % self.machines.ranks_each] if self._far else None

    @property
    def leading(self) -> Circle | None:
        """Of each machine the first rank, the others take no part; None if there is one machine."""
        return self._far[0] if self._far else None

    def close(self) -> None:
        for circle in (self.near, *self._far):
            if circle is not None:
                circle.close()
