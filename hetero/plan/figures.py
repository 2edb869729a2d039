"""The numbers of a profile, each with its source, and how a file writes them (no torch)."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, NamedTuple

from hetero.plan.rates import Rows


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, the key of its source, and the spread of its samples."""

    value: float
    source: str
    spread: float = 0.0
    """Interquartile range of the samples over their median; 0 without samples."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers of one source; the last column is a function of the others."""

    rows: Rows
    source: str
    spread: float = 0.0
    """The widest spread of a row."""


class KeyForm(NamedTuple):
    """How a file writes a field: its key, and a power of ten for each number of a row."""

    key: str
    exponents: tuple[int, ...]
    zero: bool
    """Whether zero is a sensible value, as of bytes and never of a rate."""


def form(key: str, *exponents: int, zero: bool = False) -> dict[str, KeyForm]:
    return {"form": KeyForm(key, exponents or (0,), zero)}


def optional(key: str, *exponents: int, zero: bool = False) -> Any:
    """Return a field that a file may leave out."""
    return field(default=None, metadata=form(key, *exponents, zero=zero))


def form_of(f: Field[Any]) -> KeyForm:
    """Return how a file writes a field; by default under its own name."""
    found: KeyForm = f.metadata.get("form", KeyForm(f.name, (0,), False))
    return found
