"""Slots in private files: what comes back is what was written last, or an error."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hetero.errors import BudgetError, ChunkCorrupt, DiskFull, StorageError
from hetero.events import EventLog
from hetero.io import ALIGN, IO, WINDOW, Folder, aligned_buffer
from hetero.memory import nvme as nvme_module
from hetero.memory.ledger import Ledger
from hetero.memory.nvme import DiskSlot, IoThreads, Nvme, fewest
from hetero.testing.faults import FaultPlan
from hetero.types import Kind, Lane, Tier

T = TypeVar("T")


def make(
    disk: Path, n_bytes: int = 0, *, io: IO | None = None, ledger: Ledger | None = None
) -> Nvme:
    return Nvme([Folder.open(disk, io)], n_bytes, ledger=ledger or Ledger({}), log=EventLog())


def make_slots(nvme: Nvme, n: int, n_bytes: int = ALIGN) -> list[DiskSlot]:
    return [nvme.slot(Kind.STATE, n_bytes, "a state") for _ in range(n)]


def block(seed: int, n_bytes: int = ALIGN) -> memoryview:
    buffer = aligned_buffer(n_bytes)
    buffer[:] = random.Random(seed).randbytes(n_bytes)
    return buffer


def content(nvme: Nvme, slot: DiskSlot) -> bytes:
    buffer = aligned_buffer(slot.n_bytes)
    nvme.read(slot, buffer)
    return bytes(buffer)


class Raw:
    """The bytes of a slot on the disk, past every check."""

    def __init__(self, nvme: Nvme, slot: DiskSlot) -> None:
        self.fd, self.slot = slot.file.fileno(), slot
        self.buffer = aligned_buffer(slot.n_bytes)

    def get(self) -> bytes:
        assert os.preadv(self.fd, [self.buffer], self.slot.offset) == self.slot.n_bytes
        return bytes(self.buffer)

    def put(self, data: bytes) -> None:
        self.buffer[:] = data
        assert os.pwritev(self.fd, [self.buffer], self.slot.offset) == self.slot.n_bytes


# -- slots ---------------------------------------------------------------------------------------


def test_what_is_written_comes_back(disk: Path) -> None:
    nvme = make(disk, 20 * ALIGN)
    slots = [nvme.slot(Kind.STATE, n, "a state") for n in (1, ALIGN, ALIGN + 1, 3 * ALIGN)]
    assert [slot.n_bytes for slot in slots] == [ALIGN, ALIGN, 2 * ALIGN, 3 * ALIGN]
    for turn in range(3):
        for i, slot in enumerate(slots):
            nvme.write(slot, block(10 * turn + i, slot.n_bytes))
        for i, slot in enumerate(slots):
            assert content(nvme, slot) == bytes(block(10 * turn + i, slot.n_bytes))
    assert nvme.take_counts() == {Lane.READ: 21 * ALIGN, Lane.WRITE: 21 * ALIGN}
    assert not nvme.take_counts()
    assert nvme.written_bytes == 21 * ALIGN


def test_the_pace_of_a_drive_counts_transfers_that_overlap_once(disk: Path) -> None:
    times = iter([0.0, 2.0, 1.0, 3.0, 5.0, 6.0, 8.0, 9.0])
    nvme = Nvme([Folder.open(disk)], 0, ledger=Ledger({}), log=EventLog(clock=lambda: next(times)))
    first, second = make_slots(nvme, 2)
    for slot in (first, second, first):  # 0 to 2, 1 to 3, 5 to 6
        nvme.write(slot, block(1))
    nvme.take_counts()
    assert nvme.pace == {Lane.WRITE: pytest.approx(4 / (3 * ALIGN))}
    content(nvme, first)
    nvme.take_counts()
    nvme.take_counts()  # a step without transfers
    assert nvme.pace == {
        Lane.WRITE: pytest.approx(4 / (3 * ALIGN)),
        Lane.READ: pytest.approx(1 / ALIGN),
    }


def test_slots_do_not_overlap_and_lie_on_the_drives_in_turn(disk: Path) -> None:
    folders = []
    for number in range(3):
        (disk / str(number)).mkdir()
        folders.append(Folder.open(disk / str(number)))
    nvme = Nvme(folders, 30 * ALIGN, ledger=Ledger({}), log=EventLog())
    slots = make_slots(nvme, 30)

    assert [slot.file for slot in slots[:6]] == 2 * [slot.file for slot in slots[:3]]
    places = {(slot.file.path, slot.offset) for slot in slots}
    assert len(places) == 30 and len({slot.number for slot in slots}) == 30
    assert len({slot.file.path for slot in slots}) == 3
    assert [size for _, size in nvme.open_files()] == [10 * ALIGN] * 3


def test_space_is_reserved_before_anything_is_written(disk: Path) -> None:
    nvme = make(disk, 100 * ALIGN)
    ((fd, size),) = nvme.open_files()
    assert size == 100 * ALIGN and 512 * os.fstat(fd).st_blocks >= size


def test_more_than_was_reserved_is_reserved_when_it_is_asked_for(disk: Path) -> None:
    plan = FaultPlan()
    nvme = make(disk, 2 * ALIGN, io=plan)
    make_slots(nvme, 3)
    assert plan.seen["reserve"] == 2
    assert nvme.open_files()[0][1] == 3 * ALIGN


def test_a_slot_there_is_no_space_for_is_not_charged(disk: Path) -> None:
    plan, ledger = FaultPlan(), Ledger({Tier.NVME: 5 * ALIGN})
    nvme = make(disk, 2 * ALIGN, io=plan, ledger=ledger)
    make_slots(nvme, 2)
    plan.fail_at("reserve", 1, errno.ENOSPC)

    with pytest.raises(DiskFull):
        nvme.slot(Kind.STATE, 2 * ALIGN, "a state")
    assert plan.fired == 1 and ledger.used(Tier.NVME) == 2 * ALIGN

    slot = nvme.slot(Kind.STATE, 2 * ALIGN, "a state")
    assert slot.offset == 2 * ALIGN and ledger.used(Tier.NVME, Kind.STATE) == 4 * ALIGN
    with pytest.raises(BudgetError, match="a state needs 8 KiB of NVME"):
        nvme.slot(Kind.STATE, 2 * ALIGN, "a state")
    assert nvme.slot(Kind.STATE, ALIGN, "a state").offset == 4 * ALIGN


def test_offsets_beyond_four_gibibytes_are_right(disk: Path) -> None:
    nvme = make(disk)
    far, near = make_slots(nvme, 2)
    far.offset = 5 * 2**30 + ALIGN  # the file has a hole then
    near.offset = ALIGN  # the same in 32 bits, twice around
    nvme.write(far, block(1))
    nvme.write(near, block(2))
    assert content(nvme, far) == bytes(block(1))
    assert content(nvme, near) == bytes(block(2))


# -- integrity -----------------------------------------------------------------------------------


def is_caught(nvme: Nvme, slot: DiskSlot) -> bool:
    """Whether a slot's bytes are refused; what is not refused must be right."""
    try:
        content(nvme, slot)
    except ChunkCorrupt:
        return True
    return False


