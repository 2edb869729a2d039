"""Buffers that each rank's forwards write, as running means (floor 4).

A checkpoint has those of the first rank among its entries, as buffers. Of one that is not the same
on all ranks that have it, there is an entry of another kind with a row for each of the others, in
the order of ranks. Each rank saves its row, in its own shard; so the shard says whose it is. Ranks
that load read the row of the rank with their place, and go on as if they had never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from hetero.boxes import Arrangement
from hetero.checkpoint.manifest import SavedTensor
from hetero.checkpoint.names import Names
from hetero.checkpoint.rank_places import Division, RankPlace
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.slices import Slice
from hetero.checkpoint.values import decode_inside
from hetero.crc import crc32
from hetero.train.engine.engine import Engine
from hetero.train.engine.snapshot import Name, Part, Read, of_tensor
from hetero.train.engine.state_dict import at_hand

KIND = "own_buffer"
TOLD = "buffers"
"""Of what a rank tells of itself, in checkpoints that have such buffers as JSON."""


class Source(NamedTuple):
    """Where the values of a buffer are."""

    numel: int
    read: Read


Buffers = Mapping[str, Source]
"""By their names in the whole model."""


# -- of a save -----------------------------------------------------------------------------------


def digests(engine: Engine, names: Names) -> bytes:
    """Return what a rank tells the others of its buffers."""
    found = {
        name: crc32(memoryview(flat(buffer).view(torch.uint8).numpy()))
        for name, buffer in whole_ones(engine, names)
    }
    return json.dumps(found).encode()


def rows_of(told: Sequence[bytes]) -> dict[str, list[int]]:
    """Return which ranks have a row of each buffer that is not the same on all: those that have it,
    but the first of them. ``told``: the `digests` of all ranks."""
    found: dict[str, dict[int, int]] = {}
    for rank, each in enumerate(told):
        for name, digest in json.loads(each).items():
            found.setdefault(name, {})[rank] = digest
    return {
        name: list(digest_of)[1:]
        for name, digest_of in sorted(found.items())
        if len(set(digest_of.values())) > 1
    }


def entry_of_rows(buffer: SavedTensor, n_rows: int) -> SavedTensor:
    """Return the entry of the rows of a buffer."""
    return SavedTensor(KIND, buffer.name, "", buffer.dtype, (n_rows, buffer.numel))


def row_of(buffer: Part, row: int, n_rows: int) -> Part:
    """Return this rank's row as a part of that entry."""
    numel = prod(buffer.shape)
    return replace(
        buffer,
        name=Name(KIND, buffer.name.name),
        lies=Arrangement((n_rows, numel)),
        kept=slice(row * numel, (row + 1) * numel),
    )


# -- of a load -----------------------------------------------------------------------------------


def sources(reader: CheckpointReader, saved: Division, place: RankPlace) -> Buffers:
    """Return the buffers of the saved rank that is nearest to a place, where these are not those of
    the entries; ValueError if no save wrote them."""
    found = dict(told_sources(reader, saved, place))
    for number, entry in enumerate(reader.entries):
        if entry.kind == KIND:
            rows = dict(reader.shares(number))
            (numel,) = {each.end - each.first for each in rows.values()}
            (first, _), *_ = reader.shares(number_of(reader, entry.name, entry.dtype, numel))
            nearest = saved.nearest([first, *rows], place)
            if nearest in rows:
                found[entry.name] = source_in(reader, rows[nearest])
    return found


def source_in(reader: CheckpointReader, row: Slice) -> Source:
    def read(start: int, into: memoryview) -> None:
        reader.read(row.number, row.start_byte + start, into)

    return Source(row.end - row.first, read)


def told_sources(
    reader: CheckpointReader, saved: Division, place: RankPlace
) -> Iterator[tuple[str, Source]]:
    """Yield the buffers that the saved rank nearest to a place told as JSON."""
    told = reader.of_ranks[saved.nearest(range(saved.n_ranks), place)]
    found = decode_inside(told[TOLD]) if TOLD in told else {}
    for name, value in found.items():
        number_of(reader, name, str(value.dtype).removeprefix("torch."), value.numel())
        yield name, Source(value.numel(), partial(read_from, value))


def read_from(value: torch.Tensor, start: int, into: memoryview) -> None:
    into[:] = memoryview(value.view(torch.uint8).numpy())[start : start + len(into)]


def number_of(reader: CheckpointReader, name: str, dtype: str, numel: int) -> int:
    """Return the number of a buffer's entry; ValueError if it is of another dtype or size."""
    number = reader.find("buffer", name)
    entry = None if number is None else reader.entries[number]
    if number is None or entry is None or (entry.dtype, entry.numel) != (dtype, numel):
        raise ValueError(f"a rank's own buffer {name!r}")
    return number


def put(engine: Engine, names: Names, own: Buffers) -> bytes:
    """Write this rank's own buffers where they are of the model's shapes."""
    for name, buffer in whole_ones(engine, names):
        if name in own and own[name].numel == buffer.numel():
            part = of_tensor(Name("buffer", name), buffer)
            part.load(own[name].read, part.lies)
    return b""


# -- of both -------------------------------------------------------------------------------------


def whole_ones(engine: Engine, names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers that ranks do not divide."""
    parts = engine.setup.parts
    for name, tensor in at_hand(engine.setup.model):
        if name.kind == "buffer" and parts.place(name.name, tensor) is None:
            yield names.whole(name.name), parts.local(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in RAM, one after the other, whatever view of others it is."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
