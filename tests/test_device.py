"""The fake devices: copies that are late on purpose, and the mistakes that this brings to light."""

from __future__ import annotations

import random
import struct
from mmap import PAGESIZE

import pytest
import torch

from hetero.device import (
    HUGE_PAGE,
    POISON,
    Allocated,
    CpuDevice,
    SimDevice,
    Slab,
    Ticket,
    allocated,
    checked_rng,
    map_slab,
    open_device,
    paged_slab,
    release_slab,
    use_count,
)
from hetero.device.memory import CudaMemory
from hetero.errors import ConfigError, TransferError
from hetero.types import Lane

SEEDS = [0, 1, 2, 3, 4]


def filled(n_bytes: int, value: int) -> torch.Tensor:
    return torch.full((n_bytes,), value, dtype=torch.uint8)


def lazy(**settings: object) -> SimDevice:
    """Return a device on which nothing moves before somebody waits."""
    return SimDevice(lazy=0.0, **settings)


# -- slabs ---------------------------------------------------------------------------------------


def test_a_slab_is_zeroed_and_of_exactly_the_size_asked_for() -> None:
    for device in (CpuDevice(), SimDevice()):
        for slab in (device.slab(1000), device.arena(1000)):
            piece = slab.carve(0, 1000)

            assert slab.n_bytes == piece.numel() == 1000
            assert not piece.any()


def test_pieces_of_a_slab_share_bytes_but_no_storage() -> None:
    slab = map_slab(64)
    left, right = slab.carve(0, 48), slab.carve(16, 48)
    left[16:32] = 7

    assert right[:16].eq(7).all()
    assert left.untyped_storage()._cdata != right.untyped_storage()._cdata


def test_a_piece_of_a_block_without_mapping_is_a_storage_of_its_own() -> None:
    block = torch.zeros(64, dtype=torch.uint8)
    slab = Slab(64, block)
    piece = slab.carve(8, 16)
    piece.fill_(3)

    assert block[8:24].eq(3).all()
    assert int(block.sum()) == 48
    assert piece.untyped_storage()._cdata != block.untyped_storage()._cdata


def test_an_empty_piece_is_empty() -> None:
    assert map_slab(0).carve(0, 0).numel() == 0
    assert map_slab(8).carve(8, 0).numel() == 0


def test_pages_that_are_given_back_are_new_ones_and_those_before_them_stay() -> None:
    slab = map_slab(5 * PAGESIZE + 8)
    piece = slab.carve(0, slab.n_bytes)
    piece.fill_(5)

    slab.give_back(PAGESIZE + 1)

    assert piece[: 2 * PAGESIZE].eq(5).all() and not piece[2 * PAGESIZE :].any()
    slab.give_back(slab.n_bytes)
    Slab(64, torch.zeros(64, dtype=torch.uint8)).give_back(0)  # which has no pages of its own


@pytest.mark.parametrize("n_bytes", [64, HUGE_PAGE - 4096, HUGE_PAGE, 3 * HUGE_PAGE + 4096])
def test_memory_of_a_home_on_disk_begins_where_huge_pages_do(n_bytes: int) -> None:
    slab = paged_slab(n_bytes)

    if n_bytes >= HUGE_PAGE:  # else an extent, which is a part of it, is none
        assert slab.block.data_ptr() % HUGE_PAGE == 0
    assert slab.block.numel() == slab.n_bytes == n_bytes
    piece = slab.carve(16, n_bytes - 16)
    assert piece.data_ptr() == slab.block.data_ptr() + 16
    slab.block.fill_(7)
    slab.give_back(4096)
    kept = min(n_bytes, 4096)
    assert bool((slab.block[:kept] == 7).all()) and not slab.block[kept:].any()


def test_a_piece_outlives_its_slab() -> None:
    piece = map_slab(4096).carve(0, 4096)
    piece.fill_(5)

    assert piece.eq(5).all()