def test_a_refusal_says_where_and_which_generation(disk: Path) -> None:
    nvme = make(disk)
    (slot,) = make_slots(nvme, 1)
    nvme.write(slot, block(1))
    nvme.write(slot, block(2))
    Raw(nvme, slot).put(bytes(ALIGN))

    with pytest.raises(ChunkCorrupt, match=r"slot 1 .* not generation 2") as failure:
        content(nvme, slot)

    found = failure.value
    assert (found.op, found.offset, found.wanted, found.got) == ("read", 0, ALIGN, ALIGN)
    assert found.path.startswith(str(disk)) and "check its health" in found.advice
    assert not nvme.take_counts()[Lane.READ]


def test_thousands_of_flipped_bits_are_all_caught(disk: Path) -> None:
    nvme, rng = make(disk), random.Random(0)
    slots = make_slots(nvme, 8)
    for i, slot in enumerate(slots):
        nvme.write(slot, block(i))
    silent = 0
    for _ in range(3000):
        slot = rng.choice(slots)
        raw = Raw(nvme, slot)
        good = raw.get()
        bad = bytearray(good)
        for bit in rng.sample(range(8 * ALIGN), rng.choice((1, 1, 1, 2, 3))):
            bad[bit // 8] ^= 1 << bit % 8
        raw.put(bytes(bad))
        silent += not is_caught(nvme, slot)
        raw.put(good)
    assert silent == 0
    assert not any(is_caught(nvme, slot) for slot in slots)


def zeroed(data: bytearray, at: int, rng: random.Random) -> None:
    data[at : at + 512] = bytes(512)


def garbage(data: bytearray, at: int, rng: random.Random) -> None:
    data[at : at + 512] = rng.randbytes(512)


def exchanged(data: bytearray, at: int, rng: random.Random) -> None:
    other = (at + 512) % len(data)
    data[at : at + 512], data[other : other + 512] = (
        data[other : other + 512],
        data[at : at + 512],
    )


def torn(data: bytearray, at: int, rng: random.Random) -> None:
    data[at + 512 :] = bytes(len(data) - at - 512)


@pytest.mark.parametrize("damage", [zeroed, garbage, exchanged, torn])
def test_damaged_sectors_are_all_caught(
    disk: Path, damage: Callable[[bytearray, int, random.Random], None]
) -> None:
    nvme, rng = make(disk), random.Random(0)
    slots = make_slots(nvme, 4, 4 * ALIGN)
    for i, slot in enumerate(slots):
        nvme.write(slot, block(i, slot.n_bytes))
    for k in range(400):
        slot = slots[k % 4]
        raw = Raw(nvme, slot)
        good = raw.get()
        bad = bytearray(good)
        damage(bad, 512 * rng.randrange(slot.n_bytes // 512 - 1), rng)
        raw.put(bytes(bad))
        assert is_caught(nvme, slot)
        raw.put(good)
    assert not any(is_caught(nvme, slot) for slot in slots)


def test_an_older_generation_is_caught_even_where_its_bytes_are_the_same(disk: Path) -> None:
    nvme = make(disk)
    slots = make_slots(nvme, 8)
    for turn in range(100):
        for i, slot in enumerate(slots):
            raw = Raw(nvme, slot)
            nvme.write(slot, block(i + 100 * turn))
            old = raw.get()
            nvme.write(slot, block(i + 100 * turn + 50))
            new = raw.get()
            raw.put(old)
            assert is_caught(nvme, slot)
            raw.put(new)
            assert not is_caught(nvme, slot)
    digests = set()
    for _ in range(50):
        nvme.write(slots[0], block(1))
        digests.add(slots[0].digest)
    assert len(digests) == 50


def test_equal_bytes_of_one_generation_have_another_digest_in_every_slot(disk: Path) -> None:
    nvme = make(disk)
    slots = make_slots(nvme, 8)
    for slot in slots:
        nvme.write(slot, block(1))

    assert {slot.generation for slot in slots} == {1}
    assert len({slot.digest for slot in slots}) == 8


def test_a_neighbours_content_is_caught_even_of_the_same_generation(disk: Path) -> None:
    nvme, rng = make(disk), random.Random(0)
    slots = make_slots(nvme, 20)
    raws = [Raw(nvme, slot) for slot in slots]
    for i, slot in enumerate(slots):
        nvme.write(slot, block(i))
    for _ in range(500):
        a, b = rng.sample(range(20), 2)
        first, second = raws[a].get(), raws[b].get()
        raws[a].put(second)
        raws[b].put(first)
        assert is_caught(nvme, slots[a]) and is_caught(nvme, slots[b])
        raws[a].put(first)
        raws[b].put(second)
    assert not any(is_caught(nvme, slot) for slot in slots)


@pytest.mark.parametrize("how", ["drop", "misdirect", "flip"])
def test_a_write_that_lies_is_caught_wherever_it_happens(disk: Path, how: Any) -> None:
    n, caught = 12, 0
    for k in range(5 * n):
        plan = FaultPlan()
        nvme = make(disk, (n + 1) * ALIGN, io=plan)
        slots = make_slots(nvme, n)
        plan.lie_at(k, how)
        model = {}
        for w in range(5 * n):  # every slot several times, in an order of its own
            slot = slots[w * 5 % n]
            nvme.write(slot, block(w))
            model[slot] = bytes(block(w))
        assert plan.fired == 1
        for slot, wanted in model.items():
            try:
                assert content(nvme, slot) == wanted
            except ChunkCorrupt:
                caught += 1
        nvme.close()
    # a lie is buried by the next write of the slot; one told in the last round is not
    assert caught >= n


def test_zeros_are_not_taken_for_what_was_written(disk: Path) -> None:
    nvme = make(disk, 2 * ALIGN)
    (slot,) = make_slots(nvme, 1)
    nvme.write(slot, aligned_buffer(ALIGN))
    assert content(nvme, slot) == bytes(ALIGN)
    slot.generation += 1
    assert is_caught(nvme, slot)


def test_a_write_that_fails_leaves_no_content_that_would_be_taken_for_the_new(disk: Path) -> None:
    plan = FaultPlan()
    nvme = make(disk, io=plan)
    (slot,) = make_slots(nvme, 1, 4 * ALIGN)
    nvme.write(slot, block(1, slot.n_bytes))
    plan.short_at("write", 1, ALIGN)
    plan.fail_at("write", 2, errno.EIO)

    with pytest.raises(StorageError):
        nvme.write(slot, block(2, slot.n_bytes))

    assert plan.fired == 2 and slot.generation == 1
    assert is_caught(nvme, slot)  # a part of it is new
    nvme.write(slot, block(3, slot.n_bytes))
    assert content(nvme, slot) == bytes(block(3, slot.n_bytes))


def test_unchecked_slots_are_for_benchmarks_alone(disk: Path) -> None:
    nvme = Nvme([Folder.open(disk)], 0, ledger=Ledger({}), log=EventLog(), checked=False)
    (slot,) = make_slots(nvme, 1)
    nvme.write(slot, block(1))
    Raw(nvme, slot).put(bytes(block(2)))
    assert content(nvme, slot) == bytes(block(2))


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True], ids=["tmpfile", "unlinked"])
def test_private_files_have_no_name_and_are_for_their_owner_alone(disk: Path, named: bool) -> None:
    plan = FaultPlan()
    if named:
        plan.fail_at("private", 0, errno.EOPNOTSUPP, None)
    nvme = make(disk, 4 * ALIGN, io=plan)
    (slot,) = make_slots(nvme, 1)
    nvme.write(slot, block(1))
    ((fd, _),) = nvme.open_files()

    assert (plan.fired > 0) == named
    assert os.listdir(disk) == []
    found = os.fstat(fd)
    assert found.st_nlink == 0 and found.st_mode & 0o777 == 0o600 and found.st_uid == os.geteuid()
    assert os.get_inheritable(fd) is False
    nvme.close()
    assert os.listdir(disk) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_nobody_can_give_a_private_file_a_name(disk: Path) -> None:
    nvme = make(disk, ALIGN)
    ((fd, _),) = nvme.open_files()
    folder = os.open(disk, os.O_RDONLY)

    with pytest.raises(OSError):
        os.link(f"/proc/self/fd/{fd}", "stolen", src_dir_fd=folder, dst_dir_fd=folder)

    os.close(folder)
    assert os.listdir(disk) == []


def free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bfree * found.f_frsize


def test_the_space_is_free_again_when_the_tier_is_closed(disk: Path) -> None:
    n_bytes = 64 * 2**20
    nvme = make(disk, n_bytes)
    ((fd, _),) = nvme.open_files()
    assert 512 * os.fstat(fd).st_blocks >= n_bytes
    copy = os.dup(fd)
    nvme.close()
    nvme.close()
    assert os.fstat(copy).st_nlink == 0  # nothing but this copy holds it
    os.close(copy)


def cached_bytes(fd: int, n_bytes: int) -> int:
    """Return what of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, n_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        view = ctypes.c_char.from_buffer(mapping)
        pages = (ctypes.c_ubyte * (n_bytes // mmap.PAGESIZE))()
        assert not libc.mincore(
            ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(n_bytes), pages
        )
        del view
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def go_through(nvme: Nvme, n_bytes: int) -> int:
    """Write and read ``n_bytes`` twice; return the most that was ever in the page cache."""
    size, most = 2 * 2**20, 0
    slots, buffer = make_slots(nvme, n_bytes // size, size), block(0, size)
    ((fd, _),) = nvme.open_files()
    for _ in range(2):
        for i, slot in enumerate(slots):
            buffer[0] = i
            nvme.write(slot, buffer)
            if i % 8 == 7:
                most = max(most, cached_bytes(fd, n_bytes))
        for i, slot in enumerate(slots):
            nvme.read(slot, buffer)
            assert buffer[0] == i
    return most


def test_direct_files_stay_out_of_the_page_cache(disk: Path) -> None:
    nvme = make(disk, 128 * 2**20)
    assert nvme.direct
    assert go_through(nvme, 128 * 2**20) == 0
    nvme.close()


def test_where_direct_files_are_refused_buffered_ones_keep_the_page_cache_small(
    disk: Path,
) -> None:
    plan = FaultPlan()
    plan.fail_at("private", 0, errno.EINVAL)
    nvme = make(disk, 128 * 2**20, io=plan)
    assert plan.fired == 1 and not nvme.direct
    assert 0 < go_through(nvme, 128 * 2**20) <= 2 * WINDOW
    assert plan.seen["sync"] >= 2 * 128 * 2**20 // WINDOW - 1
    nvme.close()


@pytest.mark.parametrize("got", [1000, 4095, 5000])
def test_short_transfers_of_buffered_files_change_nothing(disk: Path, got: int) -> None:
    plan = FaultPlan()
    plan.fail_at("private", 0, errno.EINVAL)
    plan.short_at("read", 0, got, times=None)
    plan.short_at("write", 0, got, times=None)
    nvme = make(disk, io=plan)
    slots = make_slots(nvme, 3, 4 * ALIGN)
    for i, slot in enumerate(slots):
        nvme.write(slot, block(i, slot.n_bytes))
    for i, slot in enumerate(slots):
        assert content(nvme, slot) == bytes(block(i, slot.n_bytes))
    assert plan.fired >= 6 * 4 * ALIGN // got


# -- how many threads ----------------------------------------------------------------------------


def test_the_fewest_threads_that_are_nearly_the_fastest_are_taken() -> None:
    assert fewest({1: 5.0, 2: 9.2, 4: 10.0, 8: 9.9}) == 2
    assert fewest({1: 10.0, 2: 9.2}) == 1
    assert fewest({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}) == 8


def test_the_drive_is_asked_how_many_threads_are_best(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {1: 3.0, 2: 6.0, 4: 10.0, 8: 11.0}
    monkeypatch.setattr(Nvme, "_rate", lambda self, blocks: rates[len(blocks)])
    assert make(disk, 64 * ALIGN).fastest(ALIGN) == 4
    two = Nvme([Folder.open(disk)] * 2, 64 * ALIGN, ledger=Ledger({}), log=EventLog())
    rates |= {16: 30.0}
    assert two.fastest(ALIGN) == 16


def test_asking_leaves_no_trace_but_what_was_written(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_module, "TRIAL_SECONDS", 0.001)
    nvme = make(disk, 100 * ALIGN)
    assert nvme.fastest(ALIGN) in nvme_module.TRIED
    assert not nvme.take_counts() and nvme.written_bytes > 8 * ALIGN
    slots = make_slots(nvme, 100)
    assert nvme.open_files()[0][1] == 100 * ALIGN
    for i, slot in enumerate(slots):
        nvme.write(slot, block(i))
    assert [content(nvme, slot) for slot in slots] == [bytes(block(i)) for i in range(100)]


def test_a_drive_with_room_for_little_is_asked_about_fewer_threads(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_module, "TRIAL_SECONDS", 0.001)
    assert make(disk, 3 * ALIGN).fastest(ALIGN) in (1, 2)
    nvme = make(disk, 3 * ALIGN)
    assert nvme.fastest(8 * ALIGN) == 1


def test_a_drive_that_fails_when_it_is_asked_is_an_error(disk: Path) -> None:
    plan = FaultPlan()
    plan.fail_at("write", 3, errno.EIO, None)
    with pytest.raises(StorageError):
        make(disk, 64 * ALIGN, io=plan).fastest(ALIGN)
    assert plan.fired


# -- threads -------------------------------------------------------------------------------------


class Gate:
    """Work that stands still until it is opened, and work that notes its turn."""

    def __init__(self) -> None:
        self.began, self.opened = threading.Event(), threading.Event()
        self.turns: list[str] = []

    def stand(self) -> None:
        self.began.set()
        assert self.opened.wait(10)

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.turns.append(name)


def test_what_somebody_waits_for_by_then_is_done_first() -> None:
    threads, gate, waited = IoThreads(1), Gate(), set[str]()
    threads.submit(Lane.READ, 1, gate.stand, lambda: False)
    assert gate.began.wait(10)
    for name in "abcdef":
        threads.submit(Lane.READ, 1, gate.note(name), lambda name=name: name in waited)
    waited |= {"e", "c"}  # after it was submitted

    gate.opened.set()
    threads.close()

    assert gate.turns == list("ceabdf")


def test_threads_finish_what_they_were_given_before_they_end() -> None:
    threads, gate = IoThreads(3), Gate()
    for i in range(100):
        threads.submit(Lane.READ, 1, gate.note(str(i)), lambda: False)
    threads.close()
    threads.close()
    assert sorted(gate.turns, key=int) == [str(i) for i in range(100)]


def wait_for_the_end(before: int) -> Iterator[None]:
    for _ in range(500):
        if threading.active_count() <= before:
            return
        time.sleep(0.01)
        yield
    pytest.fail("threads are still there")


def test_threads_end_when_nobody_has_them_any_more() -> None:
    before = threading.active_count()
    threads = IoThreads(4)
    threads.submit(Lane.READ, 1, lambda: None, lambda: False)
    assert threading.active_count() == before + 4
    del threads
    gc.collect()
    for _ in wait_for_the_end(before):
        pass
