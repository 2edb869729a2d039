"""Claims about a run, as CI states them: ``hbm.peak <= 23GiB`` (floor 4).

A claim is ``KEY OP VALUE``: a key of `Summary.figures`, with or without the unit that ends it
(``hbm.peak`` for ``hbm.peak_bytes``); one of ``< <= == >= >``; a number with a unit of bytes (``B,
kB, MB, GB, TB, KiB, MiB, GiB, TiB``), of time (``ns, us, ms, s, min``), ``%``, or with none.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.errors import ConfigError
from hetero.report.words import format_seconds, three
from hetero.types import format_bytes

FORM = re.compile(
    r"\s*([A-Za-z][\w.]*)\s*(<=|>=|==|<|>)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(\S*)\s*"
)
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
BYTES: dict[str, float] = {
    "b": 1,
    **{f"{letter}b": 1000**i for i, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**i for i, letter in enumerate("kmgt", 1)},
}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
SUFFIXES = ("_bytes", "_seconds", "_share", "_per_second")
EXAMPLE = "write it as 'hbm.peak <= 23GiB' or 'step.mean < 400ms'"


@dataclass(frozen=True, slots=True)
class Claim:
    """A bound on one figure."""

    key: str
    op: str
    value: float
    """In bytes or seconds, or a fraction of one."""
    text: str


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """A claim, and whether it holds for a run."""

    claim: Claim
    measured: float
    holds: bool

    def as_json(self) -> dict[str, Any]:
        return {"claim": self.claim.text, "measured": self.measured, "holds": self.holds}

    def __str__(self) -> str:
        word = "holds" if self.holds else "does not hold"
        return f"{self.claim.text}: {word}, measured {shown(self.claim.key, self.measured)}"


def parse(text: str, figures: Mapping[str, float]) -> Claim:
    """Return a claim about figures; ConfigError if its form or its key is wrong."""
    match = FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is no claim", advice=EXAMPLE)
    name, op, number, unit = match.groups()
    key = resolve(name, figures)
    try:
        value = float(number) * scale(key, unit)
    except (ValueError, KeyError):
        message = f"{number + unit!r} is no value for {key}"
        raise ConfigError(message, advice=f"{key} takes {units(key)}; {EXAMPLE}") from None
    return Claim(key, op, value, text.strip())


def resolve(name: str, figures: Mapping[str, float]) -> str:
    """Return the key that a name stands for; the name may leave out the unit at its end."""
    wanted = name.lower()
    for candidate in (wanted, *(wanted + suffix for suffix in SUFFIXES)):
        if candidate in figures:
            return candidate
    near = difflib.get_close_matches(wanted, figures, n=3, cutoff=0.4)
    known = ", ".join(near or sorted(figures))
    raise ConfigError(f"the summary has no {name!r}", advice=f"the closest keys are: {known}")


def scale(key: str, unit: str) -> float:
    """Return the factor of a unit; KeyError if the key is not measured in it."""
    if key.endswith("_seconds"):
        return SECONDS[unit.lower() or "s"]
    if key.endswith("_share"):
        return {"": 1.0, "%": 0.01}[unit]
    if key.endswith("_bytes"):
        return BYTES[unit.lower() or "b"]
    if key.endswith("bytes_per_second"):
        return BYTES[unit.lower().removesuffix("/s") or "b"]
    return {"": 1.0}[unit]


def units(key: str) -> str:
    """Return the units that a key takes, as text."""
    if key.endswith("_seconds"):
        return ", ".join(SECONDS)
    if key.endswith("_share"):
        return "a part of one, or %"
    if key.endswith(("_bytes", "bytes_per_second")):
        return "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB" + ("/s" if "per" in key else "")
    return "a plain number"


def shown(key: str, value: float) -> str:
    """Return a figure for people, with all its digits if people compare them."""
    if key.endswith("_seconds"):
        return format_seconds(value)
    if key.endswith("_share"):
        return f"{value * 100:.3g} %"
    if key.endswith("_bytes"):
        return f"{format_bytes(value)} ({round(value)} B)"
    if key.endswith("bytes_per_second"):
        return f"{format_bytes(value)}/s"
    return f"{value:g}" if isinstance(value, int) else three(value)


def judge(texts: Sequence[str], figures: Mapping[str, float]) -> list[ClaimVerdict]:
    """Return whether each claim holds; judge none if one cannot be read."""
    claims = [parse(text, figures) for text in texts]
    return [
        ClaimVerdict(claim, figures[claim.key], COMPARE[claim.op](figures[claim.key], claim.value))
        for claim in claims
    ]
