"""Parts of a manifest, one for each shard of several ranks: values, their JSON, every check (no
I/O).

A part is a line of ASCII JSON next to its shard, and begins with a CRC as a manifest does. It lists
the shard's slices with the CRCs of their blocks, and holds what its rank alone knows. The manifest
names the size of each shard and the CRC of its part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hetero.checkpoint.manifest import (
    CRCS,
    HEAD,
    UNSAFE,
    Manifest,
    PartRecord,
    SavedTensor,
    Unfit,
    check_crc,
    fields,
    parse,
    plain,
    shard_name,
)
from hetero.checkpoint.manifest import layout as layout_of
from hetero.checkpoint.slices import Shard, Slice
from hetero.crc import crc32
from hetero.errors import CheckpointCorrupt, UnsafeCheckpoint

FORMAT = "hetero checkpoint part"
FIELDS = {"crc32": str, "format": str, "version": int, "step": int, "shard": int}
FIELDS |= {"slices": list, "meta": dict}


def encode(step: int, shard: Shard, meta: dict[str, Any]) -> bytes:
    """Return a part's bytes."""
    rows = zip(shard.slices, shard.crcs, strict=True)
    record = {
        "format": FORMAT,
        "version": shard.version,
        "step": step,
        "shard": shard.number,
        "slices": [[each.number, each.first, each.end, crcs] for each, crcs in rows],
        "meta": plain(meta),
    }
    body = json.dumps(record, separators=(",", ":"))[1:].encode("ascii")
    return HEAD % crc32(body) + body


def crc_of(raw: bytes) -> str:
    """Return the CRC that a part begins with."""
    return raw[10:18].decode("ascii", "replace")


def decode(raw: bytes, where: str, manifest: Manifest, number: int) -> tuple[Shard, dict[str, Any]]:
    """Return a shard and what its rank told, from the bytes of the file ``where``; nothing in them
    is trusted. Raises CheckpointCorrupt if they are not those saved, UnsafeCheckpoint if they
    declare values that no save declares."""
    record = manifest.parts[number]
    try:
        check_crc(raw)
        if crc_of(raw) != record.crc:
            raise Unfit(f"its CRC is {crc_of(raw)}, and the manifest names {record.crc}")
    except Unfit as error:
        raise CheckpointCorrupt(
            f"{where} is damaged: {error}", advice="use another checkpoint"
        ) from None
    try:
        return _decode(raw, manifest, number, record)
    except Unfit as error:
        raise UnsafeCheckpoint(f"{where}: {error}", advice=UNSAFE) from None


def _decode(
    raw: bytes, manifest: Manifest, number: int, record: PartRecord
) -> tuple[Shard, dict[str, Any]]:
    _, name, version, step, shard, rows, meta = fields("the part", parse(raw), FIELDS)
    if (name, version) != (FORMAT, manifest.version):
        raise Unfit("it does not say that it is a part of this version")
    if (step, shard) != (manifest.step, number):
        raise Unfit(f"it is part {shard} of step {step}")
    found = [_row(f"slice {n}", row, manifest.entries) for n, row in enumerate(rows)]
    slices = tuple(each for each, _ in found)
    if any(a.number >= b.number for a, b in pairwise(slices)):
        raise Unfit("its slices are not in the order of their entries")
    if (end := layout_of(slices)[-1]) != record.n_bytes:
        raise Unfit(f"{shard_name(number)} is declared with {record.n_bytes} bytes, and has {end}")
    return Shard(number, slices, tuple(crcs for _, crcs in found), manifest.version), meta


def _row(what: str, row: Any, entries: Sequence[SavedTensor]) -> tuple[Slice, str]:
    """Return a slice and its CRCs."""
    kinds = (int, int, int, str)
    if type(row) is not list or [type(item) for item in row] != list(kinds):
        raise Unfit(f"{what} is no list of three numbers and CRCs")
    number, first, end, crcs = row
    if not 0 <= number < len(entries):
        raise Unfit(f"{what} is of an entry that is not there")
    entry = entries[number]
    if not 0 <= first <= end <= entry.numel:
        raise Unfit(f"{what} is not inside of {entry.label!r}")
    found = Slice(number, entry, first, end)
    if len(crcs) != 8 * found.n_blocks or not CRCS.fullmatch(crcs):
        raise Unfit(f"{what} does not have 8 hexadecimal digits for each of its blocks")
    return found, crcs
