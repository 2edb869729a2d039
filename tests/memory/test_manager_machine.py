"""The chunk manager against a plain dictionary, over the device that is late on purpose.

[Note: who may write]  As in the runtime, a write under a pin is reported with `manager.write`, and
a write through a view that escaped its pin (a lease) is not reported by anybody.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hetero.device import POISON, SimDevice, Slab
from hetero.errors import BudgetError, OutOfMemory, StateError, StorageError, TransferError
from hetero.events import EventLog
from hetero.memory.arena import FEW, SHELLS
from hetero.memory.home import Home
from hetero.memory.homecopy import HomeEvents
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import (
    Bucket,
    Layout,
    ParamSpec,
    build_layout,
    contiguous_stride,
)
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.memory.manager import PARAM, ChunkManager
from hetero.types import CopyState, Kind, Lane, Tier

CHUNK_BYTES = 64  # 16 elements: a frame of the 1-byte class is 16 bytes
FRAME_BYTES = CHUNK_BYTES // 4
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
UNITS: list[list[tuple[tuple[int, ...], torch.dtype]]] = [
    [((5, 5), F32), ((7,), F32)],  # 3 chunks, 12 frames
    [((40,), F32)],  # 3 chunks, 12 frames
    [((30,), BF16), ((0,), BF16), ((20,), BF16)],  # 4 chunks, 8 frames
    [((16,), F32)],  # 1 chunk, 4 frames
    [((9, 11), F32)],  # 7 chunks, 28 frames: the largest
    [((), BF16)],  # 1 chunk, 2 frames
    [((33,), F64)],  # 3 chunks, 24 frames
]
BUCKETS = range(len(UNITS))
LARGEST = 28
ALL = 90


def make_layout() -> Layout:
    specs = [
        ParamSpec(f"u{unit}.p{i}", unit, shape, contiguous_stride(shape), dtype, True)
        for unit, params in enumerate(UNITS)
        for i, (shape, dtype) in enumerate(params)
    ]
    return build_layout(specs, [f"u{unit}" for unit in BUCKETS], CHUNK_BYTES)


def flat_of(home: Home) -> torch.Tensor:
    """Return all elements of a home."""
    return home.part(slice(None))


NO_EVENTS = HomeEvents(
    writing=lambda bucket_id: None,
    overwriting=lambda bucket, start, end: lambda: None,
    written=lambda segment: None,
    wrote=lambda bucket, before: None,
    saving=lambda bucket_id: False,
    updated=lambda bucket: None,
)


class World:
    """A manager with everything below it, and the dictionary of what every bucket should hold."""

    def __init__(
        self,
        *,
        limit: int = ALL,
        ceiling: int = ALL,
        budget: int = ALL,
        seed: int = 0,
        lazy: float = 0.25,
        next_use: Callable[[int], float] = lambda bucket: 0.0,
        device: SimDevice | None = None,
        events: HomeEvents = NO_EVENTS,
    ) -> None:
        self.layout = make_layout()
        self.device = device or SimDevice(seed=seed, checked=True, lazy=lazy)
        self.budget = budget * FRAME_BYTES
        self.ledger = Ledger({Tier.HBM: self.budget})
        self.log = EventLog()
        self.link = Link(self.device, self.log)
        self.store = HomeStore(self.device, self.ledger)
        self.model: dict[int, torch.Tensor] = {}
        self._last = 0
        for bucket in self.layout.buckets:
            home = self.store.get(Kind.PARAM, PARAM, bucket)
            self.model[bucket.id] = torch.zeros(bucket.segments[-1].end, dtype=bucket.dtype)
            for segment in bucket.segments:
                self.fresh(flat_of(home), bucket.id, segment.offset, segment.end)
        self.manager = ChunkManager(
            self.layout,
            device=self.device,
            ledger=self.ledger,
            link=self.link,
            store=self.store,
            events=events,
            limit=limit,
            ceiling=ceiling,
            next_use=next_use,
        )

    def fresh(self, flat: torch.Tensor, bucket: int, start: int, end: int) -> None:
        """Write numbers not seen before into elements of a bucket, and into the model."""
        self._last += 1
        values = (torch.arange(end - start) % 64 + 64 * (self._last % 4) + 1).to(flat.dtype)
        flat[start:end] = values * 2.0 ** (self._last % 100)
        self.model[bucket][start:end] = values * 2.0 ** (self._last % 100)

    def right(
        self, flat: torch.Tensor, bucket: int, start: int = 0, end: int | None = None
    ) -> bool:
        """Return whether elements [start, end) of a bucket's bytes are what they should be."""
        end = len(self.model[bucket]) if end is None else end
        return torch.equal(flat[start:end], self.model[bucket][start:end])

    def visit(self, *ids: int) -> None:
        """Pin, see the right values, unpin."""
        self.manager.pin(ids, "F")
        assert all(self.right(self.manager.replicas[b].flat, b) for b in ids)
        self.manager.unpin(ids)

    def scribble(self, bucket: int, start: int, end: int) -> None:
        """Write under a pin, as a user does under no_grad."""
        self.manager.pin((bucket,), "F")
        self.fresh(self.manager.replicas[bucket].flat, bucket, start, end)
        self.manager.write(bucket, start, end)
        self.manager.unpin((bucket,))

    def home_is_right(self, bucket: int) -> bool:
        home = self.manager.home(bucket)
        self.device.check_read(flat_of(home).view(torch.uint8))
        return self.right(flat_of(home), bucket)

    def state(self, bucket: int, tier: Tier = Tier.HBM) -> CopyState:
        return self.manager.table.state(bucket, tier)


