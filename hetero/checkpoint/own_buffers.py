"""Buffers that each rank's forwards write, as running means (floor 4).

A checkpoint has those of the first rank among its entries. What another rank has instead is in the
part next to that rank's shard, so that ranks go on as if they had never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hetero.checkpoint.names import Names
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.values import decode_inside, encode_inside
from hetero.crc import crc32
from hetero.train.engine.engine import Engine
from hetero.train.engine.state_dict import at_hand

KEY = "buffers"  # of what a rank tells of itself
Buffers = Mapping[str, torch.Tensor]
"""In one dimension, by their names in the whole model."""


def digests(engine: Engine, names: Names) -> bytes:
    """Return what a rank tells the others of its buffers."""
    found = {
        name: crc32(memoryview(flat(buffer).view(torch.uint8).numpy()))
        for name, buffer in whole_ones(engine, names)
    }
    return json.dumps(found).encode()


def own_ones(engine: Engine, names: Names, rows: Sequence[bytes], rank: int) -> dict[str, Any]:
    """Return the buffers that are not those of the first rank that has them, as JSON.

    ``rows``: the `digests` of all ranks.
    """
    first: dict[str, int] = {}
    for row in rows[: rank + 1]:
        mine = json.loads(row)
        first = {**mine, **first}
    found = {
        name: flat(buffer)
        for name, buffer in whole_ones(engine, names)
        if mine[name] != first[name]
    }
    return {KEY: encode_inside(found)} if found else {}


def decoded(told: Mapping[str, Any], reader: CheckpointReader) -> Buffers:
    """Return the buffers among what a rank told; ValueError if they are not of the checkpoint's
    entries."""
    found: Buffers = decode_inside(told[KEY]) if KEY in told else {}
    for name, value in found.items():
        number = reader.find("buffer", name)
        entry = None if number is None else reader.entries[number]
        if entry is None or (f"torch.{entry.dtype}", entry.numel) != (
            str(value.dtype),
            value.numel(),
        ):
            raise ValueError(f"a rank's own buffer {name!r}")
    return found


def put(engine: Engine, names: Names, own: Buffers) -> None:
    """Write this rank's own buffers where they are of the model's shapes."""
    with torch.no_grad():
        for name, buffer in whole_ones(engine, names):
            if name in own and own[name].numel() == buffer.numel():
                buffer.copy_(own[name].view(buffer.shape))


def whole_ones(engine: Engine, names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers that ranks do not divide."""
    parts = engine.setup.parts
    for name, tensor in at_hand(engine.setup.model):
        if name.kind == "buffer" and parts.place(name.name, tensor) is None:
            yield names.whole(name.name), parts.local(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in RAM, one after the other, whatever view of others it is."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
