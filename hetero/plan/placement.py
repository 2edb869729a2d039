"""Placement: which homes HBM and HOST hold, and which go to disk (floor 1, policy; no torch).

A bucket whose homes are all on HBM crosses no link and takes no time of the CPU: its weights are
read there, its gradients stay there, and it is updated there.

A byte of optimizer state or gradient moves twice a step, a byte of a parameter up to three times,
and the device waits for parameters. So HOST is given to parameters first, then to gradients, then
to masters and states, in the order in which the model computes. Every step visits the homes in the
same order, so a fixed part of them on HOST saves as many bytes as any replacement could (Belady),
and the first unit's update never waits for a disk. The choice changes only as HBM is divided anew:
HOST that homes on HBM have left holds some of those on disk, whose places there are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hetero.types import Kind

PRIORITY = (Kind.PARAM, Kind.GRAD, Kind.MASTER, Kind.STATE)


class BucketHomes(NamedTuple):
    """The homes of all kinds of one bucket."""

    bucket: int
    n_bytes: int


class HomePart(NamedTuple):
    """The home of one kind of one bucket."""

    kind: Kind
    bucket: int
    n_bytes: int


def hold(homes: Iterable[BucketHomes], hbm_bytes: int) -> frozenset[int]:
    """Return the buckets whose homes ``hbm_bytes`` of HBM hold, the first ones first."""
    held = set()
    for home in homes:
        if home.n_bytes <= hbm_bytes:
            hbm_bytes -= home.n_bytes
            held.add(home.bucket)
    return frozenset(held)


def place(parts: Iterable[HomePart], host_bytes: int) -> frozenset[tuple[Kind, int]]:
    """Return (kind, bucket) of the homes that no longer fit ``host_bytes``. ``parts`` are in the
    order in which the model computes."""
    parts = list(parts)
    return frozenset((part.kind, part.bucket) for part in parts) - lift(parts, host_bytes)


def lift(parts: Iterable[HomePart], host_bytes: int) -> frozenset[tuple[Kind, int]]:
    """Return (kind, bucket) of the homes that ``host_bytes`` hold, of ``parts`` in the order in
    which the model computes."""
    held = set()
    for part in sorted(parts, key=lambda part: PRIORITY.index(part.kind)):
        if part.n_bytes <= host_bytes:
            host_bytes -= part.n_bytes
            held.add((part.kind, part.bucket))
    return frozenset(held)
