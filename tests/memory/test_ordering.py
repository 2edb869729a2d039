"""Who overwrites bytes passes the ticket of their last reader, also where a CPU would not need it.

In one process compute has always happened by the time it is asked; here it has not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetero.device import SimDevice, Ticket
from hetero.events import EventLog
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.nopool import NoPool
from hetero.memory.parcel import ParcelStore
from hetero.types import Lane, Tier
from tests.memory.test_manager_machine import World


class Busy(SimDevice):
    """Compute is never known to be done, and copies tell what they were queued behind."""

    def __init__(self) -> None:
        super().__init__(checked=True, lazy=0.0)
        self.marks: list[Ticket] = []
        self.after: list[tuple[Ticket, ...]] = []

    def mark(self) -> Ticket:
        self.marks.append(super().mark())
        return self.marks[-1]

    def query(self, ticket: Ticket) -> bool:
        return ticket not in self.marks and super().query(ticket)

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        self.after.append(tuple(after))
        return super().copy(lane, dst, src, self.after[-1])


def test_a_fetch_into_frames_that_were_let_go_is_queued_behind_their_last_reader() -> None:
    device = Busy()
    world = World(limit=12, ceiling=12, device=device)
    world.manager.pin((0,), "F")
    n_before = len(device.marks)
    world.manager.unpin((0,))

    world.manager.pin((1,), "F")

    assert 0 not in world.manager.replicas
    (reader,) = device.after[-1]
    assert reader in device.marks[n_before:]


def test_a_chunk_is_filled_anew_behind_the_copy_that_still_reads_it() -> None:
    device = SimDevice(checked=True, lazy=0.0)
    ledger = Ledger({Tier.HOST: 4096})
    store = ParcelStore(
        device,
        Link(device, EventLog()),
        ledger,
        least_bytes=4096,
        pool=NoPool(),
        ram=lambda: 2**40,
        reserved=lambda tier: 0,
        counts_on=False,
    )
    first, second = (torch.full((4096,), value, dtype=torch.uint8) for value in (1, 2))
    parcel = store.flush([first])
    found, ticket = store.fetch(parcel, [0])  # nobody has waited for it
    store.discard(parcel)

    other = store.flush([second])
    store.transfers.finish()

    assert ticket is not None
    store.wait(ticket)
    assert torch.equal(found[0], first)
    again, ticket = store.fetch(other, [0])
    store.wait(ticket)
    assert torch.equal(again[0], second)
