"""The chunks that activations go down in: few copies, and little of HOST that is unused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import suppress

import pytest
import torch

from hetero.device import SimDevice, Ticket
from hetero.errors import OutOfMemory
from hetero.events import EventLog
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.nopool import NoPool
from hetero.memory.parcel import CHUNKS, MOST_BYTES, SIZES, Parcel, ParcelStore
from hetero.types import Kind, Lane, Tier


class Counting(SimDevice):
    """Counts the copies that are asked of it."""

    def __init__(self) -> None:
        super().__init__(checked=False, lazy=0.0)
        self.n_copies = 0

    def copy(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket] = ()
    ) -> Ticket:
        self.n_copies += 1
        return super().copy(lane, dst, src, after)


class World:
    """A store of parcels on a device that counts, with as much of HOST as it may have."""

    def __init__(self, least_bytes: int, host_bytes: int = 2**40) -> None:
        self.device = Counting()
        self.ledger = Ledger({Tier.HOST: host_bytes})
        self.store = ParcelStore(
            self.device,
            Link(self.device, EventLog()),
            self.ledger,
            least_bytes=least_bytes,
            pool=NoPool(),
            ram=lambda: 2**40,
            reserved=lambda tier: 0,
            counts_on=False,
        )
        self.parcels: list[Parcel] = []

    def flush(self, n_bytes: int) -> tuple[int, int]:
        """Send ``n_bytes`` down; returns the copies, and the bytes of HOST they took."""
        n_before, before = self.device.n_copies, self.ledger.used(Tier.HOST, Kind.ACTIVATION)
        self.parcels.append(self.store.flush([torch.zeros(n_bytes, dtype=torch.uint8)]))
        self.store.transfers.finish()
        taken = self.ledger.used(Tier.HOST, Kind.ACTIVATION) - before
        return self.device.n_copies - n_before, taken


@pytest.mark.parametrize("n_bytes", [2**20, 3 * 2**20 + 64, 10**6])
def test_a_large_parcel_takes_few_copies_where_chunks_of_parameters_are_tiny(n_bytes: int) -> None:
    world = World(least_bytes=64)
    for _ in range(3):  # parcels of a step are alike
        n_copies, taken = world.flush(n_bytes)
        assert n_copies <= CHUNKS + 1
        assert taken <= n_bytes * (CHUNKS + 1) / CHUNKS


def test_a_parcel_that_is_much_smaller_than_the_first_leaves_a_part_of_one_chunk() -> None:
    world = World(least_bytes=64)
    world.flush(2**20)
    assert world.flush(100) == (1, 2**20 // CHUNKS)


def test_chunks_are_no_smaller_than_those_of_parameters() -> None:
    assert World(least_bytes=2**18).flush(2**20) == (4, 2**20)


def test_chunks_end_where_a_larger_one_makes_no_link_faster() -> None:
    n_bytes = 32 * MOST_BYTES
    assert World(least_bytes=2**18).flush(n_bytes) == (32, n_bytes)


@pytest.mark.parametrize("first", [64, 64 * 2**16])
def test_chunks_follow_the_parcels_of_a_whole_step(first: int) -> None:
    """A first unit may save next to nothing (a stem), or most of all (of a large image)."""
    sizes, world = [first, *[2**16] * 40], World(least_bytes=64)
    for _ in range(2):
        done = [world.flush(n_bytes) for n_bytes in sizes]
        taken = world.ledger.used(Tier.HOST, Kind.ACTIVATION)
        for parcel in world.parcels:
            world.store.discard(parcel)
        world.parcels.clear()

    assert sum(n_copies for n_copies, _ in done) <= (CHUNKS + 1) * len(sizes)
    assert taken <= sum(sizes) * (CHUNKS + 1) / CHUNKS
    for n_bytes in sizes:  # and stay
        world.flush(n_bytes)
    assert world.ledger.used(Tier.HOST, Kind.ACTIVATION) == taken


def test_long_and_short_steps_in_turn_do_not_move_chunks_for_ever() -> None:
    world, taken = World(least_bytes=64), []
    for step in range(20):
        world.flush([2**20, 2**14][step % 2])
        taken.append(world.ledger.used(Tier.HOST, Kind.ACTIVATION))
        world.store.discard(world.parcels.pop())

    assert len(set(taken[SIZES:])) == 1


def test_what_finds_no_room_is_let_go_of_at_once() -> None:
    """Not when cycles are collected: until then it would stay on the device."""
    world = World(least_bytes=64, host_bytes=2**20)
    source = torch.zeros(2**21, dtype=torch.uint8)
    gone = weakref.ref(source.untyped_storage())
    gc.disable()
    try:
        with suppress(OutOfMemory):
            world.store.flush([source])
        del source
        assert gone() is None
    finally:
        gc.enable()
    assert world.ledger.used(Tier.HOST, Kind.ACTIVATION) == 2**20  # kept for a smaller one
