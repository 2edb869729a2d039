"""The words of the house: tiers, kinds, lanes and phases (floor 0, no torch)."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any


class Tier(IntEnum):
    """Where bytes live, fastest first."""

    GATHERED = 0
    HBM = 1
    HOST = 2
    NVME = 3


class Kind(Enum):
    """The purpose of bytes; PARAM, GRAD, MASTER and STATE of a bucket share its index space."""

    __hash__ = object.__hash__  # not of their names, in Python: they are keys on the hot path

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    STATE = "state"
    ACTIVATION = "activation"
    BUFFER = "buffer"
    POOL = "pool"


class Lane(Enum):
    """One direction of a link, or one engine: the rows of every timeline."""

    __hash__ = object.__hash__  # not of their names, in Python: they are keys on the hot path

    COMPUTE = "compute"
    UPDATE = "update"
    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"
    GATHER = "gather"
    REDUCE = "reduce"
    READ = "read"
    WRITE = "write"


class Phase(Enum):
    """The part of a step in which a unit is accessed; the value is what schedules print."""

    __hash__ = object.__hash__  # not of their names, in Python: they are keys on the hot path

    FORWARD = "F"
    BACKWARD = "B"
    EVAL = "E"


class CopyState(IntEnum):
    """State of one copy of one chunk: (chunk, kind, tier)."""

    ABSENT = 0
    FILLING = 1
    CLEAN = 2
    DIRTY = 3
    FLUSHING = 4


def format_bytes(n_bytes: float) -> str:
    """Return a byte count for people, in binary units: ``1536 -> '1.5 KiB'``."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} EiB"


def noop(*_: Any) -> None:
    """Do nothing: a callback without effect."""
