"""What benchmarks measure of other processes."""

from __future__ import annotations

from benchmarks.plan import measured

MIB = 2**20


def test_a_measured_process_is_charged_its_own_memory_and_not_its_parents() -> None:
    held = bytearray(b"\1") * (200 * MIB)

    ended = measured("import sys; sys.exit(int(sys.argv[1]))", "3")

    assert len(held) == 200 * MIB
    assert ended.code == 3
    assert 0 < ended.peak_bytes < 100 * MIB


def test_a_measured_process_is_charged_its_peak() -> None:
    ended = measured(f"x = bytearray(b'1') * {100 * MIB}; del x")

    assert ended.code == 0
    assert ended.peak_bytes > 100 * MIB