def test_the_use_count_tells_whether_a_view_is_still_held() -> None:
    piece = map_slab(64).carve(0, 64)
    baseline = use_count(piece)
    view = piece[3:5].view(torch.int8)

    assert use_count(piece) == baseline + 1
    del view
    assert use_count(piece) == baseline


def test_releasing_a_slab_that_is_not_page_locked_changes_nothing() -> None:
    slab = map_slab(16)
    release_slab(slab)

    assert not slab.registered
    assert not slab.carve(0, 16).any()


# -- the immediate device ------------------------------------------------------------------------


def test_on_cpu_a_copy_is_done_when_it_is_asked_for() -> None:
    device = CpuDevice()
    dst, src = filled(8, 0), filled(8, 9)
    ticket = device.copy(Lane.H2D, dst, src)

    assert dst.eq(9).all()
    assert device.query(ticket)


def test_on_cpu_hbm_is_ram() -> None:
    device = CpuDevice()

    assert device.same_ram
    assert device.memory.total_bytes() is None
    assert device.memory.allocated_peak() is None


@pytest.mark.parametrize("device", [CpuDevice(), SimDevice()], ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_is_nan_in_every_float_format(device: CpuDevice, dtype: torch.dtype) -> None:
    piece = filled(32, 0)
    device.poison(piece)

    assert piece.view(dtype).isnan().all()


def test_poison_is_minus_one_in_an_int_format() -> None:
    piece = filled(32, 0)
    CpuDevice().poison(piece)

    assert piece.view(torch.int64).eq(-1).all()


# -- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "kind"), [("cpu", CpuDevice), ("cpu:sim", SimDevice)])
def test_a_device_is_opened_by_name(spec: str, kind: type) -> None:
    assert type(open_device(spec)) is kind


def test_a_device_object_is_taken_as_it_is() -> None:
    device = SimDevice(seed=7)

    assert open_device(device) is device


@pytest.mark.parametrize("spec", ["tpu", "cpu:0", 3, torch.device("cpu"), ""], ids=repr)
def test_an_unknown_device_is_refused(spec: object) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        open_device(spec)


# -- deferred copies -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_is_deferred_and_its_destination_poisoned(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0)
    dst, src = filled(8, 0), filled(8, 9)
    ticket = device.copy(Lane.H2D, dst, src)

    assert not device.query(ticket)
    assert dst.eq(POISON).all()
    device.wait(ticket)
    assert device.query(ticket)
    assert dst.eq(9).all()


@pytest.mark.parametrize("how", ["wait", "sync", "close"])
def test_waiting_by_any_name_lets_the_copy_land(how: str) -> None:
    device = lazy()
    dst = filled(8, 0)
    ticket = device.copy(Lane.D2H, dst, filled(8, 9))
    getattr(device, how)(*([] if how == "close" else [ticket]))

    assert ticket.done
    assert dst.eq(9).all()


def test_waiting_for_a_copy_lands_those_before_it_on_its_lane_and_no_others() -> None:
    device = lazy()
    dst = [filled(8, 0) for _ in range(4)]
    lanes = (Lane.H2D, Lane.H2D, Lane.H2D, Lane.D2H)
    tickets = [
        device.copy(lane, d, filled(8, i))
        for i, (lane, d) in enumerate(zip(lanes, dst, strict=True))
    ]
    device.wait(tickets[1])

    assert [t.done for t in tickets] == [True, True, False, False]


def test_waiting_twice_is_waiting_once() -> None:
    device = lazy()
    dst = filled(8, 0)
    ticket = device.copy(Lane.H2D, dst, filled(8, 9))
    device.wait(ticket)
    dst.fill_(1)
    device.wait(ticket)

    assert dst.eq(1).all()


def test_a_lane_makes_progress_by_itself_now_and_then() -> None:
    device = SimDevice(seed=0, lazy=0.5)
    ticket = device.copy(Lane.H2D, filled(8, 0), filled(8, 9))

    assert any(device.query(ticket) for _ in range(100))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_interleaving(seed: int) -> None:
    def history() -> list[bool]:
        device = SimDevice(seed=seed, lazy=0.3)
        tickets = [
            device.copy(lane, filled(8, 0), filled(8, 1)) for lane in (Lane.H2D, Lane.D2H) * 20
        ]
        return [device.query(ticket) for ticket in tickets]

    assert history() == history()


def test_different_seeds_give_different_interleavings() -> None:
    def history(seed: int) -> tuple[bool, ...]:
        device = SimDevice(seed=seed, lazy=0.3)
        tickets = [device.copy(Lane.H2D, filled(8, 0), filled(8, 1)) for _ in range(20)]
        return tuple(device.query(ticket) for ticket in tickets)

    assert len({history(seed) for seed in SEEDS}) > 1


# -- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_reads_its_source_behind_the_tickets_it_was_given(seed: int) -> None:
    device = SimDevice(seed=seed, checked=True)
    home, first, second = filled(8, 0), filled(8, 7), filled(8, 0)
    flushed = device.copy(Lane.D2H, home, first)
    fetched = device.copy(Lane.H2D, second, home, (flushed,))
    device.wait(fetched)

    assert flushed.done
    assert second.eq(7).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_destination_is_overwritten_behind_its_last_reader(seed: int) -> None:
    device = SimDevice(seed=seed, checked=True)
    frame, home, other = filled(8, 7), filled(8, 0), filled(8, 3)
    flushed = device.copy(Lane.D2H, home, frame)
    fetched = device.copy(Lane.H2D, frame, other, (flushed,))
    device.wait(fetched)

    assert home.eq(7).all()
    assert frame.eq(3).all()


def test_a_destination_still_being_read_is_not_poisoned_early() -> None:
    device = lazy(checked=True)
    frame, home, other = filled(8, 7), filled(8, 0), filled(8, 3)
    flushed = device.copy(Lane.D2H, home, frame)
    device.copy(Lane.H2D, frame, other, (flushed,))

    assert frame.eq(7).all()
    device.close()
    assert home.eq(7).all()


@pytest.mark.parametrize("side", [0, 1])
def test_bytes_that_are_let_go_while_a_copy_uses_them_are_found(side: int) -> None:
    device = lazy(checked=True)
    sides = [filled(8, 7), filled(8, 0)]
    held = device.copy(Lane.D2H, sides[0][:4], sides[1][4:])
    device.wait(held)

    let_go = device.copy(Lane.D2H, sides[0][:4], sides[1][4:])
    sides[side] = filled(8, 1)

    with pytest.raises(TransferError, match="early free: a copy on d2h"):
        device.wait(let_go)


def test_a_chain_across_both_lanes_runs_in_its_order() -> None:
    device = lazy(checked=True)
    cells = [filled(4, i) for i in range(6)]
    before: tuple[Ticket, ...] = ()
    for i in range(5):
        lane = Lane.H2D if i % 2 else Lane.D2H
        before = (device.copy(lane, cells[i + 1], cells[i], before),)
    device.wait(before[0])

    assert all(cell.eq(0).all() for cell in cells)


def test_a_mark_is_done_because_compute_runs_at_once() -> None:
    device = lazy()
    device.compute(2.0)
    mark = device.mark()

    assert mark.done
    assert mark.end == 2.0


# -- the virtual clock ---------------------------------------------------------------------------


def test_a_link_without_a_rate_takes_no_time() -> None:
    device = lazy()
    device.wait(device.copy(Lane.H2D, filled(1000, 0), filled(1000, 1)))

    assert device.now() == 0.0


def test_waiting_advances_the_clock_by_bytes_over_rate() -> None:
    device = lazy(h2d_bytes_per_second=100.0, d2h_bytes_per_second=50.0)
    device.wait(device.copy(Lane.H2D, filled(200, 0), filled(200, 1)))
    assert device.now() == 2.0
    device.wait(device.copy(Lane.D2H, filled(200, 0), filled(200, 1)))
    assert device.now() == 6.0


def test_copies_of_one_lane_queue_up_and_lanes_run_side_by_side() -> None:
    device = lazy(h2d_bytes_per_second=100.0, d2h_bytes_per_second=100.0)
    up = [device.copy(Lane.H2D, filled(100, 0), filled(100, 1)) for _ in range(3)]
    down = device.copy(Lane.D2H, filled(100, 0), filled(100, 1))

    assert [ticket.end for ticket in up] == [1.0, 2.0, 3.0]
    assert down.end == 1.0
    assert device.now() == 0.0


def test_on_a_shared_link_the_lanes_take_turns() -> None:
    device = lazy(h2d_bytes_per_second=100.0, d2h_bytes_per_second=50.0, shared_link=True)
    lanes = (Lane.H2D, Lane.D2H, Lane.H2D)
    ends = [device.copy(lane, filled(100, 0), filled(100, 1)).end for lane in lanes]

    assert ends == [1.0, 3.0, 4.0]


def test_a_copy_begins_when_what_it_waits_for_has_ended() -> None:
    device = lazy(h2d_bytes_per_second=100.0, d2h_bytes_per_second=10.0)
    home = filled(100, 0)
    flushed = device.copy(Lane.D2H, home, filled(100, 1))
    fetched = device.copy(Lane.H2D, filled(100, 0), home, (flushed,))

    assert flushed.end == 10.0
    assert fetched.end == 11.0


def test_a_copy_behind_compute_costs_only_what_sticks_out() -> None:
    device = lazy(h2d_bytes_per_second=100.0)
    ticket = device.copy(Lane.H2D, filled(300, 0), filled(300, 1))
    device.compute(2.0)
    device.wait(ticket)
    assert device.now() == 3.0
    device.compute(1.0)
    device.wait(ticket)
    assert device.now() == 4.0


def test_a_copy_hidden_behind_compute_costs_nothing() -> None:
    device = lazy(h2d_bytes_per_second=100.0)
    ticket = device.copy(Lane.H2D, filled(300, 0), filled(300, 1))
    device.compute(5.0)
    device.wait(ticket)

    assert device.now() == 5.0


def test_a_copy_queued_later_begins_later() -> None:
    device = lazy(h2d_bytes_per_second=100.0)
    device.compute(7.0)

    assert device.copy(Lane.H2D, filled(100, 0), filled(100, 1)).end == 8.0


@pytest.mark.parametrize("seed", SEEDS)
def test_unasked_progress_never_changes_the_clock(seed: int) -> None:
    def times(lazy: float) -> list[float]:
        device = SimDevice(seed=seed, lazy=lazy, h2d_bytes_per_second=64, d2h_bytes_per_second=32)
        choose, seen, tickets = random.Random(seed), [], []
        for _ in range(50):
            lane = choose.choice((Lane.H2D, Lane.D2H))
            n_bytes = choose.randrange(1, 64)
            tickets.append(device.copy(lane, filled(n_bytes, 0), filled(n_bytes, 1)))
            device.compute(choose.random())
            device.wait(choose.choice(tickets))
            seen.append(device.now())
        return seen

    assert times(0.0) == times(0.9)


# -- planted mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_that_skips_the_wait_reads_poison(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0)
    frame = filled(16, 0)
    device.copy(Lane.H2D, frame, torch.ones(4).view(torch.uint8))

    assert frame.view(torch.float32).sum().isnan()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_that_skips_the_wait_is_caught_by_check_read(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0)
    frame = filled(16, 0)
    ticket = device.copy(Lane.H2D, frame[:8], filled(8, 1))

    with pytest.raises(TransferError, match="read before ready"):
        device.check_read(frame)
    device.check_read(frame[8:])
    device.wait(ticket)
    device.check_read(frame)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_home_read_before_its_flush_landed_is_caught(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0)
    home = filled(16, 4)
    ticket = device.copy(Lane.D2H, home, filled(16, 9))

    with pytest.raises(TransferError, match="read before ready"):
        device.check_read(home)
    assert home.eq(POISON).all()
    device.sync(ticket)
    device.check_read(home)
    assert home.eq(9).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_reused_while_a_flush_reads_them_are_caught(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0, checked=True)
    arena = filled(64, 1)
    device.copy(Lane.D2H, filled(16, 0), arena[16:32])

    with pytest.raises(TransferError, match="early reuse") as caught:
        device.copy(Lane.H2D, arena[24:40], filled(16, 2))
    assert "after=" in caught.value.advice


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_fetched_into_twice_at_once_are_caught(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0, checked=True)
    arena = filled(64, 1)
    device.copy(Lane.H2D, arena[:16], filled(16, 2))

    with pytest.raises(TransferError, match="early reuse"):
        device.copy(Lane.H2D, arena[8:24], filled(16, 3))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ticket_of_another_copy_does_not_excuse_early_reuse(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0, checked=True)
    frame = filled(16, 1)
    other = device.copy(Lane.D2H, filled(16, 0), filled(16, 5))
    device.copy(Lane.D2H, filled(16, 0), frame)

    with pytest.raises(TransferError, match="early reuse"):
        device.copy(Lane.H2D, frame, filled(16, 2), (other,))


def test_neighbouring_frames_are_no_reuse() -> None:
    device = lazy(checked=True)
    arena, home, second, third = filled(64, 1), filled(16, 0), filled(16, 2), filled(16, 3)
    device.copy(Lane.D2H, home, arena[16:32])
    device.copy(Lane.H2D, arena[:16], second)
    device.copy(Lane.H2D, arena[32:48], third)
    device.close()

    assert arena.tolist() == [2] * 16 + [1] * 16 + [3] * 16 + [1] * 16


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_written_in_flight_is_caught(seed: int, lane: Lane) -> None:
    device = SimDevice(seed=seed, lazy=0.0, checked=True)
    src, dst = filled(16, 1), filled(16, 0)
    ticket = device.copy(lane, dst, src)
    src[3] = 99

    with pytest.raises(TransferError, match="write after read"):
        device.wait(ticket)


@pytest.mark.parametrize("seed", SEEDS)
def test_unchecked_a_source_written_in_flight_arrives_as_it_is_by_then(seed: int) -> None:
    device = SimDevice(seed=seed, lazy=0.0)
    src, dst = filled(16, 1), filled(16, 0)
    ticket = device.copy(Lane.D2H, dst, src)
    src.fill_(99)
    device.wait(ticket)

    assert dst.eq(99).all()


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H, Lane.COMPUTE, Lane.UPDATE])
@pytest.mark.parametrize("seed", SEEDS)
def test_waiting_for_a_ticket_that_nobody_can_fire_is_a_deadlock(seed: int, lane: Lane) -> None:
    device = SimDevice(seed=seed)

    with pytest.raises(TransferError, match="deadlock"):
        device.wait(Ticket(lane, 0.0))


