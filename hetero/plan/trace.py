"""The trace of a step: its accesses by unit, and the buckets of each (floor 1)."""

from __future__ import annotations

from typing import NamedTuple

from hetero.types import Phase


class Access(NamedTuple):
    """A unit needs its buckets at a program point."""

    phase: Phase
    unit: int
    buckets: tuple[int, ...]


class Trace(NamedTuple):
    """The accesses of one step, in order; `key` tells two traces apart."""

    accesses: tuple[Access, ...]

    @property
    def key(self) -> int:
        return hash(self.accesses)

    def uses(self) -> dict[int, list[int]]:
        """Return the positions at which each bucket is used, ascending."""
        found: dict[int, list[int]] = {}
        for position, access in enumerate(self.accesses):
            for bucket in access.buckets:
                places = found.setdefault(bucket, [])
                if not places or places[-1] != position:
                    places.append(position)
        return found
