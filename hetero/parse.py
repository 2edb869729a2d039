"""Parses untrusted text within bounds (floor 0, no torch).

Parsers trust their input: brackets use up the stack, a dotted key costs the square of its parts,
aliases double, and a few bytes become hundreds in memory. Any refusal is an `Unparsable`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_DEPTH = 16
MAX_BRACKETS = 2**21  # of any kind; this and MAX_COMMAS bound parsing's memory to 300 MiB
MAX_COMMAS = 2**22
MAX_DIGITS = 400  # of one integer: parsing time is quadratic
MAX_TEXT_BYTES = 2**18  # of settings
MAX_DOTS = 2**22  # sum over lines of squared dots: the cost of their keys
MAX_VALUES = 2**16
MAX_BITS = 64  # of an integer among settings
MAX_ALIASES = 16  # each may double the values
FOLD = bytes.maketrans(b"{}", b"[]")
NEITHER_QUOTE_NOR_BRACKET = bytes(set(range(256)) - set(b'"[]{}'))
YAML_BUGS = (IndexError, KeyError, AttributeError, TypeError)  # of PyYAML, at "!!int ''" and such


class Unparsable(ValueError):
    """A text is malformed or exceeds its bounds; the message says why."""


def read_text(path: str | Path, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a text file; OSError if it cannot be read, Unparsable if it is too large."""
    with Path(path).open("rb") as file:
        raw = file.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise Unparsable(f"it has more than {limit_bytes} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unparsable(f"not text: {error}") from error


# -- JSON ----------------------------------------------------------------------------------------


def json_of(raw: bytes, *, constants: bool = True) -> Any:
    """Return the JSON value; duplicate keys are refused, and NaN too without ``constants``."""
    brackets, commas = sum(map(raw.count, b"[]{}")), raw.count(b",")
    if brackets > MAX_BRACKETS or commas > MAX_COMMAS:
        raise Unparsable(f"it has {brackets} brackets and {commas} commas: too many")
    if deeper_than(raw, MAX_DEPTH):
        raise Unparsable(f"its brackets do not match, or are nested deeper than {MAX_DEPTH}")
    options: dict[str, Any] = {} if constants else {"parse_constant": no_constant}
    try:
        return json.loads(raw, object_pairs_hook=unique, parse_int=integer, **options)
    except Unparsable:
        raise
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Unparsable(f"it is no JSON: {str(error)[:200]}") from None


def deeper_than(raw: bytes, depth: int) -> bool:
    """Whether brackets are nested deeper, or left open; linear in the bytes."""
    text = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # a quote now begins or ends a string
    marks = text.translate(FOLD, NEITHER_QUOTE_NOR_BRACKET)
    parts = marks.replace(b'""', b"").split(b'"')  # few: at least a bracket lies between two quotes
    brackets = b"".join(parts[::2])
    for _ in range(depth):
        brackets = brackets.replace(b"[]", b"")  # the innermost of each nest
    return bool(brackets) or len(parts) % 2 == 0


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        last = {key: number for number, (key, _) in enumerate(pairs)}
        twice = next(key for number, (key, _) in enumerate(pairs) if last[key] > number)
        raise Unparsable(f"the key {twice[:80]!r} is there twice")
    return found


def integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Unparsable(f"a number of {len(digits)} digits is longer than {MAX_DIGITS}")
    return int(digits)


def no_constant(text: str) -> NoReturn:
    raise Unparsable(f"{text} is no JSON")


# -- settings ------------------------------------------------------------------------------------


def toml_of(text: str, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """Return the values of a TOML text."""
    if sum(line.count(".") ** 2 for line in text.splitlines()) > MAX_DOTS:
        raise Unparsable("a line has too many dots for the keys of settings")
    try:
        found = tomllib.loads(text, parse_float=parse_float)
    except RecursionError:
        raise Unparsable("its brackets are nested too deep") from None
    except (ValueError, ArithmeticError) as error:
        raise Unparsable(str(error)[:500]) from error
    check_values(found)
    return found


def yaml_of(text: str) -> Any:
    """Return the values of a YAML text; ImportError without PyYAML, which transformers brings."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # types of PyYAML are not there
        """Follows few aliases: each may hold others, twice."""

        aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(yaml.AliasEvent)
            if self.aliases > MAX_ALIASES:
                raise Unparsable(f"it has more than {MAX_ALIASES} aliases")
            return super().compose_node(parent, index)

    try:
        found = yaml.load(text, Loader)
    except Unparsable:
        raise
    except RecursionError:
        raise Unparsable("its values are nested too deep") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, *YAML_BUGS) as error:
        raise Unparsable(str(error)[:500]) from error
    check_values(found)
    return found


def check_values(found: Any) -> None:
    """Raise Unparsable for deeper, more or longer values than settings have."""
    level, count = [found], 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_VALUES:
            raise Unparsable(f"it has more than {MAX_VALUES} values")
        if any(isinstance(v, int) and v.bit_length() > MAX_BITS for v in level):
            raise Unparsable(f"an integer in it has more than {MAX_BITS} bits")
        tables = [v for v in level if isinstance(v, dict)]
        inside = [v for v in level if isinstance(v, (list, tuple, set))] + [
            side for table in tables for side in (table.keys(), table.values())
        ]
        if sum(map(len, inside)) > MAX_VALUES:
            raise Unparsable(f"it has more than {MAX_VALUES} values")
        level = [v for each in inside for v in each]
    if level:
        raise Unparsable(f"its values are nested deeper than {MAX_DEPTH}")