def test_a_copy_behind_a_ticket_that_nobody_can_fire_is_a_deadlock() -> None:
    device = lazy()
    ticket = device.copy(Lane.H2D, filled(8, 0), filled(8, 1), (Ticket(Lane.COMPUTE, 0.0),))

    with pytest.raises(TransferError, match="deadlock"):
        device.wait(ticket)


# -- no false alarms -----------------------------------------------------------------------------


class Pager:
    """A right program: fetches, computes on, flushes and refetches cells over a few frames.

    It keeps the one ordering rule: readers wait, writers pass the last readers' tickets. With
    ``forget`` it drops one sort of ticket, as a planted mistake.
    """

    def __init__(self, device: SimDevice, seed: int, forget: str = "") -> None:
        self.device = device
        self.choose = random.Random(seed)
        self.forget = forget
        self.arena = device.arena(3 * 16).carve(0, 48)
        self.homes = [filled(16, i) for i in range(6)]
        self.expected = list(range(6))
        self.landing: dict[int, Ticket] = {}
        self.leaving: dict[int, Ticket] = {}

    def visit(self, cell: int, frame: int) -> None:
        piece = self.arena[16 * frame : 16 * frame + 16]
        after = [t for t in (self.landing.get(cell), self.leaving.get(frame)) if t is not None]
        if self.forget == "idle":
            after = [t for t in after if t is not self.leaving.get(frame)]
        ready = self.device.copy(Lane.H2D, piece, self.homes[cell], after)
        if self.forget != "ready":
            self.device.wait(ready)
        self.device.check_read(piece)
        assert piece.eq(self.expected[cell]).all()
        piece.add_(1)
        self.expected[cell] += 1
        flushed = self.device.copy(Lane.D2H, self.homes[cell], piece, (self.device.mark(),))
        self.landing[cell] = self.leaving[frame] = flushed

    def run(self, visits: int) -> None:
        for _ in range(visits):
            self.visit(self.choose.randrange(6), self.choose.randrange(3))
        if self.forget != "landing":
            for ticket in self.landing.values():
                self.device.sync(ticket)
        for cell, home in enumerate(self.homes):
            self.device.check_read(home)
            assert home.eq(self.expected[cell]).all()


