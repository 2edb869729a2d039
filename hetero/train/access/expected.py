"""Accesses that a step will make, as far as its passes through modules tell (floor 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import nn

from hetero.plan.trace import Access, Trace
from hetero.train.model.units import Unit
from hetero.types import Phase


class Visit(NamedTuple):
    """A pass through the units of a module."""

    module: nn.Module
    phase: Phase
    from_the_end: bool = False
    """Whether the last unit comes first."""
    is_first: bool = False
    """Whether nothing comes before the module: backward of its first unit, as of an embedding,
    asks for no weights, since no gradient goes on from there."""


def expected(
    visits: Iterable[Visit], units: Sequence[Unit], needs: Sequence[tuple[int, ...]]
) -> Trace:
    """Return the trace of passes, each through its units in the order in which they are defined.

    It is a guess: what computes may come in another order, or need no weights.
    """
    below: dict[nn.Module, list[int]] = {}
    accesses: list[Access] = []
    for visit in visits:
        if visit.module not in below:
            inside = set(visit.module.modules())
            below[visit.module] = [at for at, unit in enumerate(units) if unit.module in inside]
        there = below[visit.module]
        if visit.phase is Phase.BACKWARD and visit.is_first:
            there = there[1:]
        there = there[::-1] if visit.from_the_end else there
        accesses += [Access(visit.phase, unit, needs[unit]) for unit in there]
    return Trace(tuple(access for access, _ in groupby(accesses)))  # as a cursor sees them
