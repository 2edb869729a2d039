"""Files from elsewhere, mutated by the thousand: each is read, or refused with a typed error.

A `Parser` makes its inputs from a seed, so that a failure is named by a number and found again.
"""

from __future__ import annotations

import copy
import json
import random
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.errors import HeteroError
from tests.faults.fuzzer import VALUES, places, scramble

Attempt = Callable[[random.Random], str]
GROWTH_KIB = 512 * 1024
DEEP = 20_000
SPICES = [  # what parsers trip over, for any of their formats
    *(b"[" * DEEP, b"{" * DEEP, b'{"a":' * DEEP, b"a." * 3000, b'"\\ud800"', b"\xff\xfe", b"\0"),
    *(b"1" * 5000, b"0x" + b"f" * 3000, b"1e400", b"-1e999999999", b"NaN", b"Infinity", b"9" * 30),
    *(b"!!int ''", b"!!timestamp x", b"!!bool x", b"&a [*a]", b"<<: *a", b"1:" * 500 + b"1"),
    *(
        b"''",
        b'""',
        b"\n",
        b"=",
        b"- ",
        b": ",
        b"#",
        b"'''",
        b'"""',
        b"2001-99-99",
        b"true",
        b"null",
    ),
]


@dataclass(frozen=True)
class Parser:
    """One reader of files, ready to be tried on mutated ones."""

    name: str
    prepare: Callable[[Path], Attempt]
    """Given an empty directory, returns what makes an input of a seed, reads it, and says how it
    went; a typed error may leave it."""
    refused: float = 0.05
    """The least part of the inputs that has to be refused; as large a part has to be read."""


@dataclass
class Outcome:
    """What came of a number of inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Inputs that were neither read nor refused, by number."""

    @property
    def refused(self) -> int:
        return sum(n for name, n in self.counts.items() if name[0].isupper())

    @property
    def read(self) -> int:
        return sum(n for name, n in self.counts.items() if name[0].islower())


def ran(parser: Parser, directory: Path, count: int) -> Outcome:
    """Try inputs from number 0 on."""
    attempt, found = parser.prepare(directory), Outcome()
    for number in range(count):
        try:
            found.counts[attempt(random.Random(f"{parser.name} {number}"))] += 1
        except HeteroError as error:
            found.counts[type(error).__name__] += 1
            if not error.advice:
                found.wrong.append(f"{number}: {error!r} has no advice")
        except Exception as error:
            found.wrong.append(f"{number}: {error!r}"[:300])
    return found


def check(parser: Parser, directory: Path, count: int) -> Outcome:
    """Raise AssertionError where an input was neither read nor refused, or took memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = ran(parser, directory, count)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert not found.wrong, f"{len(found.wrong)} of {count}: {found.wrong[:5]}"
    assert min(found.refused, found.read) >= parser.refused * count, found.counts
    assert grown < GROWTH_KIB
    return found


# -- mutations -----------------------------------------------------------------------------------


def spoiled(raw: bytes, seeded: random.Random) -> bytes:
    """Return a text that was cut, repeated or spiced."""
    if seeded.random() < 0.5:
        return scramble(raw, seeded)
    at = seeded.randrange(len(raw) + 1)
    end = min(len(raw), at + seeded.choice([0, 0, 1, 5, 30]))
    return raw[:at] + seeded.choice(SPICES) + raw[end:]


def changed(record: Any, seeded: random.Random, within: Sequence[Any] = ()) -> Any:
    """Return a copy of JSON with one place changed, below ``within``; levels are as likely."""
    record = copy.deepcopy(record)
    home, way = record, list(within)
    for step in way:
        home = home[step]
    key = seeded.choice(list(home) if isinstance(home, dict) else range(len(home)))
    while isinstance(home[key], (dict, list)) and home[key] and seeded.random() < 0.8:
        home = home[key]
        key = seeded.choice(list(home) if isinstance(home, dict) else range(len(home)))
    act = seeded.randrange(5)
    if act == 0:
        del home[key]
    elif act == 1 and type(home[key]) in (int, float):
        home[key] += seeded.choice([-1, 1, 0.5, -4096, 2**31, 2**63])
    elif act == 2 and isinstance(home, list):
        home.insert(key, copy.deepcopy(seeded.choice(home)))
    elif act == 3:
        *way, other = seeded.choice(places(record))
        donor = record
        for step in way:
            donor = donor[step]
        home[key] = copy.deepcopy(donor[other])
    else:
        home[key] = copy.deepcopy(seeded.choice(VALUES))
    return record


def as_text(record: Any) -> bytes:
    return json.dumps(record).encode()
