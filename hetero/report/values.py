"""What a training loop tells of itself while it is recorded: its loss, its tokens (floor 4).

``values.jsonl`` in a run's directory has a JSON array per value: nanoseconds of the log's clock, a
name, a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hetero.errors import ConfigError

VALUES = "values.jsonl"
TOKENS = "tokens"
MAX_ROW = 1000  # characters
MAX_TIME = 2**62


class Value(NamedTuple):
    """A number that a loop told."""

    t_ns: int
    name: str
    value: float


def append_values(folder: Path, t_ns: int, values: Mapping[str, float]) -> None:
    """Write values that are known now."""
    rows = (json.dumps([t_ns, name, float(value)]) for name, value in values.items())
    with (folder / VALUES).open("a", encoding="utf-8") as file:
        file.writelines(f"{row}\n" for row in rows)


def read_values(folder: Path) -> Iterator[Value]:
    """Yield the values of a run's directory; one that a kill cut off ends at the cut."""
    path = folder / VALUES
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_ROW):
            if not line.endswith("\n"):
                return
            yield parsed(path, line)


def parsed(path: Path, line: str) -> Value:
    """Return the value of a row; ConfigError for one that no recording has."""
    try:
        t_ns, name, value = json.loads(line)
        found = Value(t_ns, name, float(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise wrong(path, line) from error
    if type(t_ns) is not int or type(name) is not str or abs(t_ns) > MAX_TIME:
        raise wrong(path, line)
    return found


def wrong(path: Path, line: str) -> ConfigError:
    message = f"{path}: no recording has the row {line.strip()[:80]}"
    return ConfigError(message, advice="record again, or remove the file")


def told(values: Sequence[Value], name: str) -> list[Value]:
    """Return the finite values of one name, in order of time."""
    rows = (row for row in values if row.name == name and math.isfinite(row.value))
    return sorted(rows, key=lambda row: row.t_ns)


def names_of(values: Sequence[Value]) -> list[str]:
    """Return the names in the order in which they were first told."""
    return list(dict.fromkeys(row.name for row in values))


class Curve(NamedTuple):
    """A value over time, as it is drawn: tokens as a rate."""

    name: str
    times_ns: tuple[int, ...]
    numbers: tuple[float, ...]


def curves(values: Sequence[Value], begin_ns: int) -> list[Curve]:
    """Return what to draw of each name; a rate is over the time since the value before."""
    found = []
    for name in names_of(values):
        rows = told(values, name)
        times = tuple(row.t_ns for row in rows)
        numbers = tuple(row.value for row in rows)
        if name == TOKENS:
            spans = zip((begin_ns, *times), times, numbers, strict=False)
            numbers = tuple(1e9 * n / max(1, after - before) for before, after, n in spans)
        if rows:
            found.append(Curve("tokens/s" if name == TOKENS else name, times, numbers))
    return found
