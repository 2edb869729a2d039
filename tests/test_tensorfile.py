"""Headers, whole files and CRCs of blocks: what is written is what is read, by the library too."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from safetensors import safe_open

from hetero.crc import crc32
from hetero.errors import StateError
from hetero.io import ALIGN, Folder
from hetero.tensorfile import (
    BLOCK,
    DTYPES,
    ITEM_BYTES,
    SINGLE,
    block_crcs,
    header,
    read_header,
    write,
)
from tests.faults.saves import Quick

TENSORS = [("a", "float32", (2, 3)), ("empty", "int8", (0, 7)), ("b c/ü", "bfloat16", ())]


def test_a_header_is_what_its_reader_and_the_library_find(tmp_path: Path) -> None:
    head = header(TENSORS, notes={"format": "pt"})
    data = random.Random(0).randbytes(26)
    (tmp_path / SINGLE).write_bytes(head + data)

    with Folder.open(tmp_path) as folder, folder.file(SINGLE) as file:
        found = read_header(file)

    assert {name: (at.dtype, at.shape) for name, at in found.items()} == {
        name: (dtype, shape) for name, dtype, shape in TENSORS
    }
    assert [at.start - len(head) for at in found.values()] == [0, 24, 24]
    with safe_open(tmp_path / SINGLE, "numpy") as library:
        assert set(library.keys()) == set(found)
        assert library.get_tensor("a").tobytes() == data[:24]
        assert library.metadata() == {"format": "pt"}


@pytest.mark.parametrize("align", [8, ALIGN])
def test_blanks_bring_the_first_tensor_to_an_aligned_byte(align: int) -> None:
    for n in range(1, 40):
        head = header([("x" * n, "uint8", (3,))], align=align)
        assert len(head) % align == 0
        assert head.rstrip(b" ").endswith(b"}")


def test_every_dtype_is_as_long_as_its_word_says() -> None:
    for code, dtype in DTYPES.items():
        bits = "".join(c for c in code.split("_")[0] if c.isdigit()) or "8"
        assert 8 * ITEM_BYTES[dtype] == int(bits)


def test_a_file_is_written_piece_by_piece_and_synced(tmp_path: Path) -> None:
    plan = Quick()
    with Folder.open(tmp_path, plan) as folder:
        write(folder, "x", 6, (bytes([n, n]) for n in range(3)))

    assert (tmp_path / "x").read_bytes() == bytes([0, 0, 1, 1, 2, 2])
    assert [op.op for op in plan.log[-4:]] == ["write"] * 3 + ["sync"]


def test_pieces_that_are_not_as_many_bytes_are_refused(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as folder, pytest.raises(StateError, match="2 bytes instead of 3"):
        write(folder, "x", 3, [b"ab"])


def test_each_block_has_a_crc_that_knows_its_place_and_its_padding() -> None:
    data = memoryview(random.Random(0).randbytes(BLOCK + 5))

    crcs = block_crcs(7, 0, data)

    padded = bytes(data[BLOCK:]) + bytes(ALIGN - 5)
    assert crcs[0] == crc32(data[:BLOCK], crc32(struct.pack("<QQ", 7, 0)))
    assert crcs[1] == crc32(padded, crc32(struct.pack("<QQ", 7, 1)))
    assert block_crcs(7, BLOCK, data[BLOCK:]) == crcs[1:]
    assert not set(crcs) & set(block_crcs(8, 0, data))
