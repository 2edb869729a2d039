"""Hardware profiles as files: read, written, checked and found (floor 1; no torch).

A profile is TOML. Every number is ``{ v = 25.0, src = "est" }``, and measured ones also have a
``spread``; tables are ``{ rows = [[65536, 0.25], ...], src = "est" }``. ``src`` is a key of
``[src]``, which names sources in words. `hetero.plan.machine` has the sections and their units.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hetero.errors import ConfigError
from hetero.parse import Unparsable, read_text, toml_of
from hetero.plan.figures import Figure, KeyForm, Table, form_of
from hetero.plan.lint import broken, doubtful
from hetero.plan.machine import Citation, Io, MachineProfile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = 1
PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = (PACKAGE / "profiles", PACKAGE.parent / "profiles")  # of a wheel, and of a checkout
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
ADVICE = "hetero calibrate --lint FILE lists what is wrong with a profile"
PLAIN = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
T = TypeVar("T", bound="DataclassInstance")


# -- reading -------------------------------------------------------------------------------------


def load(path: str | Path) -> MachineProfile:
    """Return the profile in a file; ConfigError names the file, the key and the problem."""
    try:
        return parse(text_in(path))
    except ConfigError as error:
        raise ConfigError(f"profile {path}: {error.args[0]}", advice=error.advice) from error


def text_in(path: str | Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), advice="check the path") from error
    except ValueError as error:  # Unparsable, or a NUL in the path
        raise ConfigError(str(error), advice="check the path") from error


def parse(text: str) -> MachineProfile:
    """Return the profile in a TOML text; ConfigError lists every wrong key with its problem."""
    profile, problems = read(text)
    if profile is not None and not problems:
        problems = broken(profile)
    if profile is None or problems:
        raise ConfigError("; ".join(problems), advice=ADVICE)
    return profile


def lint(text: str) -> list[str]:
    """Return the problems and doubts in a profile's text, each with its key and the reason."""
    profile, problems = read(text)
    if profile is None:
        return problems
    impossible = broken(profile)
    return problems + impossible + ([] if impossible else doubtful(profile))


def lint_file(path: str | Path) -> list[str]:
    """Return the problems and doubts in a file; an unreadable file is one problem."""
    try:
        return lint(text_in(path))
    except ConfigError as error:
        return [error.args[0]]


def read(text: str) -> tuple[MachineProfile | None, list[str]]:
    """Return the profile in a text, None if it cannot be understood, and the problems of form."""
    try:
        given = toml_of(text, parse_float=Decimal)
    except Unparsable as error:
        return None, [f"not TOML: {error}"]
    problems = []
    schema = given.pop("schema", None)
    if schema != SCHEMA or isinstance(schema, bool):
        problems.append(f"schema: {schema!r} is not {SCHEMA}, which this version reads")
    reader = ProfileReader(given.pop("src", {}))
    profile = reader.section(MachineProfile, {**given, "sources": reader.sources}, "")
    return profile, problems + reader.problems


class ProfileReader:
    """Turns parsed TOML into sections, and collects problems."""

    def __init__(self, sources: Any) -> None:
        self.problems: list[str] = []
        self.sources: tuple[Citation, ...] = ()
        if not isinstance(sources, dict) or not all(isinstance(t, str) for t in sources.values()):
            self.problems.append('src: takes lines of key = "where numbers come from"')
        else:
            self.sources = tuple(Citation(key, text) for key, text in sources.items())
        self._known = {source.key for source in self.sources}

    def section(self, kind: type[T], given: Any, where: str) -> T | None:
        """Return a section, None if a part of it is missing or wrong."""
        if not isinstance(given, dict):
            self.problems.append(f"{where.rstrip('.')}: takes a table")
            return None
        hints = typing.get_type_hints(kind)
        fields = {form_of(f).key: f for f in dataclasses.fields(kind)}
        self._unknown(given, list(fields), where)
        found: dict[str, Any] = {}
        whole = True
        for key, f in fields.items():
            if key in given:
                value = self._value(hints[f.name], given[key], form_of(f), f"{where}{key}")
                found[f.name] = value
                whole = whole and value is not None
            elif is_needed(f):
                self.problems.append(f"{where}{key}: missing")
                whole = False
        return kind(**found) if whole else None

    def _unknown(self, given: dict[str, Any], known: list[str], where: str) -> None:
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f", did you mean {near[0]}?" if near else ""
                self.problems.append(f"{where}{key}: unknown key{hint}")

    def _value(self, hint: Any, given: Any, form: KeyForm, where: str) -> Any:
        kind = without_none(hint)
        if kind is Figure or kind is Table:
            return self._sourced(kind, given, form, where)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self.section(kind, given, f"{where}.")
        if typing.get_origin(kind) is tuple:
            return self._list(given, where)
        right = type(given) in (int, Decimal) if kind is float else type(given) is kind
        if not right:
            self.problems.append(f"{where}: {shown(given)} is not {PLAIN[kind]}")
            return None
        return float(given) if kind is float else given

    def _list(self, given: Any, where: str) -> tuple[Any, ...] | None:
        if isinstance(given, (list, tuple)) and all(isinstance(x, (str, Citation)) for x in given):
            return tuple(given)
        self.problems.append(f"{where}: takes a list of strings")
        return None

    def _sourced(
        self, kind: type[Figure] | type[Table], given: Any, form: KeyForm, where: str
    ) -> Figure | Table | None:
        """Return numbers with their source; a figure is read as a table of one number."""
        key, example = ("v", "...") if kind is Figure else ("rows", "[...]")
        if not isinstance(given, dict):
            said = f"{shown(given)} has" if kind is Figure else "has"
            self.problems.append(
                f"{where}: {said} no source; write {{ {key} = {example}, src = ... }}"
            )
            return None
        self._unknown(given, [key, "src", "spread"], f"{where}.")
        rows, width = given.get(key), len(form.exponents)
        if kind is Figure:
            rows = [[rows]]
        if not isinstance(rows, list) or not rows or any(not is_row(r, width) for r in rows):
            self.problems.append(f"{where}.rows: takes rows of {width} numbers")
            return None
        scaled = [
            [self._number(x, e, where) for x, e in zip(row, form.exponents, strict=True)]
            for row in rows
        ]
        source = given.get("src")
        if source not in self._known:
            said = "has no src" if source is None else f"src {source!r} is not under [src]"
            self.problems.append(f"{where}: {said}")
        spread = self._number(given.get("spread", 0), 0, f"{where}.spread") or 0.0
        found = tuple(tuple(x for x in row if x is not None) for row in scaled)
        if any(len(row) < width for row in found):
            return None
        if kind is Figure:
            return Figure(found[0][0], str(source or ""), spread)
        return Table(found, str(source or ""), spread)

    def _number(self, given: Any, exponent: int, where: str) -> float | None:
        """Return a number times a power of ten, exactly rounded."""
        if type(given) in (int, Decimal):
            try:
                value = float(Decimal(given).scaleb(exponent))
            except (DecimalException, OverflowError):
                value = math.nan
            if math.isfinite(value):
                return value
        self.problems.append(f"{where}: {shown(given)} is not a finite number")
        return None


