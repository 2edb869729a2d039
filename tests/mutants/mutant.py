"""A mutant: a bug as a patch. Its file reads

    # what the bug is, in one line or more
    # tests: tests/memory/test_pool.py -k "arguments of pytest"
    --- hetero/memory/pool.py
    @@
     a line that stays
    -a line as it is
    +a line as the bug has it

There are no line numbers: the lines that are there must stand together in one place of the file,
and in no other. So a patch survives moves, but for its path, and edits elsewhere.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TESTS = "# tests: "
FILE = "--- "
HUNK = "@@"


class Edit(NamedTuple):
    """Lines of one file, and those that the bug has in their place."""

    path: str
    before: str
    after: str


class Mutant(NamedTuple):
    name: str
    bug: str
    tests: tuple[str, ...]
    """Arguments of pytest that select the tests which must fail."""
    edits: tuple[Edit, ...]


class DoesNotApply(Exception):
    """The lines of an edit stand nowhere, or in several places."""


def mutants(folder: Path = HERE) -> list[Mutant]:
    """Return all of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.patch"))]


def read(path: Path) -> Mutant:
    lines = path.read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    bug = " ".join(line[1:].strip() for line in header if not line.startswith(TESTS))
    tests = [line.removeprefix(TESTS) for line in header if line.startswith(TESTS)]
    return Mutant(path.stem, bug, tuple(shlex.split(" ".join(tests))), edits(lines[len(header) :]))


def edits(lines: list[str]) -> tuple[Edit, ...]:
    """Return the edits of a patch without its header."""
    found: list[Edit] = []
    where = ""
    for line in lines:
        kind, rest = line[:1], line[1:] + "\n"
        if line.startswith(FILE):
            where = line.removeprefix(FILE).strip()
        elif line.startswith(HUNK):
            found.append(Edit(where, "", ""))
        else:
            path, before, after = found[-1]
            found[-1] = Edit(path, before + rest * (kind != "+"), after + rest * (kind != "-"))
    return tuple(found)


def applied(edit: Edit, text: str) -> str:
    """Return a file's text with the bug in it; raises DoesNotApply."""
    places = [found.start() for found in re.finditer(f"^{re.escape(edit.before)}", text, re.M)]
    if len(places) != 1:
        raise DoesNotApply(f"{edit.path}: its lines stand in {len(places)} places")
    return text[: places[0]] + edit.after + text[places[0] + len(edit.before) :]
