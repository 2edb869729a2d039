"""What ranks tell each other at a border, so that all of them plan alike (floor 2).

Activations that a rank measured, and policies that follow from them, differ between ranks by a few
bytes, or by much where batches do. Where fetches are gathered, frames decide in which order: then
all ranks take the division of the one that needs most. Where each reads shares by itself it keeps
its own. No rank updates anything before all have answered: until then others may read its shares.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hetero.crc import crc32
from hetero.device.comm import Comm, standing_for
from hetero.errors import OutOfMemory
from hetero.events import EventLog
from hetero.plan.division import Division
from hetero.train.engine.alike import compare


class Answer(NamedTuple):
    """One rank's row."""

    division: Division | None
    refusal: tuple[str, str, int, str] | None
    """Message, advice, bytes and tier of an OutOfMemory."""
    facts: int
    """The CRC of what the step depends on."""


def agreed_division(
    comm: Comm,
    divide: Callable[[], Division],
    log: EventLog,
    *,
    is_common: bool,
    facts: Mapping[str, str],
) -> Division:
    """Return the division of this rank, or one that all apply if it ``is_common``.

    Raises on all ranks OutOfMemory if one has no room, and DivergenceError if they are about to
    step in different ways: ``facts`` are what the step depends on.
    """
    error: OutOfMemory | None = None
    known = crc32(memoryview(repr(facts).encode()))
    try:
        mine = Answer(divide(), None, known)
    except OutOfMemory as refused:
        error = refused
        said = refused.what, refused.advice, refused.needed_bytes, str(refused.tier)
        mine = Answer(None, said, known)
    with standing_for(comm, log):
        rows = comm.agree(pickle.dumps(mine), "the division of HBM")
    told: list[Any] = [pickle.loads(row) for row in rows]  # from ranks of this very program
    if any(row.facts != known for row in told):
        advice = "change gradients and settings in the same way on every rank"
        compare(comm, facts, "what the step depends on", advice=advice)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and the program's, with its tensors
    for number, row in enumerate(told):
        if row.refusal is not None:
            message, advice, needed, tier = row.refusal
            where = f"on {comm.members.name(number)}: {message}"
            raise OutOfMemory(where, tier=tier, advice=advice, needed_bytes=needed)
    if not is_common and mine.division is not None:
        return mine.division
    most = max(told, key=lambda row: row.division.moving_bytes)  # the first of equals
    division: Division = most.division
    return division
