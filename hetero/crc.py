"""The only door to CRC-32 (floor 0, no torch).

zlib-ng (the PyPI package, ``pip install hetero[disk]``) computes the same values with carry-less
multiplication, measured at 13 times zlib's rate; without it zlib is used.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
