"""Part III: faults and hostile files. The tables lie beside this file, one for each subject."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.campaigns.fuzz import Parser, check

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("faults_*.py"))
PARSERS: list[Parser] = [
    parser
    for table in TABLES
    for parser in getattr(importlib.import_module(f"{__package__}.{table}"), "PARSERS", [])
]
SAMPLE, ALL = 40, 2000


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_file_that_was_tampered_with_is_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    check(parser, tmp_path, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_thousands_of_such_files_are_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    check(parser, tmp_path, ALL)
