"""The table of models and cards: cells are kept, and pages show them between their marks."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from unittest.mock import create_autospec

import pytest

from benchmarks import cards
from benchmarks.cards import GIB, Cell, keep, known_cells, table, write
from hetero.rehearse.plan import Plan, TierPlan
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


@pytest.mark.parametrize(
    ("seconds", "fits", "taken", "tried"),
    [(1.04, True, 12, [12]), (1.06, True, 40, [12, 24]), (1.0, False, 40, [12, 24])],
)
def test_a_cell_has_little_ram_where_that_costs_little_time(
    seconds: float, fits: bool, taken: int, tried: list[int]
) -> None:
    asked = []

    def plan_with(host: int | None = None) -> Plan:
        asked.append(host)
        if host is None:
            return planned(1.0, 40, {"param": 10 * GIB, "activation": 30 * GIB})
        return planned(seconds, 12, {"param": 10 * GIB, "activation": 2 * GIB}, fits)

    assert cards.host_of(cards.frugal(plan_with)).peak_bytes == taken * GIB
    assert asked == [None, *(gib * GIB for gib in tried)]


def test_a_cell_without_activations_in_ram_is_planned_once() -> None:
    found = planned(1.0, 10, {"param": 10 * GIB})
    assert cards.frugal(lambda: found) is found


def planned(seconds: float, gib: int, at_peak: dict[str, int], fits: bool = True) -> Plan:
    plan = create_autospec(Plan, instance=True)
    plan.fits, plan.step_seconds = fits, seconds
    plan.tiers = [TierPlan("HOST", None, gib * GIB, at_peak, at_peak)]
    return cast("Plan", plan)


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
