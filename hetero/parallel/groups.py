"""Exchanges of gloo's, straight to the ranks that keep shares or by way of groups (floor 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hetero.device import Device, map_slab
from hetero.device.comm import Addends, Relay
from hetero.parallel.gathers import CommTicket, swap
from hetero.parallel.waits import Waits

Open = Callable[[Sequence[int]], dist.ProcessGroup]


class Box:
    """Memory for bytes of ranks, as large as the most that were asked for."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._device: Device | None = None
        self._unlock: Callable[[], None] | None = None

    def of(self, n_bytes: int) -> torch.Tensor:
        """Return so much of it; what was returned before is not used any more."""
        if self._memory.numel() < n_bytes:
            self.close()
            slab = map_slab(n_bytes)  # pages of its own: they may be page-locked
            self._memory = slab.carve(0, n_bytes)
            self._unlock = None if self._device is None else self._device.lock(self._memory, slab)
        return self._memory[:n_bytes]

    def lock(self, device: Device) -> None:
        """Page-lock it for copies of a device, from the next memory on."""
        self._device = device

    def close(self) -> None:
        """Undo page-locking; no copy is under way."""
        if self._unlock is not None:
            self._unlock()
        self._unlock = None


class Straight:
    """Every rank sends every other one its part.

    Args:
        group: of all ranks.
        n_shares: rank r has the part of share r % n_shares.
    """

    def __init__(self, group: dist.ProcessGroup, n_shares: int, waits: Waits) -> None:
        self._swap = Swap(group, waits)
        self.inboxes = [self._swap.inbox]
        self._size = dist.get_world_size(group)
        self._n_shares = n_shares

    def begin(self, sent: torch.Tensor, what: str) -> Addends:
        parts = sent.view(self._n_shares, -1)
        return self._swap.begin([parts[r % self._n_shares] for r in range(self._size)], what)


class Grouped:
    """Ranks send addends within groups, and sums between them; see `Relay`.

    Args:
        open: opens a group of ranks; collective.
    """

    def __init__(self, relay: Relay, open: Open, waits: Waits) -> None:
        self._relay = relay
        n_groups, in_group = relay.size // relay.sum_group, relay.sum_group
        inside = [open(range(at * in_group, (at + 1) * in_group)) for at in range(n_groups)]
        across = [open(range(at, relay.size, in_group)) for at in range(in_group)]
        self._inside = Swap(inside[relay.rank // in_group], waits)
        self._across = Swap(across[relay.rank % in_group], waits)
        self.inboxes = [self._inside.inbox, self._across.inbox]

    def begin(self, sent: torch.Tensor, what: str) -> Addends:
        relay = self._relay
        parts = sent.view(relay.n_shares // len(relay.shares), -1)
        return self._inside.begin([parts[rank % len(parts)] for rank in relay.members], what)

    def pass_on(self, sums: torch.Tensor, what: str) -> Addends:
        relay = self._relay
        parts = sums.view(len(relay.shares), -1)
        numbers = (relay.number(rank % relay.n_shares) for rank in relay.keepers)
        return self._across.begin([parts[number] for number in numbers], what)


class Swap:
    """Parts that the ranks of a group send each other, all of one size."""

    def __init__(self, group: dist.ProcessGroup, waits: Waits) -> None:
        self._group = group
        self._waits = waits
        self.inbox = Box()

    def begin(self, parts: list[torch.Tensor], what: str) -> Addends:
        n_bytes = sum(part.numel() for part in parts)
        found = list(self.inbox.of(n_bytes).view(len(parts), -1))
        work = swap(found, parts, self._group)
        return Swapped(self._waits, CommTicket(work, what, (*found, *parts)), found)


class Swapped:
    """What a swap brings."""

    def __init__(self, waits: Waits, ticket: CommTicket, parts: list[torch.Tensor]) -> None:
        self._waits = waits
        self._ticket = ticket
        self._parts = parts

    def wait(self) -> list[torch.Tensor]:
        self._ticket.finish(self._waits)
        return self._parts
