"""Copies of a home's segments that the user's code sees (floor 1, mechanism).

[Note: copies that are shown]  A home on disk, or coded, cannot be aliased. A view of one of its
segments is a view of a private copy, which stands for the segment while a view is alive: writes to
the copy go home before anything reads or writes the home, and writes to the home go to the copy
too. Writes are found by a digest of the bits: numpy and ``.data`` move no version.
"""

from __future__ import annotations

import torch

from hetero.memory.codec import is_finite, refusal
from hetero.memory.home import Home
from hetero.memory.layout import Segment, row
from hetero.memory.views import Copy


def alias(home: Home, segment: Segment) -> torch.Tensor:
    """Return an alias of a segment's copy, made if missing."""
    if segment not in home.copies:
        home.copies[segment] = Copy(home.read(segment))
    return home.copies[segment].value.detach()


def written(home: Home, *, held: bool = True) -> list[Segment]:
    """Return the segments whose copies were written; drop other copies that are not held.
    Without ``held``, skip the copies that are held."""
    for segment, copy in list(home.copies.items()):
        if not (copy.held or copy.written):
            del home.copies[segment]
    return [s for s, copy in home.copies.items() if (held or not copy.held) and copy.written]


def take(home: Home, segment: Segment) -> None:
    """Write a segment's copy home; it then shows the home's value. Raises ConfigError, with the
    write undone, for values that a codec cannot hold."""
    value = home.copies[segment].value
    if home.codec.exact:
        home.write(segment, value)
        return
    finite = is_finite(value)
    if finite:
        block = home.codec.block
        whole = torch.zeros(-(-value.numel() // block) * block, dtype=value.dtype, device="cpu")
        whole[: value.numel()] = row(value)
        home.recode(segment.offset, whole)
    home.copies[segment].show(home.read(segment))
    if not finite:
        raise refusal(segment.spec.name, home.codec)


def refresh(home: Home) -> None:
    """Its bytes changed: let copies show them, except those that were written too."""
    for segment, copy in home.copies.items():
        if not copy.written:
            copy.show(home.read(segment))