def view_of(world: World, bucket: int, position: int) -> torch.Tensor:
    """Return a segment's own tensor at home."""
    return world.manager.home(bucket).view(world.layout.buckets[bucket].segments[position])


class Lease(NamedTuple):
    """A view that somebody keeps: elements [start, start + len(view)) of a bucket."""

    bucket: int
    start: int
    view: torch.Tensor


buckets = st.sampled_from(list(BUCKETS))


class ManagerMachine(RuleBasedStateMachine):
    """Random programs over `World`; what must hold always is in the invariants."""

    @initialize(
        seed=st.integers(0, 2**16),
        lazy=st.sampled_from((0.0, 0.2, 0.7)),
        limit=st.integers(LARGEST, 60),
        spare=st.integers(0, 20),
        more=st.sampled_from((0, 20)),
        uses=st.lists(st.sampled_from((1.0, 2.0, 5.0, math.inf)), min_size=7, max_size=7),
    )
    def start(
        self, seed: int, lazy: float, limit: int, spare: int, more: int, uses: list[float]
    ) -> None:
        self.uses = uses
        self.world = World(
            limit=limit,
            ceiling=limit + spare,
            budget=limit + spare + more,
            seed=seed,
            lazy=lazy,
            next_use=lambda bucket: self.uses[bucket],
        )
        self.manager = self.world.manager
        self.pins: Counter[int] = Counter()
        self.leases: list[Lease] = []
        self.escaped: set[int] = set()  # buckets whose leases outlived an access
        self.places: dict[int, tuple[int, int, int]] = {}

    # -- what the machine believes ---------------------------------------------------------------

    def pinned(self) -> list[int]:
        return sorted(b for b, n in self.pins.items() if n)

    def leased(self) -> set[int]:
        return {lease.bucket for lease in self.leases}

    def held(self) -> set[int]:
        return self.leased() | set(self.pinned())

    def apart(self) -> set[int]:
        return {b for b, replica in self.manager.replicas.items() if replica.is_apart}

    def loose(self) -> list[int]:
        return sorted(set(self.manager.replicas) - self.held())

    def granules(self, bucket: int) -> int:
        return self.world.layout.buckets[bucket].granules

    def segment_range(self, data: st.DataObject, bucket: int) -> tuple[int, int]:
        """Draw a run of elements inside one segment that has any."""
        segments = [s for s in self.world.layout.buckets[bucket].segments if s.spec.numel]
        segment = data.draw(st.sampled_from(segments))
        start = data.draw(st.integers(segment.offset, segment.end - 1))
        return start, data.draw(st.integers(start + 1, segment.end))

    # -- rules -----------------------------------------------------------------------------------

    def spare(self) -> int:
        return self.world.budget // FRAME_BYTES - self.manager.arena.limit

    @rule(ids=st.lists(buckets, min_size=1, max_size=3, unique=True), idle=st.booleans())
    def pin(self, ids: list[int], idle: bool) -> None:
        held, need = self.held(), sum(self.granules(b) for b in ids)
        try:
            self.manager.pin(ids, "F", self.spare if idle else lambda: 0)
        except BudgetError as error:
            assert held or need > self.manager.arena.ceiling
            assert error.tier == "HBM"
            assert error.advice
            return
        for bucket in ids:
            self.pins[bucket] += 1
            replica = self.manager.replicas[bucket]
            here = (replica.start, replica.cdata, replica.bytes.data_ptr())
            assert self.places.setdefault(bucket, here) == here

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.sampled_from(self.pinned())))

    @precondition(lambda self: len(self.pinned()) > 2)
    @rule()
    def unpin_all(self) -> None:
        for bucket in list(self.pins.elements()):
            self.let_go(bucket)

    def let_go(self, bucket: int) -> None:
        self.manager.unpin((bucket,))
        self.pins[bucket] -= 1
        if not self.pins[bucket] and bucket in self.leased():
            self.escaped.add(bucket)

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def write_under_a_pin(self, data: st.DataObject) -> None:
        bucket = data.draw(st.sampled_from(self.pinned()))
        start, end = self.segment_range(data, bucket)
        self.world.fresh(self.manager.replicas[bucket].flat, bucket, start, end)
        self.manager.write(bucket, start, end)

    @precondition(lambda self: self.pinned() and len(self.leases) < 3)
    @rule(data=st.data())
    def take_a_lease(self, data: st.DataObject) -> None:
        bucket = data.draw(st.sampled_from(self.pinned()))
        start, end = self.segment_range(data, bucket)
        view = self.manager.replicas[bucket].flat[start:end]
        self.leases.append(Lease(bucket, start, view))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def drop_a_lease(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        bucket = self.leases.pop(at).bucket
        if bucket not in self.leased():
            self.escaped.discard(bucket)

    @precondition(lambda self: self.escaped)
    @rule(data=st.data())
    def write_through_a_lease(self, data: st.DataObject) -> None:
        usable = [i for i, lease in enumerate(self.leases) if lease.bucket in self.escaped]
        lease = self.leases[data.draw(st.sampled_from(usable))]  # a drawn view would live on
        flat = self.manager.replicas[lease.bucket].flat
        self.world.fresh(flat, lease.bucket, lease.start, lease.start + len(lease.view))

    @rule(bucket=buckets, start=st.integers(0, 60))
    def prefetch(self, bucket: int, start: int) -> None:
        end = start + self.granules(bucket)
        frames = self.manager.arena.frames
        there = {r.owner for r in frames.runs if r.start < end and start < r.end}
        before = set(self.manager.replicas)
        possible = (
            bucket not in before
            and end <= self.manager.arena.frames.limit
            and not there & self.held()
        )
        assert self.manager.prefetch(bucket, start) is possible
        after = (before - there) | {bucket} if possible else before
        assert set(self.manager.replicas) == after
        if possible:
            assert self.manager.replicas[bucket].start == start

    @precondition(lambda self: self.loose())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        bucket = data.draw(st.sampled_from(self.loose()))
        self.manager.evict(bucket)
        assert bucket not in self.manager.replicas

    @rule(bucket=buckets)
    def settle(self, bucket: int) -> None:
        resident = bucket in self.manager.replicas
        self.manager.flush_and_wait(bucket)
        assert (bucket in self.manager.replicas) == resident
        assert self.world.home_is_right(bucket)
        assert self.world.state(bucket, Tier.HOST) is CopyState.CLEAN
        assert self.world.state(bucket) in (CopyState.CLEAN, CopyState.ABSENT)

    @rule(bucket=buckets, data=st.data())
    def renew(self, bucket: int, data: st.DataObject) -> None:
        self.manager.flush_and_wait(bucket)
        start, end = self.segment_range(data, bucket)
        self.world.fresh(flat_of(self.manager.home(bucket)), bucket, start, end)
        self.manager.refresh(bucket)
        assert (bucket in self.manager.replicas) == (bucket in self.held())

    @precondition(lambda self: self.loose())
    @rule(data=st.data())
    def write_and_give_up(self, data: st.DataObject) -> None:
        bucket = data.draw(st.sampled_from(self.loose()))
        start, end = self.segment_range(data, bucket)
        self.manager.flush_and_wait(bucket)
        self.manager.pin((bucket,), "F")
        self.manager.replicas[bucket].flat[start:end] = -1.0
        self.manager.write(bucket, start, end)
        self.manager.unpin((bucket,))
        self.manager.discard_writes(bucket)
        assert bucket not in self.manager.replicas

    @rule(limit=st.integers(LARGEST, 100))
    def resize(self, limit: int) -> None:
        limit = min(limit, self.world.budget // FRAME_BYTES)
        before = (
            self.manager.arena.frames.limit,
            self.manager.arena.ceiling,
            set(self.manager.replicas),
        )
        held, apart = self.held(), self.apart() & self.held()
        room = limit - sum(self.granules(b) for b in apart)
        may = held == apart and room >= 0
        assert self.manager.resize(limit) is may
        after = (
            self.manager.arena.frames.limit,
            self.manager.arena.ceiling,
            set(self.manager.replicas),
        )
        assert after == ((room, room, apart) if may else before)

    @rule()
    def shed(self) -> None:
        before = set(self.manager.replicas)
        self.manager.evict_all(lambda replica: replica.is_apart)
        assert self.apart() <= self.held()
        assert before - set(self.manager.replicas) <= before - self.held()

    @rule(less=st.integers(0, 40))
    def lower(self, less: int) -> None:
        limit = max(self.manager.arena.limit - less, LARGEST)
        if limit <= self.manager.arena.limit and self.manager.shrink(limit):
            assert self.manager.arena.limit <= limit
            assert self.manager.arena.ceiling == self.manager.arena.frames.limit

    @rule(bucket=buckets, use=st.sampled_from((1.0, 3.0, math.inf)))
    def change_the_plan(self, bucket: int, use: float) -> None:
        self.uses[bucket] = use

    @rule()
    def drain(self) -> None:
        self.manager.close()
        assert all(self.world.home_is_right(b) for b in BUCKETS)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.leases.clear()
        for bucket in list(self.pins.elements()):
            self.let_go(bucket)
        assert self.manager.resize(LARGEST)
        assert self.world.ledger.used(Tier.HBM) == 0
        assert all(self.world.home_is_right(b) for b in BUCKETS)

    # -- invariants ------------------------------------------------------------------------------

    @invariant()
    def frames_are_charged_once_and_within_the_budget(self) -> None:
        used = self.world.ledger.used(Tier.HBM)
        assert used == FRAME_BYTES * sum(self.granules(b) for b in self.manager.replicas)
        assert used <= self.world.budget

    @invariant()
    def runs_are_disjoint_inside_the_limit_and_where_the_replicas_are(self) -> None:
        frames, end = self.manager.arena.frames, 0
        assert frames.limit <= self.manager.arena.ceiling
        for run in frames.runs:
            assert end <= run.start
            end = run.end
            assert self.manager.replicas[run.owner].start == run.start
            assert self.granules(run.owner) == run.length
        assert end <= frames.limit
        inside = set(self.manager.replicas) - self.apart()
        replicas = [self.manager.replicas[bucket] for bucket in inside]
        assert len({r.bytes.data_ptr() - r.start * FRAME_BYTES for r in replicas}) <= 1  # one arena
        assert {run.owner for run in frames.runs} == inside

    @invariant()
    def frames_apart_are_counted_and_have_memory_of_their_own(self) -> None:
        apart = [self.manager.replicas[bucket] for bucket in self.apart()]
        n_apart = sum(replica.bucket.granules for replica in apart)
        assert self.manager.arena.limit == self.manager.arena.frames.limit + n_apart
        assert len({r.bytes.untyped_storage().data_ptr() for r in apart}) == len(apart)
        assert all(self.manager.arena.by_storage[r.cdata] is r for r in apart)

    @invariant()
    def as_many_views_are_kept_as_are_found_by_their_storage(self) -> None:
        manager = self.manager
        assert len(manager.arena._shells) <= SHELLS * len(BUCKETS)
        kept = {*manager.arena._shells.values(), *(manager.replicas[b] for b in self.apart())}
        assert {r.cdata: r for r in kept} == manager.arena.by_storage
        assert kept >= set(manager.replicas.values())

    @invariant()
    def what_is_held_never_moves(self) -> None:
        for bucket in self.held():
            replica = self.manager.replicas[bucket]
            here = (replica.start, replica.cdata, replica.bytes.data_ptr())
            assert self.places[bucket] == here
        for bucket in set(self.places) - self.held():
            del self.places[bucket]

    @invariant()
    def pins_and_leases_are_counted(self) -> None:
        for bucket, replica in self.manager.replicas.items():
            assert replica.pins == self.pins[bucket]
            assert replica.leased == (bucket in self.leased())

    @invariant()
    def what_can_be_seen_is_right(self) -> None:
        for bucket in self.pinned():
            replica = self.manager.replicas[bucket]
            self.world.device.check_read(replica.bytes)
            assert self.world.right(replica.flat, bucket)
        for bucket, start, view in self.leases:
            self.world.device.check_read(view)
            assert torch.equal(view, self.world.model[bucket][start : start + len(view)])

    @invariant()
    def a_copy_is_absent_exactly_when_it_is_not_resident(self) -> None:
        for bucket in BUCKETS:
            state, replica = self.world.state(bucket), self.manager.replicas.get(bucket)
            assert self.world.state(bucket, Tier.HOST) is CopyState.CLEAN
            if replica is None:
                assert state is CopyState.ABSENT
            elif replica.ready is not None:
                assert state is CopyState.FILLING
            else:
                assert state is (CopyState.DIRTY if replica.dirty else CopyState.CLEAN)

    @invariant()
    def every_chunk_has_a_copy_that_is_right(self) -> None:
        for bucket in self.world.layout.buckets:
            replica, home = self.manager.replicas.get(bucket.id), self.manager.home(bucket.id)
            size, last = bucket.chunk_numel, bucket.segments[-1].end
            if replica is not None and replica.ready is None:
                assert self.world.right(replica.flat, bucket.id)
            if replica is not None and replica.exposed:
                continue
            self.world.device.check_read(flat_of(home).view(torch.uint8))
            dirty = set() if replica is None else replica.dirty
            for i, chunk in enumerate(bucket.chunks):
                if chunk not in dirty:
                    assert self.world.right(
                        flat_of(home), bucket.id, i * size, min((i + 1) * size, last)
                    )


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=40
)


# -- one idea each -------------------------------------------------------------------------------


def test_the_machines_layout_has_straddling_tensors_and_many_chunks() -> None:
    layout = make_layout()

    assert [bucket.granules for bucket in layout.buckets] == [12, 12, 8, 4, 28, 2, 24]
    assert sum(bucket.granules for bucket in layout.buckets) == ALL
    assert layout.n_chunks == 22


def test_views_have_the_shape_and_the_values_of_their_parameters() -> None:
    world = World()
    world.manager.pin((0,), "F")
    replica = world.manager.replicas[0]

    assert [tuple(view.shape) for view in replica.views] == [(5, 5), (7,)]
    assert torch.equal(replica.views[0].flatten(), world.model[0][:25])
    assert torch.equal(replica.views[1], world.model[0][32:39])


def test_evicting_a_clean_parameter_moves_no_bytes() -> None:
    world = World()
    world.visit(0)
    before = world.link.n_bytes.copy()
    world.manager.evict(0)

    assert world.link.n_bytes == before
    assert world.link.n_bytes[Lane.D2H] == 0


def test_evicting_a_written_parameter_flushes_only_its_dirty_chunks() -> None:
    world = World()
    world.scribble(4, 20, 30)  # one chunk of seven
    world.manager.evict(4)

    assert world.link.n_bytes[Lane.D2H] == CHUNK_BYTES
    assert world.home_is_right(4)


def test_neighbouring_dirty_chunks_go_home_in_one_copy() -> None:
    world = World()
    world.scribble(4, 0, 33)  # chunks 0, 1 and 2
    world.scribble(4, 98, 99)  # chunk 6
    world.manager.flush_and_wait(4)
    flushes = [event.n_bytes for event in world.log if event.what == "move" and event.lane == "d2h"]

    assert flushes == [3 * CHUNK_BYTES, CHUNK_BYTES]


def test_settling_twice_flushes_once() -> None:
    world = World()
    world.scribble(0, 3, 4)
    world.manager.flush_and_wait(0)
    world.manager.flush_and_wait(0)

    assert world.manager.counts["flush"] == 1
    assert 0 in world.manager.replicas


def test_a_prefetched_bucket_is_a_hit() -> None:
    world = World()
    assert world.manager.prefetch(1, 5)
    world.visit(1)

    assert (world.manager.counts["hit"], world.manager.counts["miss"]) == (1, 0)


def test_a_bucket_that_nobody_prefetched_is_a_miss() -> None:
    world = World()
    world.visit(1)

    assert (world.manager.counts["hit"], world.manager.counts["miss"]) == (0, 1)


def test_a_prefetch_is_not_waited_for_before_its_pin() -> None:
    world = World(lazy=0.0)
    world.manager.prefetch(1, 0)
    replica = world.manager.replicas[1]

    assert replica.bytes[: 4 * 40].eq(POISON).all()
    with pytest.raises(TransferError, match="read before ready"):
        world.device.check_read(replica.bytes)


def test_frames_that_were_let_go_are_poisoned() -> None:
    world = World()
    world.visit(1)
    piece = world.manager.replicas[1].bytes
    world.manager.evict(1)

    assert piece.eq(POISON).all()


def test_the_next_use_furthest_away_is_evicted_first() -> None:
    world = World(limit=28, ceiling=28, next_use=lambda b: {0: 3.0, 1: 9.0}.get(b, 0.0))
    world.visit(0)
    world.visit(1)
    world.visit(2)

    assert set(world.manager.replicas) == {0, 2}


def test_without_a_plan_the_least_recently_used_is_evicted_first() -> None:
    world = World(limit=28, ceiling=28)
    for bucket in (0, 1, 0, 2):
        world.visit(bucket)

    assert set(world.manager.replicas) == {0, 2}


def test_views_at_places_that_were_left_long_ago_are_let_go() -> None:
    world = World()
    for start in range(4 * SHELLS * len(BUCKETS)):
        bucket = (3, 5)[start % 2]
        assert world.manager.prefetch(bucket, start % (ALL - 4))
        world.visit(bucket)
        world.manager.evict(bucket)
    world.visit(0)

    assert (
        len(world.manager.arena._shells)
        == len(world.manager.arena.by_storage)
        == SHELLS * len(BUCKETS)
    )
    world.manager.prefetch(3, 30)
    for start in range(4 * SHELLS * len(BUCKETS)):
        world.manager.prefetch(5, start % 30)
        world.manager.evict(5)
    world.visit(3, 0)  # they are resident all the while: what locates their bytes is there


def test_a_view_of_a_place_that_was_let_go_is_made_anew_with_the_right_values() -> None:
    world = World()
    world.visit(3)
    gone = world.manager.replicas[3]
    world.manager.evict(3)
    world.manager.prefetch(0, 30)
    for start in range(SHELLS * len(BUCKETS)):
        world.manager.prefetch(5, start % 28)
        world.manager.evict(5)
        world.manager.prefetch(6, 60 - start)
        world.manager.evict(6)
    world.manager.prefetch(3, gone.start)
    world.visit(3)

    assert world.manager.replicas[3] is not gone
    assert gone.cdata not in world.manager.arena.by_storage
    world.scribble(3, 2, 9)
    world.visit(3)


def loop(n_buckets: int, n_frames: int, laps: int) -> float:
    """Return the misses of an access, in loops over buckets that are used in this order next."""
    specs = [ParamSpec(f"u{i}.p", i, (16,), (1,), F32, True) for i in range(n_buckets)]
    layout = build_layout(specs, [f"u{i}" for i in range(n_buckets)], CHUNK_BYTES)
    device, log = SimDevice(), EventLog()
    ledger = Ledger({Tier.HBM: None})
    store = HomeStore(device, ledger)
    for bucket in layout.buckets:
        store.get(Kind.PARAM, PARAM, bucket)
    limit = 4 * n_frames
    manager = ChunkManager(
        layout,
        device=device,
        ledger=ledger,
        link=Link(device, log),
        store=store,
        events=NO_EVENTS,
        limit=limit,
        ceiling=limit,
        next_use=lambda bucket: bucket + 1.0,
    )
    for _ in range(laps):
        manager.counts.clear()
        for bucket in range(n_buckets):
            manager.pin((bucket,), "fault")
            manager.unpin((bucket,))
    return manager.counts["miss"] / n_buckets


def test_a_loop_over_more_weights_than_frames_misses_what_frames_do_not_hold() -> None:
    assert loop(8 * FEW, 4 * FEW, laps=4) <= 0.5 + 2 / FEW


def test_a_pin_that_does_not_fit_pins_nothing() -> None:
    world = World(limit=28, ceiling=28)
    world.manager.pin((0,), "F")

    with pytest.raises(BudgetError, match="are pinned"):
        world.manager.pin((3, 4), "F")
    assert {b: r.pins for b, r in world.manager.replicas.items() if r.pins} == {0: 1}
    world.manager.unpin((0,))
    world.visit(4)


def test_a_pin_that_leases_stand_in_the_way_of_says_so() -> None:
    world = World(limit=28, ceiling=28)
    world.manager.pin((0,), "F")
    kept = world.manager.replicas[0].views[0].detach()
    world.manager.unpin((0,))

    with pytest.raises(BudgetError, match="leases") as caught:
        world.manager.pin((4,), "F")
    assert "views of parameters" in caught.value.advice
    assert torch.equal(kept.flatten(), world.model[0][:25])
    del kept
    world.visit(4)


def test_a_pin_takes_more_frames_when_the_limit_is_short_of_them() -> None:
    world = World(limit=28, ceiling=60)
    world.manager.pin((4,), "F")
    world.manager.pin((0, 1), "F")

    assert world.manager.arena.frames.limit == 52


def test_a_pin_takes_more_frames_when_a_held_run_splits_those_in_use() -> None:
    world = World(limit=28, ceiling=60)
    world.visit(0)  # frames 0 to 12
    world.manager.pin((5,), "F")  # frames 12 and 13: 12 and 14 are left beside it
    world.manager.evict(0)

    world.visit(6)  # 24 frames, of 58 that nobody holds

    assert world.manager.arena.frames.limit <= 60


def test_what_the_arena_has_no_place_for_stands_apart_and_goes_when_nobody_holds_it() -> None:
    world = World(limit=28, ceiling=28, budget=60)
    kept = []
    for bucket in (4, 0):
        world.manager.pin((bucket,), "F", lambda: 60 - world.manager.arena.limit)
        kept.append(world.manager.replicas[bucket].views[0].detach())
        world.manager.unpin((bucket,))

    assert world.manager.arena.limit == 28 + 12
    assert world.manager.replicas[0].is_apart
    cdata = world.manager.replicas[0].cdata
    assert torch.equal(kept[1].flatten(), world.model[0][:25])
    kept[1].mul_(2)
    world.model[0][:25] *= 2
    assert not world.manager.shrink(28)
    del kept
    assert world.manager.shrink(28)
    assert (world.manager.arena.limit, cdata in world.manager.arena.by_storage) == (28, False)
    world.visit(0)


def test_the_arena_gives_way_to_what_is_held_apart_from_it() -> None:
    world = World(limit=40, ceiling=40, budget=80)
    world.manager.pin((4, 6), "F", lambda: 40)
    kept = world.manager.replicas[6].views[0].detach()
    world.manager.unpin((4, 6))

    assert world.manager.shrink(40)
    assert (world.manager.arena.limit, world.manager.arena.frames.limit) == (40, 16)
    assert torch.equal(kept, world.model[6])
    with pytest.raises(BudgetError, match="leases"):
        world.manager.pin((4,), "F")
    world.visit(0)


def test_a_prefetch_never_displaces_what_is_held() -> None:
    world = World(limit=28, ceiling=28)
    world.manager.pin((0,), "F")

    assert not world.manager.prefetch(4, 0)
    assert not world.manager.prefetch(1, 6)
    assert world.manager.prefetch(1, 12)


def test_a_prefetch_past_the_limit_is_refused() -> None:
    world = World(limit=28, ceiling=60)

    assert not world.manager.prefetch(4, 1)
    assert world.manager.prefetch(4, 0)


def test_a_prefetch_that_the_ledger_cannot_take_is_only_skipped() -> None:
    world = World(limit=28, ceiling=28, budget=28)
    world.ledger.charge(Tier.HBM, Kind.ACTIVATION, 20 * FRAME_BYTES, "activations")

    assert not world.manager.prefetch(0, 0)
    world.visit(2)


def test_giving_up_a_write_brings_the_old_values_back() -> None:
    world = World()
    world.manager.pin((0,), "F")
    world.manager.replicas[0].flat[:25] = -1.0
    world.manager.write(0, 0, 25)
    world.manager.unpin((0,))
    world.manager.discard_writes(0)

    world.visit(0)


def test_giving_up_a_write_leaves_the_frames_of_a_lease_alone() -> None:
    world = World(limit=28, ceiling=28)
    world.manager.pin((0,), "F")
    replica = world.manager.replicas[0]
    replica.flat[:25] = -1.0
    world.manager.write(0, 0, 25)
    kept = replica.views[1].detach()
    world.manager.unpin((0,))
    world.manager.discard_writes(0)

    assert torch.equal(kept, world.model[0][32:39])


def test_a_lease_follows_the_update_of_its_parameter() -> None:
    world = World()
    world.manager.pin((0,), "F")
    kept = world.manager.replicas[0].views[1].detach()
    world.manager.unpin((0,))
    world.manager.flush_and_wait(0)
    world.fresh(flat_of(world.manager.home(0)), 0, 32, 39)
    world.manager.refresh(0)

    assert torch.equal(kept, world.model[0][32:39])


def test_an_update_discards_a_replica_that_nobody_looks_at() -> None:
    world = World()
    world.visit(0)
    world.fresh(flat_of(world.manager.home(0)), 0, 0, 25)
    world.manager.refresh(0)

    assert 0 not in world.manager.replicas
    world.visit(0)


def test_a_home_written_through_a_state_dict_is_seen_by_the_next_pin() -> None:
    world = World()
    world.visit(0)
    world.manager.copies[0].expose()
    home = view_of(world, 0, 1).detach()
    home.mul_(2)
    world.model[0][32:39] *= 2

    world.visit(0)


def test_a_home_written_through_a_state_dict_refreshes_a_lease() -> None:
    world = World()
    world.manager.pin((0,), "F")
    kept = world.manager.replicas[0].views[1].detach()
    world.manager.unpin((0,))
    world.manager.flush_and_wait(0)
    world.manager.copies[0].expose()
    view_of(world, 0, 1).mul_(2)
    world.model[0][32:39] *= 2
    world.manager.flush_and_wait(0)

    assert torch.equal(kept, world.model[0][32:39])


@pytest.mark.parametrize("read", ["pin", "settle"])
def test_a_write_on_the_device_and_one_through_a_state_dict_are_both_kept(read: str) -> None:
    world = World()
    world.manager.copies[0].expose()
    alias = view_of(world, 0, 1).detach()  # of a state dict
    world.scribble(0, 0, 10)  # segment 0, on HBM, in chunk 0
    alias.mul_(2)  # segment 1, at home, in chunk 2
    world.model[0][32:39] *= 2
    if read == "settle":
        world.manager.flush_and_wait(0)

    world.visit(0)


def test_a_write_on_the_device_and_one_through_a_state_dict_may_share_a_chunk() -> None:
    world = World()
    world.manager.copies[2].expose()
    alias = view_of(world, 2, 2).detach()  # of a state dict
    world.scribble(2, 0, 10)
    alias.mul_(2)
    world.model[2][32:52] *= 2
    world.manager.flush_and_wait(2)

    world.visit(2)


def test_a_flush_that_fails_leaves_the_replica_dirty_and_is_tried_again() -> None:
    errors = [StorageError("the drive is full")]

    def overwriting(bucket: Bucket, start: int, end: int) -> Callable[[], None]:
        if errors:
            raise errors.pop()
        return lambda: None

    world = World(events=NO_EVENTS._replace(overwriting=overwriting))
    world.scribble(4, 20, 30)
    with pytest.raises(StorageError):
        world.manager.evict(4)
    assert world.state(4) is CopyState.DIRTY
    assert world.state(4, Tier.HOST) is CopyState.CLEAN

    world.manager.evict(4)
    assert world.home_is_right(4)
    world.visit(4)


def test_events_tell_of_writes_before_and_after_they_come_home() -> None:
    told: list[tuple[object, ...]] = []

    def overwriting(bucket: Bucket, start: int, end: int) -> Callable[[], None]:
        told.append(("before", bucket.id, start, end))
        return lambda: told.append(("after", bucket.id))

    def note(word: str) -> Callable[[object], None]:
        return lambda what: told.append((word, getattr(what, "position", what)))

    events = NO_EVENTS._replace(
        writing=note("writing"),
        overwriting=overwriting,
        written=note("written"),
        updated=note("updated"),
    )
    world = World(events=events)
    world.scribble(0, 3, 4)
    world.manager.flush_and_wait(0)
    assert told == [("writing", 0), ("before", 0, 0, 16), ("after", 0)]

    told.clear()
    world.manager.copies[0].expose()
    view_of(world, 0, 1).mul_(2)
    world.model[0][32:39] *= 2
    world.visit(0)
    assert told == [("written", 1)]


def test_an_update_of_a_held_home_is_done_and_shown_at_once() -> None:
    class Doubling:
        done = False

        def wait(self) -> None:
            flat_of(world.manager.copies[0].home)[:].mul_(2)
            self.done = True

    updated: list[int] = []
    world = World(events=NO_EVENTS._replace(updated=lambda bucket: updated.append(bucket.id)))
    world.manager.pin((0,), "F")
    world.manager.flush_and_wait(0)
    work = Doubling()
    assert not world.manager.may_hand_over(0)
    world.manager.hand_over(0, work)
    world.model[0] *= 2

    assert work.done and updated == [0]
    assert world.right(world.manager.replicas[0].flat, 0)
    assert world.manager.copies[0].update is None


def test_growing_makes_a_larger_arena() -> None:
    world = World(limit=28, ceiling=28)
    world.scribble(4, 0, 99)
    assert world.manager.resize(90)
    world.visit(4)
    world.visit(*BUCKETS)
    replicas = world.manager.replicas.values()

    assert world.manager.arena.slab.n_bytes == 90 * FRAME_BYTES
    assert len(replicas) == len(BUCKETS)
    assert len({r.bytes.data_ptr() - r.start * FRAME_BYTES for r in replicas}) == 1


def test_shrinking_keeps_every_value() -> None:
    world = World()
    for bucket in BUCKETS:
        world.scribble(bucket, 0, 1)
    assert world.manager.resize(LARGEST)
    for bucket in BUCKETS:
        world.visit(bucket)

    assert world.manager.counts["evict"] >= 3


def failing_arenas(world: World, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """Let the device have no memory for the next arenas."""
    make, left = world.device.arena, [failures]

    def arena(n_bytes: int) -> Slab:
        if n_bytes and left[0]:
            left[0] -= 1
            raise BudgetError("another process has it")
        return make(n_bytes)

    monkeypatch.setattr(world.device, "arena", arena)


def test_frames_that_the_device_has_no_memory_for_leave_as_many_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(limit=28, ceiling=28)
    world.scribble(4, 0, 99)
    failing_arenas(world, monkeypatch, 1)
    assert not world.manager.resize(90)
    assert (world.manager.arena.frames.limit, world.manager.arena.ceiling) == (28, 28)
    world.visit(4)
    for bucket in BUCKETS:
        world.visit(bucket)

    assert world.manager.resize(90) and world.manager.arena.frames.limit == 90


def test_frames_that_are_lost_with_the_device_s_memory_come_back_at_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(limit=28, ceiling=28)
    world.scribble(4, 0, 99)
    failing_arenas(world, monkeypatch, 2)
    with pytest.raises(BudgetError, match="another process"):
        world.manager.resize(90)
    with pytest.raises(OutOfMemory):
        world.manager.pin((4,), "F")
    assert world.manager.resize(28)
    world.visit(4)


def test_nothing_is_resized_while_a_lease_is_held() -> None:
    world = World()
    world.manager.pin((3,), "F")
    kept = world.manager.replicas[3].flat[:4]
    world.manager.unpin((3,))

    assert not world.manager.resize(40)
    assert world.manager.arena.frames.limit == ALL
    assert torch.equal(kept, world.model[3][:4])


def test_writing_to_a_bucket_that_is_not_resident_is_an_error_with_moves() -> None:
    world = World()
    world.visit(0)
    world.manager.evict(0)

    with pytest.raises(StateError, match="ABSENT -> DIRTY") as caught:
        world.manager.write(0, 0, 1)
    assert any("evict" in move for move in caught.value.moves)


def test_closing_brings_everything_home() -> None:
    world = World(lazy=0.0)
    for bucket in BUCKETS:
        world.scribble(bucket, 0, 1)
    world.manager.close()

    assert all(world.home_is_right(b) for b in BUCKETS)


def test_a_home_that_changed_by_itself_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_PARANOID", "1")
    world = World()
    world.scribble(0, 0, 10)
    world.manager.evict(0)
    flat_of(world.manager.home(0))[3] = 0.5

    with pytest.raises(TransferError, match="changed, and hetero did not"):
        world.manager.pin((0,), "F")


def test_a_fetch_that_failed_once_is_not_taken_for_resident(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HETERO_PARANOID", "1")
    world = World()
    world.scribble(0, 0, 10)
    world.manager.evict(0)
    flat_of(world.manager.home(0))[3] = 0.5

    for _ in range(2):
        with pytest.raises(TransferError):
            world.manager.pin((1, 0), "F")
    assert not any(replica.pins for replica in world.manager.replicas.values())
    assert 0 not in world.manager.replicas
    assert world.ledger.used(Tier.HBM) == 12 * FRAME_BYTES
