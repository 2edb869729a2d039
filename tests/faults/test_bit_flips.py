"""Bytes that change on the drive are never loaded: flips, sectors, swaps, other files' bytes."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero.checkpoint.manifest import MANIFEST, SHARD, SavedTensor, decode, layout
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.slices import header_of, whole
from hetero.checkpoint.verify import verify
from hetero.errors import CheckpointCorrupt, CheckpointError
from hetero.io import ALIGN, Folder, align_up
from hetero.tensorfile import BLOCK, block_crcs
from tests.faults.saves import Buffered, Quick, contents, everything, load, save

FLIPS = 20_000
SECTORS = 1_000
SECTOR = 512
SIZES = [5, ALIGN, ALIGN + 1, 3 * ALIGN, 50_000, BLOCK - 1, BLOCK, BLOCK + 5, 2 * BLOCK + 99]
ENTRIES = [SavedTensor("tensor", str(n), "", "uint8", (size,)) for n, size in enumerate(SIZES)]


class Target:
    """An open checkpoint whose shard can be changed in place."""

    def __init__(self, path: Path) -> None:
        with Folder.open(path, Quick()) as root:
            self.path = save(root, 1, ENTRIES)
        self.fd = os.open(self.path / SHARD, os.O_RDWR)
        self.raw = (self.path / SHARD).read_bytes()
        self.head_bytes = len(header_of(whole(ENTRIES)))
        self.offsets = [self.head_bytes + at for at in layout(ENTRIES)]
        self.reader = CheckpointReader.open(path, io=Buffered())
        self.into = memoryview(bytearray(BLOCK))

    @contextmanager
    def changed(self, offset: int, data: bytes) -> Iterator[None]:
        """Let the shard have other bytes for a while."""
        os.pwrite(self.fd, data, offset)
        try:
            yield
        finally:
            os.pwrite(self.fd, self.raw[offset : offset + len(data)], offset)

    def refuses(self, offset: int) -> bool:
        """Whether the block of a byte of the shard is refused, by its name, or its header."""
        if offset < self.head_bytes:
            try:
                CheckpointReader.open(self.path, io=Buffered()).close()
            except CheckpointCorrupt as error:
                return "does not begin with the header" in error.args[0]
            return False
        entry = next(n for n, end in enumerate(self.offsets[1:]) if offset < end)
        block = (offset - self.offsets[entry]) // BLOCK
        n_bytes = min(BLOCK, SIZES[entry] - block * BLOCK)
        try:
            self.reader.read(entry, block * BLOCK, self.into[:n_bytes])
        except CheckpointCorrupt as error:
            return f"block {block} of entry {entry} " in error.args[0]
        return False

    def somewhere(self, seeded: random.Random) -> int:
        """Return a byte of the shard: any entry, then any byte of it and of its padding.

        One of fifty is a byte of the header.
        """
        if not seeded.randrange(50):
            return seeded.randrange(self.head_bytes)
        entry = seeded.randrange(len(SIZES))
        return self.offsets[entry] + seeded.randrange(align_up(SIZES[entry]))


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)  # read from the page cache
    target = Target(tmp_path)
    yield target
    os.close(target.fd)
    assert everything(target.reader) == contents(1, ENTRIES)  # every change was taken back


@pytest.mark.campaign(seconds=2)
def test_every_flipped_bit_of_the_shard_is_refused(target: Target) -> None:
    seeded = random.Random(0)
    silent = 0
    for _ in range(FLIPS):
        at, bit = target.somewhere(seeded), 1 << seeded.randrange(8)
        with target.changed(at, bytes([target.raw[at] ^ bit])):
            silent += not target.refuses(at)

    print(f"{FLIPS} flips, {silent} silent")
    assert silent == 0


def zeros(old: bytes, seeded: random.Random) -> bytes:
    return bytes(len(old))


def garbage(old: bytes, seeded: random.Random) -> bytes:
    return seeded.randbytes(len(old))


def halves(old: bytes, seeded: random.Random) -> bytes:
    return old[len(old) // 2 :] + old[: len(old) // 2]


@pytest.mark.parametrize("size", [SECTOR, ALIGN])
@pytest.mark.parametrize("change", [zeros, garbage, halves])
def test_every_changed_sector_is_refused(
    target: Target, change: Callable[[bytes, random.Random], bytes], size: int
) -> None:
    seeded = random.Random(0)
    counts: Counter[str] = Counter()
    for _ in range(SECTORS):
        at = target.somewhere(seeded) // size * size
        old = target.raw[at : at + size]
        new = change(old, seeded)
        with target.changed(at, new):
            counts["same" if new == old else "refused" if target.refuses(at) else "silent"] += 1

    print(f"{change.__name__} of {size}: {dict(counts)}")
    assert counts["silent"] == 0
    assert counts["refused"] > SECTORS // 2


def test_sectors_and_blocks_that_changed_places_are_refused(target: Target) -> None:
    seeded = random.Random(0)
    for size in [SECTOR] * 300 + [ALIGN] * 300 + [BLOCK] * 20:
        starts = range(0, len(target.raw) - size, size)
        a, b = seeded.sample(starts, 2)
        old = target.raw[a : a + size], target.raw[b : b + size]
        if old[0] == old[1]:
            continue
        with target.changed(a, old[1]), target.changed(b, old[0]):
            assert target.refuses(a)
            assert target.refuses(b)


def test_blocks_of_equal_bytes_are_refused_in_each_others_place(tmp_path: Path) -> None:
    """Even all-zero entries have CRCs of their own: their order is not a matter of bytes alone."""
    entries = [SavedTensor("tensor", str(n), "", "uint8", (2 * BLOCK,)) for n in range(2)]
    with Folder.open(tmp_path) as root:
        path = save(root, 1, entries)
    manifest = decode((path / MANIFEST).read_bytes(), "")
    digits = [crcs[at : at + 8] for crcs in manifest.crcs for at in (0, 8)]
    assert len(set(digits)) == 4
    raw = (path / SHARD).read_bytes()
    first = len(header_of(whole(entries)))
    (path / SHARD).write_bytes(raw[:first] + raw[first + 2 * BLOCK :] + raw[first : -2 * BLOCK])

    with pytest.raises(CheckpointCorrupt, match=r"block 0 of entry 0"):
        load(tmp_path)


def test_equal_blocks_have_another_crc_in_every_place() -> None:
    zeros = memoryview(bytes(2 * BLOCK))
    crcs = [crc for entry in (0, 1) for crc in block_crcs(entry, 0, zeros)]

    assert len(set(crcs)) == 4
    assert block_crcs(1, BLOCK, zeros[BLOCK:]) == crcs[3:]


def test_every_flipped_bit_of_a_manifest_is_refused(tmp_path: Path) -> None:
    with Folder.open(tmp_path, Quick()) as root:
        path = save(root, 1)
    raw = (path / MANIFEST).read_bytes()
    for at in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            with pytest.raises(CheckpointCorrupt):
                decode(bytes(changed), "")
        (path / MANIFEST).write_bytes(changed)
        with pytest.raises(CheckpointCorrupt, match=MANIFEST):
            CheckpointReader.open(tmp_path)
    print(f"{8 * len(raw)} flips")


def test_every_truncated_manifest_is_refused(tmp_path: Path) -> None:
    with Folder.open(tmp_path, Quick()) as root:
        raw = (save(root, 1) / MANIFEST).read_bytes()
    for end in range(len(raw)):
        with pytest.raises(CheckpointCorrupt):
            decode(raw[:end], "")
    with pytest.raises(CheckpointCorrupt):
        decode(raw + b"\n", "")


@pytest.mark.parametrize("change", [-len(contents(2)[2][0]), -ALIGN, -1, 1, ALIGN, BLOCK])
def test_a_shard_of_another_size_is_refused_before_it_is_read(tmp_path: Path, change: int) -> None:
    with Folder.open(tmp_path, Quick()) as root:
        save(root, 1)
        shard = save(root, 2) / SHARD
    os.truncate(shard, shard.stat().st_size + change)

    with pytest.raises(CheckpointCorrupt, match=r"bytes, \d+ were saved") as failure:
        CheckpointReader.open(tmp_path)

    assert "step 1 is the newest good one: load it with step=1" in failure.value.advice
    assert load(tmp_path, 1) == contents(1)


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_file_of_another_step_is_refused(tmp_path: Path, name: str) -> None:
    with Folder.open(tmp_path, Quick()) as root:
        save(root, 1)
        save(root, 2)
    shutil.copy(tmp_path / "step-1" / name, tmp_path / "step-2" / name)

    with pytest.raises(CheckpointCorrupt) as failure:
        load(tmp_path)
    assert "step 1 is the newest good one" in failure.value.advice


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    with Folder.open(tmp_path, Quick()) as root:
        save(root, 1)
        (save(root, 2) / name).unlink()

    with pytest.raises(CheckpointCorrupt, match=f"{name} is missing") as failure:
        CheckpointReader.open(tmp_path)

    assert "step 1 is the newest good one" in failure.value.advice


def test_verifying_finds_each_damaged_block_without_a_model(target: Target) -> None:
    seeded = random.Random(0)
    assert verify(target.path.parent).newest_good == 1
    for _ in range(30):
        at = target.somewhere(seeded)
        with target.changed(at, bytes([target.raw[at] ^ 1])):
            report = verify(target.path.parent, Buffered())
            assert not report.ok
            assert "CheckpointCorrupt" in report.checkpoints[0].problem


def test_damage_in_the_newest_never_falls_back_by_itself(tmp_path: Path) -> None:
    with Folder.open(tmp_path, Quick()) as root:
        for step in (1, 2, 3):
            save(root, step)
    (tmp_path / "step-2" / MANIFEST).write_bytes(b"{}")
    (tmp_path / "step-3" / MANIFEST).write_bytes(b"{}")

    with pytest.raises(CheckpointError, match=r"step-3/MANIFEST\.json is damaged") as failure:
        CheckpointReader.open(tmp_path)

    assert "step 1 is the newest good one" in failure.value.advice
