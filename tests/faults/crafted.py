"""Manifests that somebody else made, with a right CRC, so that what comes after it is reached."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from hetero.checkpoint.manifest import HEAD, HEAD_BYTES, MANIFEST, SHARD, decode
from hetero.checkpoint.slices import only_shard
from hetero.errors import CheckpointError

Record = dict[str, Any]


def record_of(path: Path) -> Record:
    """Return what a checkpoint's manifest says, without its CRC."""
    record = json.loads((path / MANIFEST).read_bytes())
    del record["crc32"]
    return record


def sealed(body: bytes) -> bytes:
    """Return a manifest whose bytes after the CRC are ``body``."""
    return HEAD % zlib.crc32(body) + body


def text_of(record: Record) -> bytes:
    """Return the bytes after the CRC for a record."""
    return json.dumps(record)[1:].encode()


def head_of(raw: bytes) -> bytes:
    """Return what the shard of a manifest begins with, "" where the manifest is refused."""
    try:
        manifest = decode(raw, "")
    except CheckpointError:
        return b""
    return b"" if manifest.parts else only_shard(manifest).header


def plant(path: Path, raw: bytes) -> None:
    """Give a checkpoint a manifest, and its shard the header that the manifest speaks of."""
    (path / MANIFEST).write_bytes(raw)
    if first := head_of(raw):
        data = (path / SHARD).read_bytes()
        before = 8 + int.from_bytes(data[:8], "little")
        (path / SHARD).write_bytes(first + data[before:])


def body_of(path: Path) -> bytes:
    return (path / MANIFEST).read_bytes()[HEAD_BYTES:]