def is_row(given: Any, width: int) -> bool:
    return isinstance(given, list) and len(given) == width


def is_needed(f: dataclasses.Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def without_none(hint: Any) -> Any:
    """Return X of ``X | None``."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def shown(given: Any) -> str:
    return str(given) if isinstance(given, Decimal) else repr(given)


# -- writing -------------------------------------------------------------------------------------


def dump(profile: MachineProfile) -> str:
    """Return a profile as TOML: `parse` gives the same profile back, number for number."""
    lines = [f"schema = {SCHEMA}"]
    lines += [f"name = {quoted(profile.name)}", f"kind = {quoted(profile.kind)}"]
    lines += ["", "[src]"]
    lines += [f"{bare(source.key)} = {quoted(source.text)}" for source in profile.sources]
    for section, key in sections(profile):
        lines += section_lines(section, key)
    return "\n".join(lines) + "\n"


def sha256(profile: MachineProfile) -> str:
    """Return the digest of a profile's canonical text, in hexadecimal digits."""
    return hashlib.sha256(dump(profile).encode()).hexdigest()


def sections(of: Any) -> Iterator[tuple[Any, str]]:
    """Yield the sections in a section, with their keys; those with only defaults are left out."""
    for f in dataclasses.fields(of):
        value = getattr(of, f.name)
        whole = dataclasses.is_dataclass(value) and not isinstance(value, (Figure, Table, Io))
        if whole and (is_needed(f) or f.default_factory is MISSING or value != f.default_factory()):
            yield value, form_of(f).key


def section_lines(section: Any, where: str) -> Iterator[str]:
    """Yield the lines of a section and its subsections; None values are left out."""
    inner = list(sections(section))
    lines = []
    for f in dataclasses.fields(section):
        value, form = getattr(section, f.name), form_of(f)
        if isinstance(value, Io):
            lines.append(f"{form.key} = {inline(value)}")
        elif isinstance(value, (Figure, Table)) or not dataclasses.is_dataclass(value):
            lines += [] if value is None else [f"{form.key} = {written(value, form)}"]
    if lines or not inner:
        yield from ("", f"[{where}]", *lines)
    for part, key in inner:
        yield from section_lines(part, f"{where}.{key}")


def written(value: Any, form: KeyForm) -> str:
    if isinstance(value, Figure):
        return with_source(f"v = {number(value.value, form.exponents[0])}", value)
    if isinstance(value, Table):
        rows = ", ".join(
            f"[{', '.join(number(x, e) for x, e in zip(row, form.exponents, strict=True))}]"
            for row in value.rows
        )
        return with_source(f"rows = [{rows}]", value)
    if isinstance(value, tuple):
        return f"[{', '.join(quoted(text) for text in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else number(value, 0)


def with_source(text: str, of: Figure | Table) -> str:
    spread = f", spread = {number(of.spread, 0)}" if of.spread else ""
    return f"{{ {text}, src = {quoted(of.source)}{spread} }}"


def inline(section: Any) -> str:
    pairs = [
        f"{f.name} = {written(getattr(section, f.name), form_of(f))}"
        for f in dataclasses.fields(section)
    ]
    return f"{{ {', '.join(pairs)} }}"


def number(value: float, exponent: int) -> str:
    """Return a number over a power of ten, in the fewest digits that are exact."""
    return f"{Decimal(repr(value)).scaleb(-exponent).normalize():f}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def bare(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else quoted(key)


# -- finding -------------------------------------------------------------------------------------


def names() -> tuple[str, ...]:
    """Return the names of hetero's own profiles."""
    return tuple(sorted(path.stem for path in folder().glob("*.toml")))


def find(name_or_path: str | Path) -> MachineProfile:
    """Return the profile in a file, or hetero's own of that name."""
    path = Path(name_or_path)
    if path.is_file():
        return load(path)
    name = str(name_or_path)
    if name in names():
        return load(folder() / f"{name}.toml")
    near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
    hint = f", did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"profile={name!r} is no file and no profile that comes with hetero{hint}",
        advice=f"profiles: {', '.join(names())}; hetero calibrate writes one of this machine",
    )


def folder() -> Path:
    """Return the directory of hetero's own profiles."""
    return next((path for path in FOLDERS if path.is_dir()), FOLDERS[0])
