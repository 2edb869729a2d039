"""The table of models and cards: cells are kept, and pages show them between their marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cards
from benchmarks.cards import Cell, keep, known_cells, table, write
from tests.docs.pages import read

FITS = Cell(True, 1.25, 6553.6, 3 * 2**30)
SHORT = Cell(problem="needs 94 GiB RAM")


def rows(page: str) -> set[str]:
    begin = page.index("<!-- cards: ")
    shown = page[begin : page.index("<!-- end of cards -->")].splitlines()
    return {line for line in shown if line.startswith("| ")}


def test_cells_are_kept_and_read_again(tmp_path: Path) -> None:
    given = {("gemma-2b", "rtx4090", "full"): FITS, ("gemma-2b", "rtx4090", "LoRA"): SHORT}
    for key, found in given.items():
        keep(tmp_path / "some" / "cells", key, found)

    assert known_cells(tmp_path / "some" / "cells") == given
    assert known_cells(tmp_path / "none") == {}


def test_a_cell_that_cannot_be_planned_says_why() -> None:
    assert "no-such-model" in cards.cell("no-such-model", "rtx4090", "full").problem


def test_a_table_has_a_row_a_model_and_way_and_says_what_is_missing() -> None:
    cells = {("gemma-2b", "rtx4090", "full"): FITS, ("llama-3-8b", "a100-80", "nf4"): SHORT}
    assert table(cells)[2:] == [
        "| gemma-2b | full | 1.25 s, 6,554 tokens/s, 3 GiB RAM | not planned |",
        "| llama-3-8b | nf4 | not planned | needs 94 GiB RAM |",
    ]


def test_a_page_gets_the_table_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- cards: x -->\nold\n<!-- end of cards -->\nb\n")
    write(page, ["new"])
    assert page.read_text() == "a\n<!-- cards: x -->\n\nnew\n\n<!-- end of cards -->\nb\n"

    page.write_text("no mark")
    with pytest.raises(SystemExit):
        write(page, ["new"])


def test_the_readme_shows_cells_of_the_whole_table() -> None:
    short, whole = rows(read("README.md")), rows(read("docs/start/will-it-fit.md"))
    assert 2 < len(short) < len(whole)
    assert short <= whole
