"""Figures that two pages show are the same, and diagrams have the names of the code."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from hetero.memory.chunk import LEGAL
from hetero.types import CopyState
from tests.docs.pages import PAGES, read

ALL = "docs/explain/benchmarks.md"
APART = ("docs/ranks.md", "docs/tensor-parallel.md", ALL)  # with figures of their own runs
NUMBER = re.compile(r"\d+(?:\.\d+)?")
BENCH = re.compile(r"`hetero bench ([a-z0-9-]+)`")
SHOWN = [page for page in PAGES if page not in APART and BENCH.search(read(page))]


def figures(text: str) -> dict[str, set[str]]:
    """Return the numbers in the rows of each benchmark; a row without a command goes on with it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    bench = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) < 3:
            continue
        match = BENCH.search(cells[0])
        bench = match[1] if match else bench if not cells[0] else ""
        if bench:
            found[bench] |= set(NUMBER.findall(" ".join(cells[1:])))
    return dict(found)


def sentences(text: str) -> dict[str, set[str]]:
    """Return the numbers of each paragraph that names one benchmark, by benchmark."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for paragraph in re.split(r"\n\n|\n(?=[*|])", text):
        names = set(BENCH.findall(paragraph))
        if len(names) == 1 and not paragraph.lstrip().startswith("|"):
            found[names.pop()] |= set(re.findall(r"(?<![\w.])\d+\.\d+", paragraph))
    return dict(found)


def explained(text: str, bench: str) -> set[str]:
    """Return the numbers of the paragraphs that explain a benchmark."""
    named = (p for p in re.split(r"\n\n|\n(?=\*)", text) if f"**`{bench}`" in p)
    return {number for paragraph in named for number in NUMBER.findall(paragraph)}


@pytest.mark.parametrize("page", SHOWN)
def test_a_figure_that_a_page_shows_is_that_of_the_benchmarks(page: str) -> None:
    known = figures(read(ALL))
    for bench, numbers in figures(read(page)).items():
        assert numbers - known[bench] == set(), bench
    for bench, numbers in sentences(read(page)).items():
        assert numbers - known[bench] - explained(read(ALL), bench) == set(), bench


def test_another_figure_in_a_row_or_a_sentence_is_found() -> None:
    known = figures("| `hetero bench a` | what | 1.5 |\n| | the same | 2.5 | 3 |")
    assert known == {"a": {"1.5", "2.5", "3"}}
    assert figures("| `hetero bench a` | what | 1.6 |")["a"] - known["a"] == {"1.6"}
    assert sentences("It took 1.7 (`hetero bench a`), see p2.") == {"a": {"1.7"}}


def test_the_states_and_moves_of_a_copy_are_those_of_the_code() -> None:
    (diagram,) = (
        block for block in read("docs/explain/how-it-works.md").split("```") if "ABSENT" in block
    )
    assert {state.name for state in CopyState} == set(re.findall(r"\b[A-Z]{5,}\b", diagram))
    moves = set(re.findall(r"\b(fetch|ready|flush|evict|discard|fail|write)\b", diagram))
    assert moves <= {why for _, _, why in LEGAL} and len(moves) == 7
