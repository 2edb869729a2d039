"""The door to CRC-32: both libraries behind it have zlib's values, which are on users' disks."""

from __future__ import annotations

import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zlib_ng import zlib_ng

from hetero.crc import crc32

SEEDS = st.integers(0, 2**32 - 1)


def of_length(n_bytes: int) -> bytes:
    return bytes(i * i % 251 for i in range(n_bytes))


def test_the_door_opens_on_zlib_ng_where_it_is_installed() -> None:
    assert crc32 is zlib_ng.crc32


def test_without_zlib_ng_the_door_opens_on_zlib() -> None:
    code = (
        "import sys; sys.modules['zlib_ng'] = None; sys.modules['zlib_ng.zlib_ng'] = None\n"
        "import zlib, hetero.crc\nassert hetero.crc.crc32 is zlib.crc32"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.binary(max_size=300), SEEDS)
def test_both_have_the_same_value_from_any_seed(data: bytes, seed: int) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data, seed) == zlib.crc32(data, seed)


@pytest.mark.parametrize("n_bytes", [0, 1, 15, 16, 63, 64, 255, 4095, 4096, 65537, 2**20 + 3])
def test_both_have_the_same_value_at_every_kernel_of_theirs_and_place(n_bytes: int) -> None:
    data = memoryview(bytearray(of_length(n_bytes + 64)))

    for start in (0, 1, 7, 32):
        piece = data[start : start + n_bytes]
        assert crc32(piece, start) == zlib.crc32(piece, start)


@given(st.binary(max_size=200), st.binary(max_size=200), SEEDS)
def test_a_value_that_one_began_the_other_goes_on_with(a: bytes, b: bytes, seed: int) -> None:
    whole = zlib.crc32(a + b, seed)

    assert crc32(b, zlib.crc32(a, seed)) == zlib.crc32(b, crc32(a, seed)) == whole
    assert zlib_ng.crc32_combine(zlib.crc32(a, seed), zlib.crc32(b), len(b)) == whole


def test_memory_of_any_type_and_shape_counts_by_its_bytes() -> None:
    words = memoryview(bytearray(of_length(960))).cast("B").cast("i", (4, 60))

    assert crc32(words) == zlib.crc32(words) == zlib.crc32(of_length(960))
