"""Part II: software from elsewhere. The tables lie beside this file, one for each package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lightning")

from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.campaigns.harness import Case, check, prepared

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("foreign_*.py"))
CASES = [
    case for table in TABLES for case in importlib.import_module(f"{__package__}.{table}").CASES
]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Every program has accelerate's state for itself."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_gives_the_numbers_of_the_stock_software(case: Case) -> None:
    if case.refusal is None:
        check(case)
        return
    error, words = case.refusal
    with pytest.raises(error, match=words):
        prepared(case)
