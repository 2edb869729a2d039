"""Part I: programs against the core. The tables lie beside this file, one for each subject."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.campaigns.harness import Case, check, prepared

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("core_*.py"))
CASES = [
    case for table in TABLES for case in importlib.import_module(f"{__package__}.{table}").CASES
]


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_gives_the_bits_of_plain_torch_or_a_typed_error(case: Case) -> None:
    if case.refusal is None:
        check(case)
        return
    error, words = case.refusal
    with pytest.raises(error, match=words):
        prepared(case)