@pytest.mark.parametrize("block", range(4))
def test_a_right_program_raises_no_false_alarm(block: int) -> None:
    for seed in range(50 * block, 50 * (block + 1)):
        device = SimDevice(
            seed=seed,
            checked=True,
            lazy=(seed % 5) / 4,
            h2d_bytes_per_second=64.0,
            d2h_bytes_per_second=32.0,
        )
        Pager(device, seed).run(30)


@pytest.mark.parametrize("forget", ["ready", "idle", "landing"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_program_with_one_wait_left_out_is_caught(seed: int, forget: str) -> None:
    with pytest.raises(TransferError):
        Pager(SimDevice(seed=seed, checked=True), seed, forget).run(30)


# -- the allocator's count -----------------------------------------------------------------------


def test_a_cpu_has_no_allocator_that_counts() -> None:
    assert allocated(torch.device("cpu")) is None


def test_what_the_allocator_counts_goes_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
    counts = iter(range(12))
    stats = {k: {"all": {c: next(counts) for c in ("current", "peak")}} for k in kinds}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    assert allocated(torch.device("cuda", 0)) == Allocated(0, 1, 2)


def test_before_cuda_has_begun_its_allocator_counts_nothing() -> None:
    assert allocated(torch.device("cuda", 0)) == Allocated(0, 0, 0)


def test_counting_makes_no_list_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter asks after every unit, and `torch.cuda.memory_stats` sorts 140 names each time."""
    stats = {
        kind: {"all": {"current": 1, "peak": 1}} for kind in ("allocated_bytes", "reserved_bytes")
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: pytest.fail("a list of names"))
    memory = object.__new__(CudaMemory)
    memory._place = torch.device("cuda", 0)
    assert memory.allocated_peak() == memory.reserved_bytes() == 1


# -- states of generators ------------------------------------------------------------------------


def positioned(left: int, place: int) -> torch.Tensor:
    """Return a generator's state with these two numbers."""
    state = bytearray(torch.Generator().get_state().tolist())
    struct.pack_into("=iiQ", state, 8, left, 1, place)
    return torch.frombuffer(state, dtype=torch.uint8).clone()


def test_every_state_that_a_generator_has_is_taken() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(1300):
        torch.rand(1, generator=generator)
        state = generator.get_state()
        assert checked_rng(state) is state


@pytest.mark.parametrize(("left", "place"), [(624, 2), (624, 624), (2, 624), (300, 400)])
def test_a_state_whose_draws_would_leave_its_words_is_refused(left: int, place: int) -> None:
    state = positioned(left, place)
    torch.Generator().set_state(state)  # torch itself takes it, and reads what lies beside it

    with pytest.raises(ValueError, match=f"at word {place} of 624"):
        checked_rng(state)


@pytest.mark.parametrize("state", [torch.zeros(5), torch.zeros(5, dtype=torch.uint8)])
def test_what_is_no_state_of_a_generator_is_refused(state: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="is no generator's"):
        checked_rng(state)
