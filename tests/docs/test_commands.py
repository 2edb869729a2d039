"""Every command line in the documentation is one that hetero understands."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import click
import pytest

from hetero.cli import main
from hetero.recipes.flags import RunCommand
from tests.docs.pages import PAGES, ROOT, command_lines, read

LINES = [(line.page, line) for page in PAGES for line in command_lines(page)]


@cache
def benchmarks() -> set[str]:
    """Return the names of benchmarks, from their source: importing them needs torch."""
    tree = ast.parse((ROOT / "benchmarks/runner.py").read_text())
    tables = (
        n for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.value, ast.Dict)
    )
    (table,) = (n.value for n in tables if ast.unparse(n.target) == "BENCHES")
    return {ast.literal_eval(key) for key in table.keys if key is not None}


def check(words: list[str], is_whole: bool) -> None:
    """Parse the words after ``hetero``; click.ClickException for what it does not understand."""
    name, *rest = words
    command = main.get_command(click.Context(main), name)
    if command is None:
        raise click.UsageError(f"there is no command {name}")
    context = click.Context(command, info_name=name, **command.context_settings)
    if isinstance(command, RunCommand):  # all but its own words are the script's
        if rest:
            command.parse_args(context, rest)
        return
    values, leftover, _ = command.make_parser(context).parse_args(rest)
    if set(leftover) - {"..."}:
        raise click.UsageError(f"too many words: {leftover}")
    for param in command.params:
        check_value(context, param, values.get(param.name or ""), is_whole)
    check_names(name, values)


def check_value(context: click.Context, param: click.Parameter, given: Any, is_whole: bool) -> None:
    """Refuse a value of another type; one in capitals, or ..., stands for any."""
    if isinstance(given, str) and not isinstance(param.type, click.Path):
        if not given.isupper() and given != "...":
            param.type_cast_value(context, given)
    elif is_whole and param.required and not isinstance(given, str):
        raise click.MissingParameter(ctx=context, param=param)


def check_names(command: str, values: Mapping[str, Any]) -> None:
    """Refuse a profile that is not there, and a benchmark."""
    known = {"profile": {path.stem for path in (ROOT / "profiles").glob("*.toml")}}
    if command == "bench":
        known["name"] = benchmarks()
    for key, names in known.items():
        given = values.get(key)
        if isinstance(given, str) and re.fullmatch(r"[a-z0-9-]+", given) and given not in names:
            raise click.UsageError(f"there is no {key} {given}")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_of_a_page_parses(page: str) -> None:
    for _, line in (found for found in LINES if found[0] == page):
        check(line.words, line.is_whole)


@pytest.mark.parametrize(
    "wrong",
    [
        "trian",
        "train --hmb 20GiB",
        "train --precision bf61",
        "plan --profile rtx4090",
        "plan llama-3-8b --ranks many",
        "plan llama-3-8b --profile rtx4091",
        "bench overheda",
        "doctor now",
    ],
)
def test_a_wrong_command_line_is_found(wrong: str) -> None:
    with pytest.raises(click.ClickException):
        check(wrong.split(), True)


def test_command_lines_are_found_in_blocks_and_in_sentences() -> None:
    assert len(LINES) > 100
    found = [" ".join(line.words) for page, line in LINES if page == "README.md"]
    assert "bench paged" in found
    assert any(words.startswith("plan llama-3-8b --profile") for words in found)


def test_every_benchmark_that_is_shown_has_its_row() -> None:
    shown = read("docs/explain/benchmarks.md") + read("docs/ranks.md")
    assert {name for name in benchmarks() if f"`hetero bench {name}`" not in shown} == set()
